"""Workers with a stand-in accelerator; one cluster for each file."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from accelerator import device
from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck
from per_file import leak_check, template_ends_with_the_session, template_is_prepared

__all__ = ["leak_check", "template_ends_with_the_session", "template_is_prepared"]

_FOLDER = Path(__file__).parent
_worker_environment: dict[str, str] = {}


def pytest_configure() -> None:
    """Look for the devices, and leave them to workers."""
    try:
        device.check_there()
    except device.TooFewDevices as reason:
        pytest.exit(str(reason), returncode=1)
    _worker_environment.update(device.hide_from_driver())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave time for a build of the stand-in, which whatever test comes first waits for."""
    if device.is_prepared():
        return
    longer = pytest.mark.timeout(float(config.getini("timeout")) + device.BUILD_S)
    for item in items:
        if item.path.parent == _FOLDER:
            item.add_marker(longer)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except device.NeedsStandIn as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def device_maps() -> dict[str, dict[str, str]]:
    """Those of the cluster; files that need some have a fixture of this name."""
    return {}


@pytest.fixture(scope="module")
def cluster(leak_check: LeakCheck, device_maps: dict[str, dict[str, str]]) -> Iterator[Cluster]:
    """Three workers that have the device, and a driver that has none."""
    try:
        device.prepare()
    except device.NoCompiler as reason:
        pytest.skip(str(reason))
    with Cluster.local(3, env=_worker_environment, device_maps=device_maps) as cluster:
        for worker in cluster.workers:
            worker.call(device.load)
        yield cluster
