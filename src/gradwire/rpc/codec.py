"""Between calls and frames: functions, arguments and results, with the interceptors' notes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import msgspec
import torch

from gradwire.config import Limits
from gradwire.errors import CannotSend, DecodeError, NotExposed
from gradwire.rpc.functions import exposed_function, exposed_name
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.types import Trust, WorkerInfo
from gradwire.wire import serialization as objects
from gradwire.wire import tensors
from gradwire.wire.framing import Frame
from gradwire.wire.messages import Call, Reply, read_note, read_plain

EVERYBODY = ""
"""Stands for the peer of a message to several workers at once."""


class Carrier(Protocol):
    """Whoever puts things on trips."""

    def on_not_sent(self, cargo: dict[Any, Any]) -> None:
        """The message with these will never arrive."""

    def on_arrived(self, cargo: dict[Any, Any]) -> None:
        """A message with these was unpacked."""


class Passage:
    """What the sender of a message knows of it.

    Attributes:
        call_id: The call that it is, if that has not ended: it may still have to leave, or be on its way. Else 0.
    """

    __slots__ = ("call_id",)

    def __init__(self) -> None:
        self.call_id = 0


class Trip:
    """One message on its way.

    Attributes:
        carrier: Of the worker that packs or unpacks; None if it has none.
        peer: Name of the other worker.
        cargo: What the carrier put on it, or took from it.
        passage: Outlives the trip, for whoever wonders what has become of the cargo.
    """

    __slots__ = ("cargo", "carrier", "passage", "peer")

    def __init__(self, carrier: Carrier | None, peer: str) -> None:
        self.carrier = carrier
        self.peer = peer
        self.cargo: dict[Any, Any] | None = None
        self.passage = Passage()

    def on_not_sent(self) -> None:
        """The message will never arrive."""
        cargo, self.cargo = self.cargo, None
        if cargo and self.carrier is not None:
            self.carrier.on_not_sent(cargo)

    def on_arrived(self) -> None:
        """The message was unpacked."""
        if self.cargo and self.carrier is not None:
            self.carrier.on_arrived(self.cargo)


class _Local(threading.local):
    departing: Trip | None = None  # of the message that the current thread packs
    arriving: Trip | None = None  # of the message that it unpacks


current = _Local()


def departing() -> Trip | None:
    """The trip of the message that the current thread packs, if it does."""
    return current.departing


def arriving() -> Trip | None:
    """The trip of the message that the current thread unpacks, if it does."""
    return current.arriving


class Codec:
    """Packs and unpacks under one trust level.

    Args:
        trust: ``code`` or ``data``.
        limits: What is accepted.
        interceptors: Told about every message; the list may grow later.
    """

    def __init__(self, trust: Trust, limits: Limits, interceptors: list[Interceptor]) -> None:
        self._trust = trust
        self._limits = limits
        self._interceptors = interceptors
        self.carrier: Carrier | None = None

    # -- calls ---------------------------------------------------------------------------------------------------

    def pack_call(
        self,
        function: Callable[..., Any] | str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        to: str,
        shares_main: bool = False,
    ) -> tuple[str, objects.Packed]:
        """The function's name (empty when it is in the body) and the packed arguments.

        Raises:
            CannotSend: An argument or the function cannot travel.
        """
        if isinstance(function, str):
            if len(function) > self._limits.name_bytes:
                raise CannotSend(f"a function's name may have {self._limits.name_bytes} characters (Limits.name_bytes)")
            return function, self.pack((tuple(args), kwargs), to, shares_main)
        if not callable(function):
            raise CannotSend(f"expected a function or an exposed name, not {function!r}")
        name = exposed_name(function) if self._trust == "data" else objects.function_name(function, shares_main)
        if name is not None and len(name) <= self._limits.name_bytes:
            return name, self.pack((tuple(args), kwargs), to, shares_main)
        if self._trust == "data":
            raise CannotSend(
                f'trust="data": {describe_function(function)} cannot be sent; mark it with @gradwire.rpc.expose on both '
                f"workers, or call it by its exposed name"
            )
        return "", self.pack((objects.carry(function) or function, tuple(args), kwargs), to, shares_main)

    def load_call(
        self, frame: Frame, message: Call, peer: WorkerInfo
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The function and arguments of a call that arrived.

        Raises:
            NotExposed: The function may not be called.
            DecodeError: The body is not what it claims to be.
            CannotSend: A tensor needs a device that is not here.
        """
        # The function first: nobody's arguments are decoded for a function that may not be called.
        function = self.find(message.function)
        values = self._receive(frame, message, peer, message.function)
        return self.split_call(function, self.unpack(message.codec, frame.body, values, peer.name))

    def split_call(
        self, function: Callable[..., Any] | None, value: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """The three parts of an unpacked call."""
        if function is None:
            function, args, kwargs = value
            return function.load() if type(function) is objects.CarriedFunction else function, args, kwargs
        args, kwargs = value
        if type(args) is not tuple or type(kwargs) is not dict:
            raise CannotSend(f"the arguments of {describe_function(function)} are not a tuple and a dict")
        return function, args, kwargs

    def find(self, name: str) -> Callable[..., Any] | None:
        """The function of that name; None when the name is empty (it is in the body).

        Raises:
            NotExposed: It may not be called.
        """
        function = exposed_function(name)
        if function is not None:
            return function
        if self._trust == "data":
            raise NotExposed(
                f'trust="data": {name!r} is not exposed on this worker; mark the function with @gradwire.rpc.expose there'
            )
        return objects.resolve_function(name) if name else None

    # -- control operations: plain data at every trust level --------------------------------------------------------

    def pack_control(self, args: tuple[Any, ...]) -> objects.Packed:
        """The arguments of a control operation."""
        return objects.pack(args, "data", self._limits)

    def load_control(self, frame: Frame, message: Call, kind: Any) -> tuple[Any, ...]:
        """The arguments of a control operation that arrived, checked against their type.

        Raises:
            DecodeError: They are not of that type, or notes came with them.
        """
        if message.notes:
            raise DecodeError(f"{message.function} came with notes, which belong to calls")
        values = self.rebuild_tensors(frame, message) if message.tensors else []
        args = objects.unpack(message.codec, frame.body, values, "data", self._limits)
        return read_plain(args, kind, f"the arguments of {message.function} are not valid")  # type: ignore[no-any-return]

    # -- replies -------------------------------------------------------------------------------------------------

    def pack(self, value: Any, to: str, shares_main: bool = False) -> objects.Packed:
        """A value, packed for the worker of that name.

        Raises:
            CannotSend: It cannot travel.
        """
        bare = objects.pack_bare(value)  # tensors need not know where they go
        if bare is not None:
            return bare
        here, outer = current, current.departing
        here.departing = trip = Trip(self.carrier, to)
        try:
            packed = objects.pack_other(value, self._trust, self._limits, shares_main)
        except BaseException:
            trip.on_not_sent()
            raise
        finally:
            here.departing = outer
        return packed if trip.cargo is None else msgspec.structs.replace(packed, trip=trip)

    def unpack(self, codec: int, body: bytes | bytearray, values: list[torch.Tensor], sender: str) -> Any:
        """A value that came from the worker of that name."""
        if codec in objects.BARE:
            return objects.unpack_bare(codec, body, values)
        here, outer = current, current.arriving
        here.arriving = trip = Trip(self.carrier, sender)
        try:
            return objects.unpack(codec, body, values, self._trust, self._limits)
        finally:
            here.arriving = outer
            trip.on_arrived()

    def load_reply(self, frame: Frame, message: Reply, peer: WorkerInfo, function: str) -> Any:
        """The value of a reply that arrived."""
        values = self._receive(frame, message, peer, function)
        return self.unpack(message.codec, frame.body, values, peer.name)

    # -- tensors and notes ------------------------------------------------------------------------------------------

    def has_interest_in_calls(self) -> bool:
        """Whether any interceptor wants to see a call that is made now."""
        for interceptor in self._interceptors:  # noqa: SIM110 (three times as fast as any())
            if interceptor.wants_calls():
                return True
        return False

    def outgoing_notes(
        self, envelope: Envelope, packed: objects.Packed, call_notes: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What the interceptors attach to a message that leaves; a reply's are told what came with the call."""
        notes = {}
        for interceptor in self._interceptors:
            if call_notes is not None:
                if interceptor.name not in call_notes:
                    continue
                envelope = Envelope(envelope.kind, envelope.peer, envelope.function, call_notes[interceptor.name])
            elif not interceptor.wants_calls():
                continue
            if packed.untracked:
                interceptor.on_untracked(envelope, packed.untracked)
            note = interceptor.outgoing(envelope, packed.tensors)
            if note is not None:
                notes[interceptor.name] = note
        return notes

    def incoming(self, envelope: Envelope, notes: dict[str, Any], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Lets the interceptors see a message that arrived. Their notes are read, once, and stay in `notes`.

        Raises:
            DecodeError: A note is not of the type that its interceptor wants.
        """
        if notes:
            for interceptor in self._interceptors:
                if interceptor.name in notes:
                    note = notes[interceptor.name] = read_note(notes[interceptor.name], interceptor.note_type)
                    values = list(interceptor.incoming(envelope, note, values))
        return values

    def run(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        envelope: Envelope,
        notes: dict[str, Any],
    ) -> Any:
        """Calls the function, inside what the interceptors want around it."""
        for interceptor in self._interceptors:
            if interceptor.name in notes:
                function = interceptor.around(envelope, notes[interceptor.name], function)
        return function(*args, **kwargs)

    @staticmethod
    def rebuild_tensors(frame: Frame, message: Call | Reply) -> list[torch.Tensor]:
        """The tensors of a message that arrived."""
        values: list[torch.Tensor] = []
        buffers = iter(frame.buffers)
        for meta in message.tensors:
            values.append(tensors.rebuild(meta, buffers))
        return values

    def _receive(self, frame: Frame, message: Call | Reply, peer: WorkerInfo, function: str) -> list[torch.Tensor]:
        values = self.rebuild_tensors(frame, message) if message.tensors else []
        if message.notes:
            kind: Literal["call", "reply"] = "call" if type(message) is Call else "reply"
            values = self.incoming(Envelope(kind, peer, function), message.notes, values)
        return values


def describe_function(function: Any) -> str:
    """What to call a function in messages to people."""
    if isinstance(function, str):
        return function
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)
