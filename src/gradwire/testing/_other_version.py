"""Imported by a worker, it makes the worker say that it is of another version; for `gradwire.testing.check_cluster`."""

from __future__ import annotations

from gradwire import versions

versions.GRADWIRE_VERSION = "0.0.0+other"
