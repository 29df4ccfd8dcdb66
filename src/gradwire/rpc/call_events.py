r"""Events of calls while they are observed, at both ends (`gradwire.observe`).

    caller   call       serialize  wire ----------------------------------------------> deserialize
    callee                             \--> queue  deserialize  run  serialize  wire --/

The arrows have ids that both ends can compute: the caller's rank and incarnation, and the number of the call.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gradwire.observe.events import call_flow, reply_flow, tell, thread_id
from gradwire.wire.messages import Call, Failure, Reply, TensorMeta

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent
    from gradwire.rpc.connection import Connection, Request
    from gradwire.rpc.pending_calls import PendingCall


class CallTrace:
    """Tells what happens to one call, at its caller.

    Args:
        began_ns: When its arguments began to be packed.
    """

    __slots__ = ("_agent", "_began_ns", "_call", "_context_id", "_num_bytes", "_send_ns", "_thread")

    def __init__(self, agent: Agent, call: PendingCall, began_ns: int) -> None:
        self._agent = agent
        self._call = call
        self._began_ns = began_ns
        self._context_id = 0
        self._num_bytes = 0
        self._send_ns = 0
        is_waited_for = call.future is None and call.on_done is None  # by the thread that makes it
        self._thread = thread_id() if is_waited_for else 0

    def tell_packed(self, message: Call, packed_ns: int) -> None:
        """Tell that the arguments were packed at that time; the message has all of its notes."""
        call = self._call
        self._context_id = context_id_in(message.notes)
        self._num_bytes = message.body_bytes
        tell(
            "serialize",
            call.function,
            self._agent.info.name,
            self._began_ns,
            end_ns=packed_ns,
            peer=call.worker,
            context_id=self._context_id,
            num_bytes=message.body_bytes,
        )
        self._send_ns = time.monotonic_ns()

    def tell_sent(self, message: Call) -> None:
        """Tell that the call is in the kernel or in shared memory."""
        call, info = self._call, self._agent.info
        self._num_bytes = num_bytes_of(message)
        tell(
            "wire",
            call.function,
            info.name,
            self._send_ns,
            peer=call.worker,
            context_id=self._context_id,
            flow_out=(call_flow(info.id, self._agent.address.incarnation, call.call_id),),
            num_bytes=self._num_bytes,
        )

    def tell_loaded(self, message: Reply | Failure, start_ns: int) -> None:
        """Tell that the result is unpacked."""
        call, info = self._call, self._agent.info
        tell(
            "deserialize",
            call.function,
            info.name,
            start_ns,
            peer=call.worker,
            context_id=self._context_id,
            flow_in=(reply_flow(info.id, self._agent.address.incarnation, call.call_id),),
            num_bytes=num_bytes_of(message),
        )

    def tell_ended(self, error: BaseException | None) -> None:
        """Tell how the call has ended."""
        call = self._call
        tell(
            "call",
            call.function,
            self._agent.info.name,
            self._began_ns,
            thread=self._thread,
            peer=call.worker,
            context_id=self._context_id,
            num_bytes=self._num_bytes,
            outcome="ok" if error is None else type(error).__name__,
            details={"call_id": call.call_id},
        )


def tell_not_packed(agent: Agent, to: str, function: str, began_ns: int, error: BaseException) -> None:
    """Tell of a call that was not made, because its arguments cannot be sent."""
    tell("call", function, agent.info.name, began_ns, peer=to, outcome=type(error).__name__)


def tell_arrived(request: Request, message: Call, start_ns: int) -> None:
    """Tell at the callee that a request left the queue at that time, and that its arguments are unpacked now."""
    source = request.source
    worker, peer, context_id = source.agent.info.name, source.info.name, context_id_in(request.notes)
    common: dict[str, Any] = {"peer": peer, "context_id": context_id}
    num_bytes = num_bytes_of(message)
    if request.received_ns:
        tell("queue", request.function, worker, request.received_ns, end_ns=start_ns, thread=0, **common)
    flow = call_flow(*_caller(source), request.call_id)
    tell("deserialize", request.function, worker, start_ns, flow_in=(flow,), num_bytes=num_bytes, **common)


def tell_run(request: Request, start_ns: int, error: BaseException | None = None) -> None:
    """Tell at the callee that the function has returned, or raised."""
    _tell_of("run", request, start_ns, outcome="ok" if error is None else type(error).__name__)


def tell_packed(request: Request, start_ns: int, num_bytes: int) -> None:
    _tell_of("serialize", request, start_ns, num_bytes=num_bytes)


def tell_replied(request: Request, message: Reply | Failure, start_ns: int) -> None:
    """Tell that a result or an error is in the kernel or in shared memory."""
    flow = reply_flow(*_caller(request.source), request.call_id)
    _tell_of("wire", request, start_ns, flow_out=(flow,), num_bytes=num_bytes_of(message))


def _tell_of(kind: str, request: Request, start_ns: int, **fields: Any) -> None:
    source, context_id = request.source, context_id_in(request.notes)
    worker, peer = source.agent.info.name, source.info.name
    tell(kind, request.function, worker, start_ns, peer=peer, context_id=context_id, **fields)


def _caller(source: Connection) -> tuple[int, int]:
    address = source.agent.address if source.reader is None else source.address  # a worker that calls itself
    return address.info.id, address.incarnation


def context_id_in(notes: dict[str, Any]) -> int:
    """Return the autograd context that a message belongs to; 0 for none."""
    for note in notes.values():
        context_id = getattr(note, "context_id", 0)
        if context_id:
            return int(context_id)
    return 0


def num_bytes_of(message: Call | Reply | Failure) -> int:
    """Return the bytes of values that a message brings, those in shared memory included."""
    return 0 if isinstance(message, Failure) else message.body_bytes + _num_bytes(message.tensors)


def _num_bytes(metas: Iterable[TensorMeta]) -> int:
    return sum(meta.num_bytes + _num_bytes(meta.parts) for meta in metas)
