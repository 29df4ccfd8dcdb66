"""Workers with a stand-in accelerator; one cluster for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from accelerator import device
from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck
from per_file import leak_check, template_ends_with_the_session, template_is_prepared

__all__ = ["leak_check", "template_ends_with_the_session", "template_is_prepared"]


@pytest.fixture(scope="module")
def cluster(leak_check: LeakCheck) -> Iterator[Cluster]:
    """Three workers that have the device, and a driver that has none."""
    try:
        device.build()
    except device.NoCompiler as reason:
        pytest.skip(str(reason))
    with Cluster.local(3) as cluster:
        for worker in cluster.workers:
            worker.call(device.load)
        yield cluster
