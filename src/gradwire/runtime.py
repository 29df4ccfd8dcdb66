"""The composition root: what a complete worker is made of.

`gradwire.rpc` builds workers that make and serve calls. The layers above it (references, autograd, optimizers) join every
worker by adding a function to `gradwire.rpc.worker.attachments` here, so that rpc need not know them.
"""

from __future__ import annotations

import gradwire.autograd.worker
from gradwire.rpc.worker import attachments, start_worker

__all__ = ["attachments", "start_worker"]

if gradwire.autograd.worker.attach not in attachments:
    attachments.append(gradwire.autograd.worker.attach)
