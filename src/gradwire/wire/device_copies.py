"""Copies between the host's memory and devices, on streams of gradwire's own.

Imported with the first tensor that is not on the CPU. For each device there is one stream for each direction, so that copies
overlap with what the program computes, and no direction waits for another. The whole device is never waited for.

    to the host     the program's stream: event -> our stream: wait, copy, event -> the host waits, then sends the bytes
    to a device     our stream: allocate, copy, event -> the host waits, then uses the tensor
    on devices      the program's stream: event -> our stream: wait, allocate, copy, event -> the host waits, then another
                    thread uses the tensor, on whichever stream

The host waits once for all tensors of a message. In between it holds no lock, and the program's stream goes on. It waits by
asking, because only that has a time limit.

Host memory is pinned, which lets the device copy by itself: memory of torch's allocator, which uses it again, and slots of
shared memory that were made known to the device (`pin`). Where it is not, the copy takes longer and is as right.

A device's memory is used again in the order of the stream that it was allocated on. So a tensor says which other streams
work on it (`record_stream`): ours, when it is copied to the host; and when it arrives the current stream of the thread that
unpacks it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch

from gradwire import _interrupts
from gradwire.config import MIB
from gradwire.wire.devices import NoSuchDevice
from gradwire.wire.tensors import sparse_parts, view_bytes

_TO_HOST: Final = "to the host"
_TO_DEVICE: Final = "to the device"
_ON_DEVICES: Final = "on devices"
_ARRIVE_S: Final = 60.0  # for copies to a device, which wait for nothing but each other
_CLOSE_S: Final = 5.0  # for copies of a message that is not sent after all
_MAX_LOOKS: Final = 50  # before sleeping: a copy of a few kilobytes takes as long
_NAPS_S: Final = (0.00002, 0.001)  # the first, and the longest
_PINNED_UP_TO: Final = 256 * MIB  # torch keeps pinned memory for good

_lock = threading.Lock()  # guards additions to the dict below
_streams: dict[tuple[torch.device, str], torch.Stream | None] = {}  # None: its backend cannot make streams


# To the host


class HostCopies:
    """The tensors of one message on their way to the host."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}  # those with copies that were not waited for
        self._kept: list[torch.Tensor] = []  # both ends of them
        self._has_targets = False  # memory that was given by the caller

    def launch(self, part: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Begin to copy a dense tensor of a device, and return the contiguous tensor of the host that it is copied to.

        Args:
            target: Memory for it, of exactly its size, as ``uint8``. Without it pinned memory is allocated.
        """
        made = _empty_on_host(part) if target is None else target.view(part.dtype).view(part.shape)
        if not part.numel():
            return made
        device = part.device
        stream = _stream_of(device, _TO_HOST)
        if stream is None:
            return made.copy_(part)
        if device not in self._streams:
            stream.wait_event(torch.accelerator.current_stream(device).record_event())
            self._streams[device] = stream
        with stream:
            made.copy_(part, non_blocking=True)
        part.record_stream(stream)
        self._kept += (part, made)
        self._has_targets = self._has_targets or target is not None
        return made

    def launch_bytes(self, part: torch.Tensor) -> tuple[memoryview | bytes, torch.Tensor]:
        """Begin to copy a dense tensor; return its bytes to be, and the tensor to keep while they are used."""
        made = self.launch(part)
        return view_bytes(made), made

    def wait(self, deadline: float | None = None) -> None:
        """Return when all bytes are there.

        Raises:
            TimeoutError: The deadline has passed: the device is still computing one of the tensors, or copying it.
        """
        if self._streams:
            _wait_for(self._streams, deadline)
            self._streams.clear()
            self._kept.clear()

    def close(self, deadline: float | None) -> bool:
        """Give up, after an error. Return whether targets may be used for something else.

        torch keeps what it allocated until the device has done with it. Targets have to be waited for here; they are still
        in use if the deadline has passed.
        """
        latest = time.monotonic() + _CLOSE_S
        if self._has_targets:
            with contextlib.suppress(Exception):  # the error that led here is the one to tell
                self.wait(latest if deadline is None else min(latest, deadline))
        is_over = not (self._has_targets and self._streams)
        self._streams.clear()
        self._kept.clear()
        return is_over


def _empty_on_host(part: torch.Tensor) -> torch.Tensor:
    is_pinned = 0 < part.nbytes <= _PINNED_UP_TO and torch.accelerator.current_accelerator() is not None
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=is_pinned)


# To a device


def launch_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Begin to copy a tensor of the host to a device; `wait_arrived` before it is used or the original is freed.

    Raises:
        NoSuchDevice: This process has no such device.
    """
    device = _find(device)
    stream = _stream_of(device, _TO_DEVICE)
    if tensor.layout is not torch.strided:
        return _with_parts(tensor, [launch_to_device(part, device) for part in sparse_parts(tensor)])
    if stream is None:
        return tensor.to(device)
    with stream:
        made = torch.empty_like(tensor, device=device)
        if tensor.numel():
            made.copy_(tensor, non_blocking=True)
    made.record_stream(torch.accelerator.current_stream(device))
    return made


def wait_arrived(tensors: Iterable[torch.Tensor]) -> None:
    """Return when what was launched to the devices of these tensors has arrived."""
    found = {tensor.device: _streams.get((tensor.device, _TO_DEVICE)) for tensor in tensors if not tensor.is_cpu}
    _wait_for({device: stream for device, stream in found.items() if stream is not None}, time.monotonic() + _ARRIVE_S)


def move(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return tensors of the host on devices; those that stay on the CPU are returned as they are."""
    moved: list[torch.Tensor] = []
    try:
        for tensor, device in zip(tensors, devices, strict=True):
            is_there = tensor.device == device
            moved.append(
                tensor if is_there else launch_to_device(tensor, device) if tensor.is_cpu else tensor.to(device)
            )
    finally:
        wait_arrived(moved)
    return moved


def copy(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device], deadline: float) -> list[torch.Tensor]:
    """Return copies of tensors on devices, the CPU included. They are there when this returns, whichever thread uses them.

    Raises:
        NoSuchDevice: This process has no such device.
        TimeoutError: The deadline has passed: a device is still computing one of the tensors, or copying it.
    """
    to_host, between = HostCopies(), dict[torch.device, torch.Stream]()

    def launch(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.is_cpu and device.type == "cpu":
            return tensor.to(device, copy=True)
        if tensor.layout is not torch.strided:
            return _with_parts(tensor, [launch(part, device) for part in sparse_parts(tensor)])
        if tensor.is_cpu:
            return launch_to_device(tensor, device)
        return to_host.launch(tensor) if device.type == "cpu" else _launch_on_devices(tensor, device, between)

    made: list[torch.Tensor] = []
    try:
        for tensor, device in zip(tensors, devices, strict=True):
            made.append(launch(tensor, device))
    finally:
        wait_arrived(copied for copied, tensor in zip(made, tensors, strict=False) if tensor.is_cpu)
        _wait_for(between, deadline)
        to_host.wait(deadline)
    return made


def _launch_on_devices(
    tensor: torch.Tensor, device: torch.device, streams: dict[torch.device, torch.Stream]
) -> torch.Tensor:
    """Begin to copy a dense tensor of a device to the same or another one, and note the stream to wait for."""
    stream = _stream_of(device, _ON_DEVICES)
    if stream is None:
        return tensor.to(device, copy=True)
    stream.wait_event(torch.accelerator.current_stream(tensor.device).record_event())
    with stream:
        made = torch.empty_like(tensor, device=device)
        made.copy_(tensor, non_blocking=True)
    if tensor.device == device:  # otherwise it is read by the current stream of its own device
        tensor.record_stream(stream)
    made.record_stream(torch.accelerator.current_stream(device))
    streams[device] = stream
    return made


def _with_parts(tensor: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return a sparse tensor, which is known to be valid, with other parts."""
    if tensor.layout is torch.sparse_coo:
        indices, values = parts
        coalesced = tensor.is_coalesced() or None
        return torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False, is_coalesced=coalesced)
    compressed, plain, values = parts
    layout = tensor.layout
    return torch.sparse_compressed_tensor(
        compressed, plain, values, tensor.shape, layout=layout, check_invariants=False
    )


# Devices and streams


def _find(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
        if found.index is None:
            found = torch.device(found.type, torch.accelerator.current_device_index())
        if (found, _TO_DEVICE) not in _streams:
            torch.empty(0, device=found)
        return found
    except Exception as error:  # each backend has its own way to say that it is missing
        raise NoSuchDevice(str(device)) from error


def _stream_of(device: torch.device, direction: str) -> torch.Stream | None:
    key = device, direction
    try:
        return _streams[key]
    except KeyError:
        pass
    with _lock:
        if key not in _streams:
            try:
                torch.accelerator.current_stream(device)
                _streams[key] = torch.Stream(device)
            except (RuntimeError, ValueError, AssertionError, NotImplementedError):
                _streams[key] = None
        return _streams[key]


def _wait_for(streams: dict[torch.device, torch.Stream], deadline: float | None) -> None:
    """Wait for what is on streams now."""
    for device, event in [(device, stream.record_event()) for device, stream in streams.items()]:
        num_looks, nap_s = 0, _NAPS_S[0]
        while not event.query():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{device} has not computed and copied a tensor yet")
            num_looks += 1
            if num_looks < _MAX_LOOKS:
                os.sched_yield()
            else:
                _interrupts.sleep(nap_s)
                nap_s = min(2 * nap_s, _NAPS_S[1])


# Pinned memory


def allocate_pinned(num_bytes: int) -> torch.Tensor | None:
    """Return bytes that a device can copy by itself; None if there is no accelerator or they are too many."""
    if not 0 < num_bytes <= _PINNED_UP_TO or not torch.accelerator.is_available():
        return None
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pin(mapping: Any, address: int, num_bytes: int) -> None:
    """Make memory known to the accelerator, where it has a way to, until `mapping` is garbage collected."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    cudart: Callable[[], Any] | None = (
        getattr(torch.get_device_module(accelerator), "cudart", None) if accelerator else None
    )
    if cudart is None:
        return
    runtime = cudart()
    if int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0:
        # The newest callback of an object is called first: before the memory is unmapped.
        weakref.finalize(mapping, runtime.cudaHostUnregister, address).atexit = False
