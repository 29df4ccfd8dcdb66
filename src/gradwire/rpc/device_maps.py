"""Check the device maps of all workers when they join, by PyTorch's rules and with the essential words of its errors.

Every worker sends a `DeviceReport` with its request to join, so the check costs no round trip. Rank 0 checks for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError
from gradwire.wire.devices import NAME_PATTERN
from gradwire.wire.exceptions import clean

_CPU = "cpu"
_Name = Annotated[str, Meta(max_length=64, pattern=rf"\A{NAME_PATTERN}\Z")]
_Worker = Annotated[str, Meta(max_length=1024)]
_Map = Annotated[dict[_Name, _Name], Meta(max_length=4096)]


class DeviceReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The devices and device maps of one worker.

    Attributes:
        counts: The number of devices that it has, by type.
        maps: Its device maps, by the name of the other worker.
        devices: Its option `devices`; empty if it is not set.
    """

    counts: Annotated[dict[_Name, Annotated[int, Meta(ge=0, le=65_536)]], Meta(max_length=64)] = {}
    maps: Annotated[dict[_Worker, _Map], Meta(max_length=65_536)] = {}
    devices: Annotated[tuple[_Name, ...], Meta(max_length=4096)] = ()


def report_devices(config: WorkerConfig) -> DeviceReport:
    return DeviceReport(_count_devices(), {to: dict(found) for to, found in config.device_maps.items()}, config.devices)


def _count_devices() -> dict[str, int]:
    """Return the number of devices of this process's accelerator, by type, without initializing it."""
    found = torch.accelerator.current_accelerator()
    return {} if found is None else {found.type: torch.get_device_module(found.type).device_count()}


def check_device_maps(reports: Mapping[str, DeviceReport], *, knows_all: bool) -> None:
    """Check the devices and the device maps of workers, by name.

    Args:
        reports: The report of each worker.
        knows_all: Whether every worker has sent its report.

    Raises:
        ConfigurationError: A map names a worker or device that does not exist, a device that is not in `devices`, or a
            target twice; or `devices` names one twice.
    """
    for name, report in reports.items():
        _check_devices(name, report)
    for name, report in reports.items():
        for to in report.maps:
            if knows_all and to not in reports:
                raise ConfigurationError(
                    f"Node {name} has invalid target node names in its device maps: there is no worker {clean(to)}; there "
                    f"are {', '.join(reports)}"
                )
            _check_map(name, report, to, reports.get(to))


def _check_devices(name: str, report: DeviceReport) -> None:
    if len(set(report.devices)) != len(report.devices):
        raise ConfigurationError(f"Node {name} has duplicated devices: {', '.join(report.devices)}")
    _check_there(f"Node {name} has devices with invalid indices", report.devices, report)


def _check_map(name: str, report: DeviceReport, to: str, target: DeviceReport | None) -> None:
    devices = report.maps[to]
    where = f"in its device map for {clean(to)}"
    if len(set(devices.values())) != len(devices):
        raise ConfigurationError(f"Node {name} has duplicated target devices {where}: {devices}")
    for side, used, owner in (("source", devices.keys(), report), ("target", devices.values(), target)):
        if owner is None:  # it has not joined, or had joined before rank 0 was restarted
            continue
        if not owner.devices:
            _check_there(f"Node {name} has {side} devices with invalid indices {where}", used, owner)
        elif not set(used) <= {*owner.devices, _CPU}:
            more = ", ".join(sorted(set(used) - {*owner.devices, _CPU}))
            whose = clean(to) if side == "target" else name
            raise ConfigurationError(
                f"Node {name} has unexpected {side} devices {where}: {more}; devices= of {whose} lists only "
                f"{', '.join(owner.devices)}"
            )


def _check_there(problem: str, devices: Iterable[str], owner: DeviceReport) -> None:
    for device in devices:
        kind, _, index = device.partition(":")
        if kind != _CPU and not (index.isdecimal() and int(index) < owner.counts.get(kind, 0)):
            counted = ", ".join(f"{count} of {kind}" for kind, count in owner.counts.items()) or "none but the CPU"
            raise ConfigurationError(f"{problem}: {device}; there are {counted}")
