"""Checkpoints of what lives on many workers, in safetensors files: no pickle, whole at every moment, loadable anywhere.

checkpoint.save("run1", {"model": encoder, "optim": opt, "step": 7})       # each worker writes what it has
checkpoint.load("run1", {"model": encoder, "optim": opt})["step"]          # on any number of workers
checkpoint.read("run1")["model"]                                           # a plain state dict, in one process
"""

from __future__ import annotations

from gradwire.checkpoint.api import inspect, load, read, save, verify
from gradwire.checkpoint.owners import allow_directory
from gradwire.checkpoint.summary import SavedEntry, SavedFile, Summary

__all__ = ["SavedEntry", "SavedFile", "Summary", "allow_directory", "inspect", "load", "read", "save", "verify"]
