"""Copies between host memory and devices, on streams of gradwire's own.

Imported with the first tensor that is not on the CPU. Each device has one stream for each direction. So copies overlap with
what the program computes, and no direction waits for another. No code here waits for a whole device.

    to the host     program's stream: record an event -> our stream: wait for it, copy, record an event -> the host waits
    to a device     our stream: allocate, copy, record an event -> the host waits
    on devices      program's stream: record an event -> our stream: wait for it, allocate, copy, record an event -> the host
                    waits, then any thread may use the copy

The host waits once for all tensors of a message, before it sends or uses them. It holds no lock meanwhile, and the program's
stream continues. It polls, because torch cannot wait for an event with a time limit.

Host memory is pinned, so that the device copies without the CPU. It comes from torch's allocator, which reuses it, or is a
slot of shared memory that the device knows (`pin`). From and to other memory a copy takes longer, and is as correct.

A device's memory is reused in the order of the stream that it was allocated on. All other streams that use a tensor must be
recorded (`record_stream`). These are our stream, when a tensor is copied to the host, and the current stream of each thread
that gets a tensor that arrived (`record_use`): the thread that unpacks a message, and the one that waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import torch

from gradwire import _interrupts
from gradwire._torch import neg_view
from gradwire.config import MIB
from gradwire.wire.devices import NoSuchDevice
from gradwire.wire.tensors import LAYOUTS, sparse_parts, view_bytes

_TO_HOST: Final = "to the host"
_TO_DEVICE: Final = "to the device"
_ON_DEVICES: Final = "on devices"
_ARRIVE_S: Final = 60.0  # for copies to a device, which wait for nothing but each other
_MAX_LOOKS: Final = 50  # before sleeping: about as long as the copy of a few kilobytes
_NAPS_S: Final = (0.00002, 0.001)  # the first, and the longest
_PINNED_UP_TO: Final = 256 * MIB  # torch keeps pinned memory for good

_lock = threading.Lock()  # guards additions to the dict below
_streams: dict[tuple[torch.device, str], torch.Stream | None] = {}  # None: its backend cannot make streams

_Abandoned = tuple[list[torch.Event], list[torch.Tensor], Callable[[], None]]
_abandoned: deque[_Abandoned] = deque()  # copies of messages that were not sent; single operations only, no lock


# To the host


class HostCopies:
    """Copies of the tensors of one message to the host."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}  # those with copies that were not waited for
        self._kept: list[torch.Tensor] = []  # both ends of them
        if _abandoned:
            _release_abandoned()

    def launch(self, part: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Begin to copy a dense tensor to the host, and return the contiguous tensor that is being filled.

        Args:
            target: Memory of exactly its size, as ``uint8``; see `abandon`. Without it, pinned memory is allocated.
        """
        if part.is_conj() or part.is_neg():  # torch would change what was copied, on the host, before it is there
            part = part.resolve_conj().resolve_neg()
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
        with _handle(stream):
            made.copy_(part, non_blocking=True)
        _keep_for(stream, part)
        self._kept += (part, made)
        return made

    def launch_bytes(self, part: torch.Tensor) -> tuple[memoryview | bytes, torch.Tensor]:
        """Begin to copy a dense tensor; return the bytes that are being filled, and the tensor that owns them."""
        made = self.launch(part)
        return view_bytes(made), made

    def wait(self, deadline: float | None = None) -> None:
        """Wait until all tensors have been copied.

        Raises:
            TimeoutError: The deadline has passed; the device is still computing or copying one of them.
        """
        if self._streams:
            _wait_for(self._streams, deadline)
            self._streams.clear()
            self._kept.clear()

    def abandon(self, on_over: Callable[[], None]) -> None:
        """Give up after an error. Call `on_over` once the device has finished writing to all targets.

        That is now, or when a later message has tensors on devices. Memory of torch's allocator needs no such care: torch
        does not reuse it before the device has finished.
        """
        _abandoned.append(([stream.record_event() for stream in self._streams.values()], self._kept, on_over))
        self._streams, self._kept = {}, []
        _release_abandoned()


def _release_abandoned() -> None:
    for _ in range(len(_abandoned)):
        try:
            events, kept, on_over = _abandoned.popleft()
        except IndexError:  # another thread does the same
            return
        if all(event.query() for event in events):
            on_over()
        else:
            _abandoned.append((events, kept, on_over))


def _empty_on_host(part: torch.Tensor) -> torch.Tensor:
    is_pinned = 0 < part.nbytes <= _PINNED_UP_TO and torch.accelerator.current_accelerator() is not None
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=is_pinned)


# To a device


def launch_to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """Begin to copy a tensor to a device. Call `wait_arrived` before either tensor is used or freed.

    Raises:
        NoSuchDevice: This process does not have the device.
    """
    device = _find(device)
    stream = _stream_of(device, _TO_DEVICE)
    if tensor.layout is not torch.strided:
        return _with_parts(tensor, [launch_to_device(part, device) for part in sparse_parts(tensor)])
    if stream is None:
        return tensor.to(device)
    with _handle(stream):
        made = torch.empty_like(tensor, device=device)
        if tensor.numel():
            made.copy_(tensor, non_blocking=True)
    record_use([made])
    return made


def record_use(tensors: Iterable[torch.Tensor]) -> None:
    """Record that the current streams of this thread use tensors that arrived, so that their memory is not reused early."""
    for tensor in tensors:
        if not tensor.is_meta and _streams.get((tensor.device, _TO_DEVICE)) is not None:
            stream = torch.accelerator.current_stream(tensor.device)
            for part in (tensor,) if tensor.layout is torch.strided else sparse_parts(tensor):
                _keep_for(stream, part)


def _keep_for(stream: torch.Stream, part: torch.Tensor) -> None:
    """Do not reuse the memory of a dense tensor before a stream is done with it.

    `record_stream` corrupts the heap if the tensor has a conj or neg bit (torch 2.13), so this calls it on a view without.
    """
    plain = part.detach()
    if plain.is_conj():
        plain = plain.conj()
    if plain.is_neg():
        plain = neg_view(plain)
    plain.record_stream(stream)


def hand_over(tensors: Sequence[torch.Tensor]) -> None:
    """Make the current streams of this thread wait for tensors that gradwire's threads have computed.

    Those threads compute on the default stream of each device, which may not have finished when another thread gets them.
    """
    for device in {tensor.device for tensor in tensors if not tensor.is_meta}:
        if _stream_of(device, _TO_DEVICE) is not None:
            current, default = torch.accelerator.current_stream(device), _default_stream(device)
            if current != default:
                current.wait_event(default.record_event())
    record_use(tensors)


@contextlib.contextmanager
def on_default_streams() -> Iterator[None]:
    """Let this thread work on the default stream of each device, in order with the streams that it has chosen.

    A thread that waits for a backward pass adds up gradients, as gradwire's threads do meanwhile: all on one stream.
    """
    used = {device for (device, _), stream in list(_streams.items()) if stream is not None}
    pairs = [(torch.accelerator.current_stream(device), _default_stream(device)) for device in used]
    pairs = [(current, default) for current, default in pairs if current != default]
    if not pairs:
        yield
        return
    index = torch.accelerator.current_device_index()
    with contextlib.ExitStack() as stack:
        for current, default in pairs:
            default.wait_event(current.record_event())
            stack.callback(lambda pair: pair[0].wait_event(pair[1].record_event()), (current, default))
            stack.enter_context(_handle(default))
        torch.accelerator.set_device_index(index)  # a stream brings its device along
        yield


@functools.cache
def _default_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of a new thread: torch has no function for the default stream of any backend."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.accelerator.current_stream, device).result(_ARRIVE_S)


def wait_arrived(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until everything that was launched to the devices of these tensors has arrived."""
    found = {tensor.device: _streams.get((tensor.device, _TO_DEVICE)) for tensor in tensors if not tensor.is_cpu}
    _wait_for({device: stream for device, stream in found.items() if stream is not None}, time.monotonic() + _ARRIVE_S)


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values of the host into a tensor on a device, and wait for it.

    The program may be using the tensor, so the copy is on its current stream. Tensors that arrive do not wait for that.
    """
    device = target.device
    is_later = _stream_of(device, _TO_DEVICE) is not None
    target.copy_(values, non_blocking=is_later)
    if is_later:
        _wait_for({device: torch.accelerator.current_stream(device)}, time.monotonic() + _ARRIVE_S)


# Either way


def move(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> list[torch.Tensor]:
    """Return each tensor on its device, which may be the CPU; the same tensor if it is there. Autograd records this.

    Raises:
        NoSuchDevice: This process does not have one of the devices.
    """
    to_host, arriving, moved = HostCopies(), [], []
    try:
        for tensor, device in zip(tensors, devices, strict=True):
            if not _can_launch(tensor, device):  # from device to device, torch itself orders the streams
                moved.append(tensor if tensor.device == device else tensor.to(device))
                continue
            source = tensor.detach()
            if source.is_cpu:
                made = launch_to_device(source, device)
                arriving.append(made)
            else:
                made = _launch_to_host(source, to_host)
            moved.append(_Moved.apply(tensor, [made]) if tensor.requires_grad else made)  # type: ignore[no-untyped-call]
    finally:
        wait_arrived(arriving)
    to_host.wait()  # no deadline: the program waits for its own computation, as with `.cpu()`
    return moved


def copy_to(tensors: Sequence[torch.Tensor], devices: Sequence[torch.device], deadline: float) -> list[torch.Tensor]:
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
    with _handle(stream):
        made = torch.empty_like(tensor, device=device)
        made.copy_(tensor, non_blocking=True)
    if tensor.device == device:  # otherwise it is read by the current stream of its own device
        _keep_for(stream, tensor)
    _keep_for(torch.accelerator.current_stream(device), made)
    streams[device] = stream
    return made


class _Moved(torch.autograd.Function):
    """Records that a tensor was moved; its gradient is moved back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, made: list[torch.Tensor]) -> torch.Tensor:
        ctx.device = tensor.device
        ctx.set_materialize_grads(False)
        return made[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        (gradient,) = gradients
        return None if gradient is None else move([gradient], [ctx.device])[0], None


def _can_launch(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor goes from the host to a device or back, and is of a kind that can be copied here."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout in LAYOUTS
    is_crossing = tensor.is_cpu != (device.type == "cpu") and "meta" not in (tensor.device.type, device.type)
    return is_crossing and is_plain and not (tensor.is_quantized or tensor.is_nested)


def _launch_to_host(tensor: torch.Tensor, copies: HostCopies) -> torch.Tensor:
    if tensor.layout is torch.strided:
        return copies.launch(tensor)
    return _with_parts(tensor, [copies.launch(part) for part in sparse_parts(tensor)])


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
    except Exception as error:  # each backend raises another type for a device that does not exist
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


def _handle(stream: torch.Stream) -> torch.Stream:
    """Return another object for a stream: each remembers what to return to, so threads must not enter the same one."""
    return torch.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def _wait_for(streams: dict[torch.device, torch.Stream], deadline: float | None) -> None:
    """Wait until streams have finished what is on them now."""
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
    """Return pinned memory; None if there is no accelerator, or it would be too much to keep."""
    if not 0 < num_bytes <= _PINNED_UP_TO or not torch.accelerator.is_available():
        return None
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pin(address: int, num_bytes: int) -> Callable[[], object] | None:
    """Register memory with the accelerator, if it supports that, and return what undoes it, for before it is unmapped."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    cudart: Callable[[], Any] | None = (
        getattr(torch.get_device_module(accelerator), "cudart", None) if accelerator else None
    )
    if cudart is None:
        return None
    runtime = cudart()
    if int(runtime.cudaHostRegister(address, num_bytes, 0)) != 0:
        return None
    return functools.partial(runtime.cudaHostUnregister, address)
