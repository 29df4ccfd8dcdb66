"""Imported by a worker, it makes the worker say that it is of another version; for `gradwire.testing.check_cluster`."""

from __future__ import annotations

import gradwire

gradwire.__version__ = "0.0.0+other"
