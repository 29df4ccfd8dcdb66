"""Devices of tensors on the wire: their names, and where a tensor goes when it arrives.

A tensor travels through host memory with the name of its device (empty for the CPU), and arrives on the device of that
name. A `DeviceMap` translates names between two workers. It belongs to the worker that calls: arguments are translated
forwards and results backwards, so the other worker needs no map. Gradients are not translated. They go to the device of the
tensor that they belong to, which its sender knows.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch

from gradwire.errors import CannotSend, ConfigurationError, DecodeError

F = TypeVar("F", bound=Callable[..., Any])

DeviceNames = Mapping[str, str]
"""The receiver's device for each device of the sender, both by name; "cpu" is the CPU."""

ON_HOST: Final[DeviceNames] = {}
"""Leave tensors in host memory, whatever device their sender named."""

CPU: Final = torch.device("cpu")

NAME_PATTERN: Final = r"[a-z][a-z0-9_]{0,30}(?::[0-9]{1,3})?"
"""Matches the name of any device, whether it exists or not."""

_CPU: Final = "cpu"
_NAME: Final = re.compile(NAME_PATTERN)


class NoSuchDevice(CannotSend):
    """A tensor is for a device that this process does not have.

    Attributes:
        device: The name of the device.
    """

    def __init__(self, device: str) -> None:
        super().__init__(f"there is no {device} in this process")
        self.device = device


class DeviceMap:
    """A device map of this worker for another one.

    Attributes:
        there: The other worker's device for each device of this worker.
        here: This worker's device for each device of the other one.
    """

    __slots__ = ("here", "there")

    def __init__(self, devices: DeviceNames) -> None:
        self.there = {**devices, _CPU: devices.get(_CPU, _CPU)}
        self.here = {_CPU: _CPU, **{there: here for here, there in devices.items()}}

    def __repr__(self) -> str:
        return f"DeviceMap({self.there})"


def read_device_map(to: str, devices: Mapping[Any, Any]) -> dict[torch.device, torch.device]:
    """Return a device map of the user for the worker `to`, as devices.

    Raises:
        ConfigurationError: A name does not name exactly one device, or two devices are mapped to the same one.
    """
    where = f"the device map for {to}"
    made = {read_device(where, here): read_device(where, there) for here, there in devices.items()}
    if len(set(made.values())) != len(made):
        raise ConfigurationError(
            f"{where} only supports 1-to-1 mapping, but maps two devices to the same device: {devices}"
        )
    return made


def read_device(where: str, device: Any) -> torch.device:
    """Return a device of the user; `where` says in errors what it was given for.

    Raises:
        ConfigurationError: It is not a device, or has no index.
    """
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{where} has {device!r}, which is not a device: {error}") from error
    if made.type != _CPU and made.index is None:
        raise ConfigurationError(f"{where} has {device!r} without an index; say which one, such as {made.type}:0")
    return torch.device(_CPU) if made.type == _CPU else made


def name_of(device: torch.device, devices: DeviceNames | None) -> str:
    """Return the receiver's name for a device; empty for the CPU.

    Raises:
        CannotSend: The device map for the receiver does not have the device.
    """
    name = str(device)
    if devices is not None and name != "meta":
        target = devices.get(name)
        if target is None:
            raise CannotSend(
                f"this tensor cannot be sent: it is on {name}, which the device map for its receiver does not have; add "
                f"it with set_device_map, or move it to the CPU (Request device mapping is not available for destination)"
            )
        name = target
    return "" if name == _CPU else name


def check_name(name: str) -> None:
    """Check the form of a device's name that came from another worker; the device need not exist."""
    if not _NAME.fullmatch(name) or name.startswith(_CPU):
        raise DecodeError(f"not the name of a device: {name[:64]!r}")


def read_name(name: Any) -> str:
    """Return a device's name that came from another worker, the CPU included; the device need not exist.

    Raises:
        DecodeError: It does not have the form of a name.
    """
    if type(name) is not str:
        raise DecodeError(f"the name of a device must be a str, not {type(name).__name__}")
    if name != _CPU:
        check_name(name)
    return name


