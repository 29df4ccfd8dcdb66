"""Makes a worker that imports it report another version; for `gradwire.testing.check_cluster`."""

from __future__ import annotations

from gradwire import versions

versions.GRADWIRE_VERSION = "0.0.0+other"
