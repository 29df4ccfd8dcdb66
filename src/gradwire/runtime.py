"""The composition root: what a complete worker is made of.

`gradwire.rpc` builds workers that make and serve calls. The layers above it (references, autograd, optimizers) join every
worker by adding a function to `gradwire.rpc.worker.attachments` here, so that rpc need not know them; and names that people
look for in `gradwire.rpc`, but that those layers define, are put there.
"""

from __future__ import annotations

import gradwire.autograd.autocast
import gradwire.autograd.references
import gradwire.autograd.worker
import gradwire.rref.creation
import gradwire.rref.references
from gradwire import rpc, rref
from gradwire.rpc.worker import attachments, start_worker

__all__ = ["attachments", "start_worker"]

for _attach in (
    gradwire.autograd.worker.attach,
    gradwire.autograd.autocast.attach,
    gradwire.rref.references.attach,
    gradwire.rref.creation.attach,
):
    if _attach not in attachments:
        attachments.append(_attach)
for _name in ("RRef", "PyRRef", "remote"):
    setattr(rpc, _name, getattr(rref, _name))
