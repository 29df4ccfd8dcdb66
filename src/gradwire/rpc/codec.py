"""Serialization of calls and results: functions, arguments, tensors and the interceptors' notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import torch

from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, NotExposed
from gradwire.rpc import functions
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.types import Trust, WorkerInfo
from gradwire.wire import serialization
from gradwire.wire.devices import ON_HOST, DeviceNames, NoSuchDevice
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Reply, read_note, read_plain
from gradwire.wire.serialization import BARE, Packed, pack_bare, unpack_bare
from gradwire.wire.tensors import rebuild

EVERY_WORKER = ""
"""Placeholder for the peer of a message that goes to several workers."""


class TransferTracker(Protocol):
    """Puts things on messages that need to be tracked: references, for instance."""

    def on_not_sent(self, contents: dict[Any, Any]) -> None:
        """Roll back the contents of a message that will never arrive."""

    def on_arrived(self, contents: dict[Any, Any]) -> None:
        """Record the contents of a message that was unpacked."""


class TransferStatus:
    """Status of a message, kept by its sender.

    Attributes:
        call_id: The id of the call while it has not completed, so that its contents may still be in transit; otherwise 0.
    """

    __slots__ = ("call_id",)

    def __init__(self) -> None:
        self.call_id = 0


class Transfer:
    """A message in transit.

    Attributes:
        tracker: The tracker of the worker that packs or unpacks; None if it has none.
        peer: Name of the other worker.
        contents: Objects that the tracker added or received.
        status: Whether the contents may still be in transit; outlives the transfer.
    """

    __slots__ = ("contents", "peer", "status", "tracker")

    def __init__(self, tracker: TransferTracker | None, peer: str) -> None:
        self.tracker = tracker
        self.peer = peer
        self.contents: dict[Any, Any] | None = None
        self.status = TransferStatus()

    def on_not_sent(self) -> None:
        """Tell the tracker that the message will never arrive."""
        contents, self.contents = self.contents, None
        if contents and self.tracker is not None:
            self.tracker.on_not_sent(contents)

    def on_arrived(self) -> None:
        """Tell the tracker that the message was unpacked."""
        if self.contents and self.tracker is not None:
            self.tracker.on_arrived(self.contents)


class _Transfers(threading.local):
    outgoing: Transfer | None = None  # of the message that the current thread packs
    incoming: Transfer | None = None  # of the message that it unpacks


transfers = _Transfers()


class Codec:
    """Packs and unpacks under one trust level."""

    def __init__(self, worker: str, trust: Trust, limits: Limits, interceptors: list[Interceptor]) -> None:
        self._worker = worker
        self._trust = trust
        self._limits = limits
        self._interceptors = interceptors  # see every message; the list may grow later
        self.tracker: TransferTracker | None = None

    def pack_call(
        self,
        function: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: dict[str, Any] | None,
        to: str,
        shares_main: bool = False,
    ) -> tuple[str, Packed]:
        """Return the function's name (empty when it is in the body) and the packed arguments."""
        if isinstance(function, str):
            name: str | None = function
            if len(function) > self._limits.name_bytes:
                raise CannotSend(
                    f"a function's name must have at most {self._limits.name_bytes} characters (Limits.name_bytes), "
                    f"not {len(function)}: {function!r:.80}"
                )
        elif not callable(function):
            raise CannotSend(f"expected a function or an exposed name, not {function!r}")
        elif self._trust == "data":
            name = functions.exposed_name(function)
        else:
            name = serialization.function_name(function, shares_main)
        if name is not None and len(name) <= self._limits.name_bytes:
            value = (tuple(args), kwargs or {})
            return name, pack_bare(value) or self._pack_other(value, to, shares_main)
        if self._trust == "data":
            raise CannotSend(
                f'trust="data": {describe_function(function)} cannot be sent; mark it with @gradwire.rpc.expose on both '
                f"workers, or call it by its exposed name"
            )
        carried = serialization.carry(function) or function
        return "", self._pack_other((carried, tuple(args), kwargs or {}), to, shares_main)

    def load_call(
        self, frame: Frame, message: Call, peer: WorkerInfo
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Return the function and the arguments of a call that arrived."""
        # The function first: no arguments are decoded for a function that may not be called.
        function = self.find(message.function)
        value = self.load(frame, message, peer, message.function)
        if function is None:
            function, args, kwargs = value
            return function.load() if type(function) is serialization.CarriedFunction else function, args, kwargs
        args, kwargs = value
        if type(args) is not tuple or type(kwargs) is not dict:
            raise CannotSend(f"the arguments of {describe_function(function)} must be a tuple and a dict")
        return function, args, kwargs

    def find(self, name: str) -> Callable[..., Any] | None:
        """Return the function of that name; None when the name is empty (it is in the body)."""
        function = functions.exposed.get(name)
        if function is None and name.startswith("gradwire."):
            function = functions.exposed_function(name)  # of a layer that is imported on first use
        if function is not None:
            return function
        if self._trust == "data":
            raise NotExposed(
                f'trust="data": {name!r} is not exposed on worker {self._worker}; mark it with @gradwire.rpc.expose in a '
                f"module that {self._worker} imports"
            )
        return serialization.resolve_function(name) if name else None

    def pack_control(self, args: tuple[Any, ...]) -> Packed:
        return serialization.pack(args, "data", self._limits)

    def load_control(self, frame: Frame, message: Call, kind: Any) -> tuple[Any, ...]:
        """Return the arguments of a control operation that arrived, checked against their type."""
        if message.notes:
            raise DecodeError(f"{message.function} carries notes, which are only allowed in calls")
        values = self.rebuild_tensors(frame, message) if message.tensors else []
        args = serialization.unpack(message.codec, frame.body, values, "data", self._limits)
        return read_plain(args, kind, f"the arguments of {message.function} are not valid")  # type: ignore[no-any-return]

    def pack(self, value: Any, to: str, shares_main: bool = False) -> Packed:
        """Pack a value for the worker of that name."""
        return pack_bare(value) or self._pack_other(
            value, to, shares_main
        )  # bare tensors do not depend on the destination

    def _pack_other(self, value: Any, to: str, shares_main: bool) -> Packed:
        outer = transfers.outgoing
        transfers.outgoing = transfer = Transfer(self.tracker, to)
        try:
            packed = serialization.pack_other(value, self._trust, self._limits, shares_main)
        except Exception:
            transfer.on_not_sent()
            raise
        finally:
            transfers.outgoing = outer
        return packed if transfer.contents is None else msgspec.structs.replace(packed, transfer=transfer)

    def load(
        self,
        frame: Frame,
        message: Call | Reply,
        peer: WorkerInfo,
        function: str,
        devices: DeviceNames | None = None,
        arrived: list[torch.Tensor] | None = None,
    ) -> Any:
        """Return the value that a message brought: the result of a call of `function`, or its arguments.

        Its tensors on devices are added to `arrived`, for code that hands them on to another thread.
        """
        values = self.rebuild_tensors(frame, message, devices, arrived) if message.tensors else []
        if message.notes:
            kind: Literal["call", "reply"] = "call" if type(message) is Call else "reply"
            values = self._intercept(Envelope(kind, peer, function), message.notes, values)
        if message.codec in BARE:
            return unpack_bare(message.codec, frame.body, values)
        return self.unpack(message.codec, frame.body, values, peer.name)

    def unpack(self, codec: int, body: bytes | bytearray, values: list[torch.Tensor], sender: str) -> Any:
        """Unpack a value received from the worker of that name."""
        outer = transfers.incoming
        transfers.incoming = transfer = Transfer(self.tracker, sender)
        try:
            return serialization.unpack(codec, body, values, self._trust, self._limits)
        finally:
            transfers.incoming = outer
            transfer.on_arrived()

    def rebuild_tensors(
        self,
        frame: Frame,
        message: Call | Reply,
        devices: DeviceNames | None = None,
        arrived: list[torch.Tensor] | None = None,
    ) -> list[torch.Tensor]:
        """Return the tensors of a message on the devices that it names, as `devices` says if they have other names here."""
        values: list[torch.Tensor] = []
        buffers, are_placed = iter(frame.buffers), devices is not ON_HOST
        is_on_device = bool(devices and devices.get("cpu") != "cpu")  # whether any may be
        try:
            for meta in message.tensors:
                values.append(rebuild(meta, buffers, devices))
                if meta.device:
                    is_on_device = are_placed
        except NoSuchDevice as error:
            raise CannotSend(
                f"{self._worker} has no {error.device}; pass device_maps= to say which of its devices to use, or move the "
                f"tensor to the CPU"
            ) from error
        finally:  # after an error, too: the buffers are free then
            if is_on_device:
                _wait_arrived(values)
        if is_on_device and arrived is not None:
            arrived += [value for value in values if not value.is_cpu]
        return values

    def attach_to_reply(
        self, notes: dict[str, Any], peer: WorkerInfo, function: str, packed: Packed, call_notes: dict[str, Any]
    ) -> None:
        """Let the interceptors attach notes to a reply; each is given the note it attached to the call."""
        for interceptor in self._interceptors:
            if interceptor.name in call_notes:
                attach(notes, interceptor, Envelope("reply", peer, function, call_notes[interceptor.name]), packed)

    def _intercept(self, envelope: Envelope, notes: dict[str, Any], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Let the interceptors see a message that arrived. Their notes are read, once, and stay in `notes`."""
        for interceptor in self._interceptors:
            if interceptor.name in notes:
                note = notes[interceptor.name] = read_note(notes[interceptor.name], interceptor.note_type)
                values = list(interceptor.incoming(envelope, note, values))
        return values


def _wait_arrived(values: list[torch.Tensor]) -> None:
    from gradwire.wire import device_copies

    device_copies.wait_arrived(values)


def attach(notes: dict[str, Any], interceptor: Interceptor, envelope: Envelope, packed: Packed) -> None:
    """Show a message that leaves to an interceptor, and keep the note that it returns, if any, in `notes`."""
    if packed.untracked:
        interceptor.on_untracked(envelope, packed.untracked)
    note = interceptor.outgoing(envelope, packed.tensors)
    if note is not None:
        notes[interceptor.name] = note


def describe_function(function: Any) -> str:
    if isinstance(function, str):
        return function
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