def place(tensor: torch.Tensor, name: str, devices: DeviceNames | None = None) -> torch.Tensor:
    """Put a tensor that arrived on the device that its sender named; see `device_copies.launch_to_device`.

    Raises:
        NoSuchDevice: This process does not have the device.
        CannotSend: The device map for the sender does not have it.
    """
    if devices is ON_HOST:
        return tensor
    if devices is not None:
        source = name or _CPU
        name = devices.get(source, "")
        if not name:
            raise CannotSend(
                f"a result is on {source}, which the device map for its sender does not have; add it with set_device_map, "
                f"or return a tensor on the CPU (Response device mapping is not available for destination)"
            )
    if not name or name == _CPU:
        return tensor
    from gradwire.wire import device_copies

    return device_copies.launch_to_device(tensor, name)


def move(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return each tensor on its device, which may be the CPU; the same tensor if it is there. Autograd records this."""
    from gradwire.wire import device_copies

    return device_copies.move(tensors, devices)


def copy_to(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device], deadline: float) -> list[torch.Tensor]:
    """Return copies of tensors on devices, the CPU included, for any thread; see `device_copies.copy_to`."""
    for tensor, device in zip(tensors, devices, strict=True):
        if not tensor.is_cpu or device.type != _CPU:
            from gradwire.wire import device_copies

            return device_copies.copy_to(tensors, devices, deadline)
    return [tensor.to(CPU, copy=True) for tensor in tensors]


def record_use(tensors: Sequence[torch.Tensor]) -> None:
    """Keep the memory of tensors that arrived on devices for the current streams of this thread; see `device_copies`."""
    from gradwire.wire import device_copies

    device_copies.record_use(tensors)


def hand_over(tensors: Iterable[torch.Tensor]) -> None:
    """Let the current streams of this thread use tensors that threads of gradwire have made; see `device_copies`."""
    on_device = [tensor for tensor in tensors if not tensor.is_cpu]
    if on_device:
        from gradwire.wire import device_copies

        device_copies.hand_over(on_device)


def on_default_streams(function: F) -> F:
    """Return a function that works on the default streams, as gradwire's threads do; see `device_copies`."""
    copies: Any = sys.modules.get("gradwire.wire.device_copies")
    return function if copies is None else copies.on_default_streams()(function)


def is_here(device: torch.device) -> bool:
    """Return whether this process has a device."""
    if device.type in (_CPU, "meta"):
        return True
    found = torch.accelerator.current_accelerator()
    if found is None or found.type != device.type:
        return False
    return bool((device.index or 0) < torch.get_device_module(found.type).device_count())


def move_all(value: Any, device: torch.device) -> Any:
    """Return a value with all tensors in its tuples, lists and dicts, of any class, on a device. Autograd records this."""
    found: dict[int, torch.Tensor] = {}
    _find_elsewhere(value, device, found)
    if not found:
        return value
    from gradwire.wire import device_copies

    moved = device_copies.move(list(found.values()), [device] * len(found))
    return _replace(value, dict(zip(found, moved, strict=True)))


def _find_elsewhere(value: Any, device: torch.device, found: dict[int, torch.Tensor]) -> None:
    """Collect the tensors that are not on a device, by id."""
    if isinstance(value, torch.Tensor):
        if value.device != device:
            found[id(value)] = value
    elif isinstance(value, tuple | list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _find_elsewhere(item, device, found)


def _replace(value: Any, moved: dict[int, torch.Tensor]) -> Any:
    """Return a value with other tensors; containers without any of them as they are."""
    if isinstance(value, torch.Tensor):
        return moved.get(id(value), value)
    if not isinstance(value, tuple | list | dict):
        return value
    before = list(value.values() if isinstance(value, dict) else value)
    items = [_replace(item, moved) for item in before]
    if all(item is old for item, old in zip(items, before, strict=True)):
        return value
    if isinstance(value, dict):
        made = copy.copy(value)  # a class of the user may need more than its items
        made.update(zip(value, items, strict=True))
        return made
    return (
        type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    )  # a namedtuple takes them one by one
