"""The events of one worker, in memory of a fixed size, and as bytes for another worker."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import msgspec

from gradwire.observe.events import Event, subscribe

PIECE_EVENTS = 1000
"""Events in one piece of bytes."""

_TEXT_CHARS = 256
_MAX_DETAILS = 16
_MAX_FLOWS = 1024  # of one event: a message of a pass can answer many of the forward pass

_Text = Annotated[str, msgspec.Meta(max_length=_TEXT_CHARS)]
_Uint = Annotated[int, msgspec.Meta(ge=0)]  # at most 2**64 - 1: the format has no larger ones
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # files have room for no more
_Flows = Annotated[tuple[_Uint, ...], msgspec.Meta(max_length=_MAX_FLOWS)]
_Details = Annotated[dict[_Text, str | int | float | bool], msgspec.Meta(max_length=_MAX_DETAILS)]


class Recorder:
    """Records the events of one worker, the last `max_events` of them.

    Args:
        worker: Name of the worker; events of others in this process are left out.
        max_events: Events to keep.
    """

    def __init__(self, worker: str, max_events: int) -> None:
        self._worker = worker
        self._events: deque[Event] = deque(maxlen=max_events)
        self._count = itertools.count().__next__  # one operation, unlike an addition
        self._unsubscribe: Callable[[], None] | None = None
        self.num_dropped = 0

    def start(self) -> None:
        """Begin to record."""
        self._unsubscribe = subscribe(self._take)

    def _take(self, event: Event) -> None:
        if event.worker == self._worker:
            self._count()
            self._events.append(event)

    def stop(self) -> list[Event]:
        """Stop recording; return the events in the order in which they ended. `num_dropped` is known then. Idempotent."""
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()
            self.num_dropped = max(0, self._count() - len(self._events))
        return list(self._events)


class _SentEvent(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An event, as another worker may send it."""

    kind: _Text
    name: _Text
    start_ns: _Number
    end_ns: _Number
    thread: _Number
    peer: _Text
    context_id: _Uint
    flow_out: _Flows
    flow_in: _Flows
    num_bytes: _Number
    outcome: _Text
    details: _Details | None


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Annotated[list[_SentEvent], msgspec.Meta(max_length=PIECE_EVENTS)])


def encode_events(events: Iterable[Event]) -> Iterator[bytes]:
    """Return the events as pieces of bytes that `decode_events` can read; long texts are cut."""
    following = iter(events)
    while piece := list(itertools.islice(following, PIECE_EVENTS)):
        yield _encode([_as_sent(event) for event in piece])


def _as_sent(event: Event) -> _SentEvent:
    return _SentEvent(
        event.kind[:_TEXT_CHARS],
        event.name[:_TEXT_CHARS],
        event.start_ns,
        event.end_ns,
        event.thread,
        event.peer[:_TEXT_CHARS],
        event.context_id,
        event.flow_out[:_MAX_FLOWS],
        event.flow_in[:_MAX_FLOWS],
        event.num_bytes,
        event.outcome[:_TEXT_CHARS],
        None if event.details is None else _plain(event.details),
    )


def _plain(details: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in itertools.islice(details.items(), _MAX_DETAILS):
        is_plain = isinstance(value, int | float)
        found[str(key)[:_TEXT_CHARS]] = value if is_plain else str(value)[:_TEXT_CHARS]
    return found


def decode_events(data: bytes, worker: str) -> list[Event]:
    """Return the events of a piece that the worker of that name sent.

    Raises:
        ValueError: The bytes are not events within the bounds.
    """
    return [
        Event(item.kind, item.name, worker, *msgspec.structs.astuple(item)[2:])
        for item in _decoder.decode(data)
        if item.end_ns >= item.start_ns
    ]


def thread_names() -> dict[int, str]:
    """Return the names of the threads of this process, by their native ids."""
    return {item.native_id: item.name for item in threading.enumerate() if item.native_id is not None}
