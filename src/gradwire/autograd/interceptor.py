"""Attaches distributed autograd and autocast to calls.

`AutogradInterceptor` records sends and recvs, and carries the context; `AutocastInterceptor` lets the called function run
under the caller's `torch.autocast`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from gradwire._interrupts import interruptible
from gradwire._torch import is_any_autocast_enabled, private_backend_name
from gradwire.autograd import anomaly_mode
from gradwire.autograd.context import MESSAGE_BYTES, RESULT
from gradwire.autograd.current_context import current_context, current_context_id
from gradwire.autograd.messages import NO_ID, RecordedCall
from gradwire.errors import CannotSend, DecodeError, UnknownContext
from gradwire.params import snapshots
from gradwire.params.rwlock import guarded_params
from gradwire.params.snapshots import announcing
from gradwire.rpc.connection import current_request
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.types import COUNTER_BITS
from gradwire.wire.exceptions import clean
from gradwire.wire.messages import prepare

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine


class AutogradInterceptor(Interceptor):
    """Records sends and recvs in the messages of one worker."""

    name = "autograd"
    note_type = RecordedCall

    def __init__(self, engine: DistEngine) -> None:
        self._engine = engine
        self._container = engine.container

    def wants_calls(self) -> bool:
        if self._engine.due:  # other workers must know of the commit before the call can have effects
            self._engine.tell_due()
        return (current_context.get() or current_context_id()) != 0 and torch.is_grad_enabled()

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> RecordedCall | None:
        """Record a send for tensors that require grad, in calls made with grad mode on and in replies."""
        # A reply is recorded regardless of the grad mode of the thread that sends it.
        is_call = envelope.kind == "call"
        if self._engine.due:
            self._engine.tell_due()
        context_id = (current_context.get() or current_context_id()) if is_call else envelope.note.context_id
        context, peer = self._container.find(context_id), envelope.peer.id
        recorded = []
        for tensor in tensors:
            if tensor.requires_grad:
                recorded.append(tensor)
        if context is None or not (peer in context.known_workers or context.touch(peer)):
            if not recorded or is_call:
                return None
            where = self._container.where_released(context_id) or "long ago"
            return RecordedCall(context_id, released=where)
        if peer in self._engine.lost:
            self._engine.heard_of(envelope.peer)
        message_id = NO_ID
        if recorded:
            message_id = self._container.new_message_id()
            context.record_send(message_id, peer, envelope.function, recorded, None if is_call else RESULT)
        elif not is_call:
            return None
        return RecordedCall(context_id, message_id, len(recorded), torch.is_anomaly_enabled())

    def on_untracked(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `CannotSend` for tensors whose gradients would be lost."""
        kind = type(tensors[0])
        what = (
            f"an argument of {envelope.function}" if envelope.kind == "call" else f"the result of {envelope.function}"
        )
        raise CannotSend(
            f"{what} is a {kind.__module__}.{kind.__qualname__} that requires grad, and inside an autograd context it "
            f"cannot be sent to {envelope.peer.name}: gradients cannot pass through its __reduce_ex__. Send the plain "
            f"tensors that it holds, or detach() it"
        )

    def incoming(self, envelope: Envelope, note: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Record a recv: the tensors that were recorded by the sender become outputs of its node."""
        message: RecordedCall = note
        peer = envelope.peer.id
        if message.message_id != NO_ID and message.message_id >> COUNTER_BITS != peer:
            raise DecodeError(f"{envelope.peer.name} recorded a message with an id of another worker")
        context = self._container.find(message.context_id)
        if message.released and context is not None:  # gradients would be lost
            raise UnknownContext(
                f"Could not find autograd context with id: {message.context_id} on worker {envelope.peer.name} when "
                f"{envelope.function} returned: it was released {clean(message.released)}"
            )
        is_call = envelope.kind == "call"
        if is_call and context is None:
            context = self._container.get_or_create(message.context_id, peer)
        # A reply belongs to a call that was made here, in a context that is here unless it was released meanwhile.
        if context is None or not (
            peer in context.known_workers or (context.touch(peer) if is_call else context.knows(peer))
        ):
            return tensors  # released: a late message does not revive it
        if peer in self._engine.lost:  # it may have been considered dead after the call was recorded
            self._engine.heard_of(envelope.peer)
        if is_call and (request := current_request()) is not None and request.source.stream.is_closed:
            # The connection of the call has ended: the contexts of its caller may have been checked before.
            self._engine.ask_soon(message.context_id)
        return tensors if message.message_id == NO_ID else self._record(context, envelope, message, tensors)

    def _record(
        self, context: Any, envelope: Envelope, message: RecordedCall, tensors: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        places, chosen = [], []
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad:
                places.append(number)
                chosen.append(tensor)
        if len(places) != message.num_tensors or not places:
            raise DecodeError(
                f"{envelope.peer.name} recorded {message.num_tensors} tensors, but {len(places)} that require grad "
                f"arrived"
            )
        if envelope.kind == "call":
            self._container.quotas.charge(envelope.peer.id, context, MESSAGE_BYTES)
        outputs = context.record_recv(message.message_id, envelope.peer.id, envelope.function, chosen)
        values = list(tensors)
        for number, place in enumerate(places):
            values[place] = outputs[number]
        return values

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(self._run, envelope.function, note, function)

    def _run(self, name: str, message: RecordedCall, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = current_context.set(message.context_id)
        try:
            # Only a worker with shared parameters has to guard them.
            context = self._container.find(message.context_id) if guarded_params or name in announcing else None
            if context is None and not message.detects_anomalies:
                return _call(function, args, kwargs)
            with contextlib.ExitStack() as stack:
                if context is not None:
                    stack.enter_context(snapshots.recording(context, name))
                if message.detects_anomalies:
                    stack.enter_context(anomaly_mode.enabled())
                return _call(function, args, kwargs)
        finally:
            current_context.reset(token)


@interruptible  # a function of the user
def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


NOTE: Final = "autocast"

_DEVICES: Final = ("cpu", "cuda", "xpu", "mps", "mtia", "hpu", "xla")  # torch's own; `_device_types` has one more
_DTYPES: Final = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def _device_types() -> tuple[str, ...]:
    """Return all types of devices that autocast knows; a backend from outside torch may get its name late."""
    return (*_DEVICES, private_backend_name())


def _can_autocast(device: str) -> bool:
    """Return whether this process has that type of device; if not, nothing runs on it here."""
    if device == "cpu":
        return True
    backend = getattr(torch, device, None)
    return backend is not None and bool(backend.is_available())


class Autocast(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes with every call made under autocast."""

    dtypes: dict[str, str]  # names of dtypes by the type of device, for those it is enabled for
    caches: bool  # whether weights are cast once and kept


class AutocastInterceptor(Interceptor):
    """Attaches the caller's autocast to calls, and runs the called function under it."""

    name = NOTE
    note_type = Autocast

    def wants_calls(self) -> bool:
        return is_any_autocast_enabled()

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> Autocast | None:
        if envelope.kind == "reply":
            return None
        dtypes = {
            device: str(torch.get_autocast_dtype(device)).removeprefix("torch.")
            for device in _device_types()
            if torch.is_autocast_enabled(device)
        }
        return Autocast(dtypes, torch.is_autocast_cache_enabled())

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        message: Autocast = note
        unknown = [dtype for dtype in message.dtypes.values() if dtype not in _DTYPES]
        if unknown or len(message.dtypes) > len(_DEVICES) + 1:
            raise DecodeError(f"unknown autocast dtypes: {list(message.dtypes.values())!r:.200}")
        known = _device_types()

        def run(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for device, dtype in message.dtypes.items():
                    if device in known and _can_autocast(device):
                        stack.enter_context(torch.autocast(device, _DTYPES[dtype], cache_enabled=message.caches))
                return _call(function, args, kwargs)

        return run


prepare(Autocast)
