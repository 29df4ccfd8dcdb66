"""The check of device maps when workers meet."""

from __future__ import annotations

import pytest

from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError
from gradwire.rpc.device_maps import DeviceReport, check_device_maps, report_devices

_TWO = {"cuda": 2}


def _check(*reports: DeviceReport, knows_all: bool = True) -> None:
    check_device_maps({f"worker{rank}": report for rank, report in enumerate(reports)}, knows_all=knows_all)


def test_maps_between_devices_that_exist() -> None:
    both = {"worker0": {"cuda:0": "cuda:1"}, "worker1": {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cpu": "cpu"}}
    _check(DeviceReport(_TWO, both, ("cuda:0", "cuda:1")), DeviceReport(_TWO, {"worker0": {"cpu": "cuda:0"}}))
    _check(DeviceReport(), DeviceReport())


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [
        (
            DeviceReport({}, {"none": {}}),
            DeviceReport(),
            "Node worker0 has invalid target node names in its device maps",
        ),
        (DeviceReport(_TWO, {}, ("cuda:1", "cuda:1")), DeviceReport(), "Node worker0 has duplicated devices"),
        (DeviceReport(_TWO, {}, ("cuda:2",)), DeviceReport(), "Node worker0 has devices with invalid indices"),
        (DeviceReport({}, {}, ("xpu:0",)), DeviceReport(_TWO), "Node worker0 has devices with invalid indices: xpu:0"),
        (
            DeviceReport(_TWO, {"worker1": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}),
            DeviceReport(_TWO),
            "Node worker0 has duplicated target devices in its device map for worker1",
        ),
        (
            DeviceReport(_TWO, {"worker1": {"cuda:2": "cuda:0"}}),
            DeviceReport(_TWO),
            "Node worker0 has source devices with invalid indices in its device map for worker1: cuda:2",
        ),
        (
            DeviceReport(_TWO, {"worker1": {"cuda:0": "cuda:2"}}),
            DeviceReport(_TWO),
            "Node worker0 has target devices with invalid indices in its device map for worker1: cuda:2",
        ),
        (
            DeviceReport(_TWO, {"worker1": {"cuda:0": "cuda:0"}}),
            DeviceReport(),
            "has target devices with invalid indices in its device map for worker1: cuda:0; there are none but the CPU",
        ),
        (
            DeviceReport(_TWO, {"worker1": {"cuda:1": "cuda:0"}}, ("cuda:0",)),
            DeviceReport(_TWO),
            "Node worker0 has unexpected source devices in its device map for worker1: cuda:1",
        ),
        (
            DeviceReport(_TWO),
            DeviceReport(_TWO, {"worker0": {"cuda:1": "cuda:0"}}),
            None,
        ),
        (
            DeviceReport(_TWO, {}, ("cuda:1",)),
            DeviceReport(_TWO, {"worker0": {"cuda:1": "cuda:0"}}),
            "Node worker1 has unexpected target devices in its device map for worker0: cuda:0",
        ),
    ],
)
def test_what_is_wrong_with_maps(first: DeviceReport, second: DeviceReport, error: str | None) -> None:
    if error is None:
        _check(first, second)
        return
    with pytest.raises(ConfigurationError, match=error):
        _check(first, second)


def test_workers_that_have_not_come_are_not_checked() -> None:
    _check(DeviceReport(_TWO, {"later": {"cuda:0": "cuda:7"}}), knows_all=False)


def test_a_report_has_the_settings_of_the_worker() -> None:
    config = WorkerConfig(device_maps={"worker1": {"cpu": "cuda:0"}}, devices=("cuda:0",))
    assert report_devices(config).maps == {"worker1": {"cpu": "cuda:0"}}
    assert report_devices(config).devices == ("cuda:0",)
