"""The check of all workers' device maps when they meet: PyTorch's rules, and the essential words of its errors.

Every worker sends a `DeviceReport` when it joins. So the check takes no round trip of its own, and rank 0 decides for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError

_CPU = "cpu"
_Name = Annotated[str, Meta(max_length=64)]
_Worker = Annotated[str, Meta(max_length=1024)]
_Map = Annotated[dict[_Name, _Name], Meta(max_length=4096)]


class DeviceReport(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What one worker says of its devices."""

    counts: Annotated[dict[_Name, Annotated[int, Meta(ge=0, le=65_536)]], Meta(max_length=64)] = {}
    maps: Annotated[dict[_Worker, _Map], Meta(max_length=65_536)] = {}
    devices: Annotated[tuple[_Name, ...], Meta(max_length=4096)] = ()


def report_devices(config: WorkerConfig) -> DeviceReport:
    return DeviceReport(_count_devices(), {to: dict(found) for to, found in config.device_maps.items()}, config.devices)


def _count_devices() -> dict[str, int]:
    """Return how many devices there are of the accelerator of this process; does not initialize it."""
    found = torch.accelerator.current_accelerator()
    return {} if found is None else {found.type: torch.get_device_module(found.type).device_count()}


def check_device_maps(reports: Mapping[str, DeviceReport], *, knows_all: bool) -> None:
    """Check the devices and the device maps of workers, by name.

    Args:
        reports: What each worker says.
        knows_all: False if there may be workers that have not reported.

    Raises:
        ConfigurationError: A map names a worker or a device that does not exist, or one that is not in `devices`; or
            something is there twice.
    """
    for name, report in reports.items():
        _check_devices(name, report)
    for name, report in reports.items():
        for to in report.maps:
            if knows_all and to not in reports:
                raise ConfigurationError(
                    f"Node {name} has invalid target node names in its device maps: there is no worker {to}; there are "
                    f"{', '.join(reports)}"
                )
            _check_map(name, report, to, reports.get(to))


def _check_devices(name: str, report: DeviceReport) -> None:
    if len(set(report.devices)) != len(report.devices):
        raise ConfigurationError(f"Node {name} has duplicated devices: {', '.join(report.devices)}")
    _check_there(f"Node {name} has devices with invalid indices", report.devices, report)


def _check_map(name: str, report: DeviceReport, to: str, target: DeviceReport | None) -> None:
    devices = report.maps[to]
    where = f"in its device map for {to}"
    if len(set(devices.values())) != len(devices):
        raise ConfigurationError(f"Node {name} has duplicated target devices {where}: {devices}")
    for side, used, owner in (("source", devices.keys(), report), ("target", devices.values(), target)):
        if owner is None:  # it has not come, or came before the worker that checks this
            continue
        if not owner.devices:
            _check_there(f"Node {name} has {side} devices with invalid indices {where}", used, owner)
        elif not set(used) <= {*owner.devices, _CPU}:
            more = ", ".join(sorted(set(used) - {*owner.devices, _CPU}))
            raise ConfigurationError(
                f"Node {name} has unexpected {side} devices {where}: {more}, and devices= has {', '.join(owner.devices)}"
            )


def _check_there(problem: str, devices: Iterable[str], owner: DeviceReport) -> None:
    for device in devices:
        kind, _, index = device.partition(":")
        if kind != _CPU and not (index.isdecimal() and int(index) < owner.counts.get(kind, 0)):
            counted = ", ".join(f"{count} of {kind}" for kind, count in owner.counts.items()) or "none but the CPU"
            raise ConfigurationError(f"{problem}: {device}; there are {counted}")
