"""Events: what happens on the workers of this process, delivered to all subscribers.

They are the one source of traces, metrics and timelines. Nothing is observed until `subscribe` is called. Until then, an
instrumented place only reads `sink` and compares it with None, and takes no time stamps:

    began = time.monotonic_ns() if events.sink is not None else 0
    ...
    if began:
        events.tell("serialize", function, worker, began)

Kinds of events:

    call            one call, at its caller, from its start until its result or error is there
    serialize       packing of arguments or of a result; deserialize is the way back
    wire            a message on its way into the kernel or shared memory
    queue, run      at the callee: waiting for a free slot; the called function
    backward        one pass on one worker, and its parts: join, gradients (sent or received), local_engine, wait, commit
    optimizer_step  at the worker that asks for it, and at each owner
    rref            a value is created, fetched, or freed
    checkpoint      a save or a load, and what owners do for it
    connection      opened, or ended
    operator        an operator of torch, with ``profile=True``
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gradwire.observe.log import get_logger

_log = get_logger(__name__)

_MASK = (1 << 64) - 1
_FACTORS = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd: different arguments have different products


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened on a worker, reported when it has ended.

    Attributes:
        kind: What it was; see `gradwire.observe.events`.
        name: The function, optimizer, path or operation.
        worker: The worker that it happened on; several can be in one process.
        start_ns: When it began, as `time.monotonic_ns` of that worker's machine tells it.
        end_ns: When it ended; equal to `start_ns` for an instant.
        thread: The native id of the thread that it happened in; 0 if it is not bound to one.
        peer: The worker at the other end, or empty.
        context_id: The autograd context, or 0.
        flow_out: Ids of the messages that left here; each is among the `flow_in` of an event of another worker.
        flow_in: Ids of the messages that arrived here.
        num_bytes: Bytes of arguments, results or gradients.
        outcome: ``ok``, or the name of the error's class.
        details: Further values, such as the mode of a pass.
    """

    kind: str
    name: str
    worker: str
    start_ns: int
    end_ns: int
    thread: int = 0
    peer: str = ""
    context_id: int = 0
    flow_out: tuple[int, ...] = ()
    flow_in: tuple[int, ...] = ()
    num_bytes: int = 0
    outcome: str = "ok"
    details: dict[str, Any] | None = None

    @property
    def duration_s(self) -> float:
        """Seconds from beginning to end."""
        return (self.end_ns - self.start_ns) / 1e9


Subscriber = Callable[[Event], None]

sink: Subscriber | None = None
"""Takes events while there are subscribers; None while nothing is observed."""


class _Subscription:
    __slots__ = ("callback",)

    def __init__(self, callback: Subscriber) -> None:
        self.callback = callback


class _Thread(threading.local):
    number = 0  # the native id; asking the system for it takes longer than all the rest of `tell`


_lock = threading.Lock()  # guards changes of _subscriptions and sink
_subscriptions: tuple[_Subscription, ...] = ()
_thread = _Thread()


def _after_fork() -> None:
    """Forget the subscribers of the parent: locks that they take may be held by threads that are not here."""
    global sink, _lock, _subscriptions
    _thread.number = 0
    sink, _lock, _subscriptions = None, threading.Lock(), ()


os.register_at_fork(after_in_child=_after_fork)


def subscribe(callback: Subscriber) -> Callable[[], None]:
    """Call a function with every event of the workers in this process, until the returned function is called.

    It is called in the thread in which the event ended, often one that must not wait: it should only store the event. If it
    raises, that is logged, and it is not called again. A process that is forked from this one has no subscribers.
    """

    subscription = _Subscription(callback)  # the same callback may be subscribed twice
    _change(add=subscription)
    return lambda: _change(remove=subscription)


def all_subscribed() -> list[Subscriber]:
    """Return the functions that are called with events now."""
    return [item.callback for item in _subscriptions]


def _change(add: _Subscription | None = None, remove: _Subscription | None = None) -> None:
    global sink, _subscriptions
    with _lock:
        kept = [item for item in _subscriptions if item is not remove]
        _subscriptions = tuple(kept if add is None else [*kept, add])
        sink = _deliver if _subscriptions else None


def _deliver(event: Event) -> None:
    for subscription in _subscriptions:
        try:
            subscription.callback(event)
        except Exception:
            _change(remove=subscription)
            _log.exception("a subscriber of events failed on an event of kind %s and is not called again", event.kind)


def thread_id() -> int:
    """Return the native id of this thread."""
    number = _thread.number
    if number == 0:
        number = _thread.number = threading.get_native_id()
    return number


def tell(
    kind: str,
    name: str,
    worker: str,
    start_ns: int,
    *,
    end_ns: int | None = None,
    thread: int | None = None,
    peer: str = "",
    context_id: int = 0,
    flow_out: tuple[int, ...] = (),
    flow_in: tuple[int, ...] = (),
    num_bytes: int = 0,
    outcome: str = "ok",
    details: dict[str, Any] | None = None,
) -> None:
    """Tell the subscribers of an event that ends now, in this thread, unless `end_ns` and `thread` say otherwise."""
    current = sink
    if current is not None:
        end = time.monotonic_ns() if end_ns is None else end_ns
        number = (_thread.number or thread_id()) if thread is None else thread
        current(
            Event(
                kind,
                name,
                worker,
                start_ns,
                end,
                number,
                peer,
                context_id,
                flow_out,
                flow_in,
                num_bytes,
                outcome,
                details,
            )
        )


class Span:
    """Tells of the block that it is the context of, with its outcome; for places where a few calls more do not matter.

    Args:
        worker: Returns the name of the worker. Like `details`, it is called only if the block is observed.
        details: Returns further values when the block begins.

    Attributes:
        num_bytes: To be set inside the block.
    """

    __slots__ = (
        "_context_id",
        "_details",
        "_fields",
        "_get_details",
        "_get_worker",
        "_start_ns",
        "_worker",
        "num_bytes",
    )

    def __init__(
        self,
        kind: str,
        name: str,
        worker: Callable[[], str],
        context_id: int = 0,
        details: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        self._fields = kind, name
        self._get_worker = worker
        self._get_details = details
        self._context_id = context_id
        self._start_ns = 0
        self.num_bytes = 0
        self._worker = ""
        self._details: dict[str, Any] | None = None

    def __enter__(self) -> Span:
        if sink is not None:
            self._worker = self._get_worker()
            self._details = None if self._get_details is None else self._get_details()
            self._start_ns = time.monotonic_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._start_ns:
            tell(
                *self._fields,
                self._worker,
                self._start_ns,
                context_id=self._context_id,
                num_bytes=self.num_bytes,
                outcome="ok" if kind is None else kind.__name__,
                details=self._details,
            )


def tell_now(kind: str, name: str, worker: str, **fields: Any) -> None:
    """Tell of an instant."""
    now = time.monotonic_ns()
    tell(kind, name, worker, now, end_ns=now, **fields)


def call_flow(caller: int, incarnation: int, call_id: int) -> int:
    """Return the id of the message that brings a call; both workers can compute it."""
    base = incarnation * _FACTORS[0] + caller * _FACTORS[1]
    return (base ^ (call_id << 1)) & _MASK


def reply_flow(caller: int, incarnation: int, call_id: int) -> int:
    """Return the id of the message that answers a call."""
    return call_flow(caller, incarnation, call_id) ^ 1


def gradient_flow(pass_id: int, message_id: int) -> int:
    """Return the id of the gradients that a pass sends back for a message of the forward pass."""
    return (pass_id * _FACTORS[0] + message_id * _FACTORS[1]) & _MASK
