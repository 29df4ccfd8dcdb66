"""Checkpoints of objects on many workers, in safetensors files: no pickle, atomic, loadable anywhere.

checkpoint.save("run1", {"model": encoder, "optim": opt, "step": 7})       # each worker writes its own objects
checkpoint.load("run1", {"model": encoder, "optim": opt})["step"]          # on any number of workers
checkpoint.read("run1")["model"]                                           # a plain state dict, in one process
"""

from __future__ import annotations

from gradwire.checkpoint.api import SavedEntry, SavedFile, Summary, inspect, load, read, save, verify
from gradwire.checkpoint.owner import allow_directory

__all__ = ["SavedEntry", "SavedFile", "Summary", "allow_directory", "inspect", "load", "read", "save", "verify"]
