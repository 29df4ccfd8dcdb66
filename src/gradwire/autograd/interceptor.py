"""Attaches distributed autograd to calls: records sends and recvs, and carries the context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.autograd import anomaly_mode as anomalies
from gradwire.autograd import current_context as ambient
from gradwire.autograd.context import MESSAGE_BYTES, RESULT, DistAutogradContainer
from gradwire.autograd.engine import DistEngine
from gradwire.autograd.messages import NO_ID, RecordedCall
from gradwire.errors import CannotSend, DecodeError, UnknownContext
from gradwire.params import snapshots as sharing
from gradwire.rpc.connection import Request, current_request
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.types import creator_of

_NOTHING = contextlib.nullcontext()


class AutogradInterceptor(Interceptor):
    """Sees every message of one worker.

    Args:
        container: The worker's contexts.
        engine: Its engine.
        ask_to_be_told: Called with a context that nobody may tell this worker the end of.
    """

    name = "autograd"
    note_type = RecordedCall

    def __init__(
        self, container: DistAutogradContainer, engine: DistEngine, ask_to_be_told: Callable[[int], None]
    ) -> None:
        self._container = container
        self._engine = engine
        self._ask_to_be_told = ask_to_be_told

    def wants_calls(self) -> bool:
        """Calls made inside a context, with grad mode on."""
        return ambient.current_context_id() != 0 and torch.is_grad_enabled()

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> RecordedCall | None:
        """Records a send for tensors that require grad, in calls made with grad mode on and in replies."""
        # A reply is recorded whatever the mode of the thread that happens to send it.
        context_id = ambient.current_context_id() if envelope.kind == "call" else envelope.note.context_id
        context, peer = self._container.find(context_id), envelope.peer.id
        recorded = [tensor for tensor in tensors if tensor.requires_grad]
        if context is None or not context.touch(peer):
            if not recorded or envelope.kind == "call":
                return None
            where = self._container.where_released(context_id) or "long ago"
            return RecordedCall(context_id, released=where)
        self._engine.heard_of(envelope.peer)
        message_id = NO_ID
        if recorded:
            message_id = self._container.new_message_id()
            site = RESULT if envelope.kind == "reply" else None
            context.record_send(message_id, peer, envelope.function, recorded, site)
        elif envelope.kind == "reply":
            return None
        return RecordedCall(context_id, message_id, len(recorded), torch.is_anomaly_enabled())

    def on_untracked(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> None:
        """Refuses tensors whose gradients would be lost.

        Raises:
            CannotSend: Always.
        """
        kind = type(tensors[0])
        what = (
            f"an argument of {envelope.function}" if envelope.kind == "call" else f"the result of {envelope.function}"
        )
        raise CannotSend(
            f"{what} is a {kind.__module__}.{kind.__qualname__} that requires grad, and inside an autograd context it "
            f"cannot be sent to {envelope.peer.name}: gradients do not get through its __reduce_ex__. Send a tensor that "
            f"it is made of, or its detach()"
        )

    def incoming(self, envelope: Envelope, note: Any, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Records a recv: the tensors that were recorded by the sender become outputs of its node.

        Raises:
            DecodeError: The note does not fit the message.
            LimitExceeded: The sender has brought too many contexts and messages here.
            UnknownContext: The callee has released a context that is still in use here: gradients would get lost.
        """
        message: RecordedCall = note
        is_call = envelope.kind == "call"
        if message.message_id != NO_ID and creator_of(message.message_id) != envelope.peer.id:
            raise DecodeError(f"{envelope.peer.name} recorded a message under an id of another worker")
        if message.released and self._container.find(message.context_id) is not None:
            raise UnknownContext(
                f"Could not find autograd context with id: {message.context_id} on worker {envelope.peer.name} when "
                f"{envelope.function} returned: it was released {message.released}"
            )
        # A reply belongs to a call that was made here, in a context that is here unless it was released meanwhile.
        context = (
            self._container.get_or_create(message.context_id, envelope.peer.id)
            if is_call
            else self._container.find(message.context_id)
        )
        if context is None or not (context.touch(envelope.peer.id) if is_call else context.knows(envelope.peer.id)):
            return tensors  # over: a late message does not revive it
        self._engine.heard_of(envelope.peer)  # it may have been taken for dead after the call was recorded
        if is_call and _is_cut_off(current_request()):
            self._ask_to_be_told(message.context_id)
        if message.message_id == NO_ID:
            return tensors
        places = [number for number, tensor in enumerate(tensors) if tensor.requires_grad]
        if len(places) != message.num_tensors or not places:
            raise DecodeError(
                f"{envelope.peer.name} recorded {message.num_tensors} tensors, but {len(places)} that require grad arrived"
            )
        if is_call:
            self._container.quotas.charge(envelope.peer.id, context, MESSAGE_BYTES)
        chosen = [tensors[number] for number in places]
        outputs = context.record_recv(message.message_id, envelope.peer.id, envelope.function, chosen)
        values = list(tensors)
        for number, output in zip(places, outputs, strict=True):
            values[number] = output
        return values

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """The called function runs in the caller's context."""
        message: RecordedCall = note

        def run(*args: Any, **kwargs: Any) -> Any:
            with ambient.inside(message.context_id), self._recording(message, envelope.function):
                if message.detects_anomalies:
                    with anomalies.enabled(True):
                        return function(*args, **kwargs)
                return function(*args, **kwargs)

        return run

    def _recording(self, message: RecordedCall, function: str) -> contextlib.AbstractContextManager[object]:
        """Only a worker with shared parameters has to look after them."""
        context = self._container.find(message.context_id) if sharing.concerns(function) else None
        return _NOTHING if context is None else sharing.recording(context, function)


def _is_cut_off(request: Request | None) -> bool:
    """Whether the connection of a call has ended: contexts of its caller may have been looked through before."""
    return request is not None and request.source.stream.is_closed
