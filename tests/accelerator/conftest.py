"""Workers with a stand-in accelerator; one cluster for each file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from accelerator import device
from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck
from per_file import leak_check, template_ends_with_the_session, template_is_prepared

__all__ = ["leak_check", "template_ends_with_the_session", "template_is_prepared"]


@pytest.fixture(scope="session", autouse=True)
def accelerator() -> None:
    """The device in this process, with the threads that torch's engine starts for it once and keeps."""
    try:
        device.load()
    except device.NoCompiler as reason:
        pytest.skip(str(reason))
    torch.ones(1, device=device.NAME, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def cluster(accelerator: None, leak_check: LeakCheck) -> Iterator[Cluster]:
    """Two workers that have the device; with the driver three."""
    with Cluster.local(2) as cluster:
        for worker in cluster.workers:
            worker.call(device.load)
        yield cluster
