"""Messages to other workers that arrive exactly once, unless the receiver ends. Pure: events in, batches out.

Batches are numbered for each receiver and kept until it has acknowledged them. A connection that ends may have taken some
with it, so all that are not acknowledged are sent again, and the receiver takes each number once. Acknowledgements say all
that has arrived so far, so the next one makes up for one that is lost; they go along with whatever is sent the other way,
or alone if nothing is.

A worker that is taken for dead may be behind a connection that is cut, and come back. Nothing is sent to it meanwhile, and
nothing is forgotten: only the end of its incarnation ends what is kept for it (`forget`).

At most `WINDOW` batches of at most `MAX_MESSAGES` are under way to one worker; the rest waits here.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from gradwire.errors import DecodeError
from gradwire.rref._messages import Accept, Delete, Message, Number, Worker
from gradwire.wire.messages import prepare

MAX_MESSAGES = 2048  # in one batch: about 64 KiB, and some milliseconds of the receiver's time
WINDOW = 64
_MAX_BACKLOG = 1 << 19  # messages to one worker; above, nothing that would need an answer is taken from it
_PATIENT = (Accept, Delete)  # no worker waits for these


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages that travel together.

    Attributes:
        sender: The worker that sends it.
        to: The worker that it is meant for; another incarnation ignores it.
        number: Rises by one with each batch to that worker; 0 if it only acknowledges.
        up_to: All batches up to this number have arrived the other way.
        beyond: Numbers above that which have arrived, too.
        messages: In order.
    """

    sender: Worker
    to: Worker
    number: Number
    up_to: Number = 0
    beyond: Annotated[tuple[Number, ...], msgspec.Meta(max_length=WINDOW)] = ()
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=MAX_MESSAGES)] = ()


@dataclass(slots=True)
class Channel:
    """What goes to one worker, and what came from it.

    Attributes:
        waiting: Messages that no batch holds yet.
        unacknowledged: Batches by number.
        last_number: Of the latest batch.
        up_to: All batches up to this number have arrived here.
        beyond: Numbers above that which have arrived, too.
        must_acknowledge: Whether the other worker has not been told that yet.
        must_repeat: Whether batches that are not acknowledged may be lost.
        is_suspended: Whether the other worker is taken for dead.
    """

    waiting: collections.deque[Message] = field(default_factory=collections.deque)
    unacknowledged: dict[int, Batch] = field(default_factory=dict)
    last_number: int = 0
    up_to: int = 0
    beyond: set[int] = field(default_factory=set)
    must_acknowledge: bool = False
    must_repeat: bool = False
    is_suspended: bool = False

    @property
    def num_messages(self) -> int:
        return len(self.waiting) + sum(len(batch.messages) for batch in self.unacknowledged.values())

    def has_room(self) -> bool:
        return self.last_number < min(self.unacknowledged, default=self.last_number + 1) + WINDOW - 1


class Outbox:
    """What one worker has to tell the others.

    Args:
        own: This worker.
    """

    def __init__(self, own: Worker) -> None:
        self._own = own
        self._channels: dict[Worker, Channel] = {}
        self._due: set[Worker] = set()  # there may be something to send to them
        self._over: dict[int, int] = {}  # by rank: the latest incarnation that has ended for certain
        self.has_urgent = False  # a worker waits for what is to be sent

    def __repr__(self) -> str:
        return f"<Outbox of worker {self._own[0]}: {self.num_open} open>"

    def put(self, message: Message) -> None:
        """A message to be sent with the next batch, or when its receiver is back."""
        to = message.to
        if self.is_over(to):
            return
        channel = self._channel(to)
        channel.waiting.append(message)
        if not channel.is_suspended:
            self._due.add(to)
            self.has_urgent = self.has_urgent or not isinstance(message, _PATIENT)

    def take(self) -> list[Batch]:
        """Everything that has to be sent now."""
        self.has_urgent = False
        due, self._due = self._due, set()
        return [batch for to in due for batch in self._take_for(to, self._channels[to])]

    def _take_for(self, to: Worker, channel: Channel) -> list[Batch]:
        if channel.is_suspended:
            return []
        batches = list(channel.unacknowledged.values()) if channel.must_repeat else []
        channel.must_repeat = False
        received = (channel.up_to, tuple(sorted(channel.beyond)))
        while channel.waiting and channel.has_room():
            size = min(len(channel.waiting), MAX_MESSAGES)
            messages = tuple(channel.waiting.popleft() for _ in range(size))
            channel.last_number += 1
            batch = Batch(self._own, to, channel.last_number, *received, messages)
            channel.unacknowledged[batch.number] = batch
            batches.append(batch)
            channel.must_acknowledge = False
        if channel.must_acknowledge:
            batches.append(Batch(self._own, to, 0, *received))
            channel.must_acknowledge = False
        return batches

    def arrived(self, batch: Batch) -> bool:
        """A batch of another worker is here; False if its messages have been here before, or it has none.

        Raises:
            DecodeError: Its number cannot be right, or that worker asks for answers and does not take them.
        """
        channel = self._channel(batch.sender)
        known = channel.unacknowledged
        for number in [number for number in known if number <= batch.up_to or number in batch.beyond]:
            del known[number]
        if channel.waiting:
            self._due.add(batch.sender)
        number = batch.number
        if not number:
            return False
        if number > channel.up_to + WINDOW:
            raise DecodeError(f"batch {number} of worker {batch.sender[0]}, of which {channel.up_to} have arrived")
        channel.must_acknowledge = True
        self._due.add(batch.sender)
        if number <= channel.up_to or number in channel.beyond:
            return False
        if channel.num_messages > _MAX_BACKLOG:
            raise DecodeError(f"worker {batch.sender[0]} does not take the answers to what it asks about references")
        channel.beyond.add(number)
        while channel.up_to + 1 in channel.beyond:
            channel.up_to += 1
            channel.beyond.discard(channel.up_to)
        return True

    def cut(self, rank: int) -> None:
        """A connection with a worker ended, and it lives: what was under way may be lost."""
        for worker, channel in self._channels.items():
            if worker[0] == rank:
                channel.must_repeat = channel.must_acknowledge = True
                self._due.add(worker)

    def suspend(self, worker: Worker) -> None:
        """A worker is taken for dead: nothing is sent to it for now."""
        if not self.is_over(worker):
            self._channel(worker).is_suspended = True

    def resume(self, worker: Worker) -> None:
        """A worker that was taken for dead is there."""
        channel = self._channels.get(worker)
        if channel is not None and channel.is_suspended:
            channel.is_suspended = False
            self.cut(worker[0])
            self.has_urgent = self.has_urgent or bool(channel.waiting)

    def forget(self, worker: Worker) -> None:
        """An incarnation has ended for certain, and so have earlier ones: nothing more is to be said to them."""
        self._over[worker[0]] = max(worker[1], self._over.get(worker[0], 0))
        for known in [known for known in self._channels if self.is_over(known)]:
            self.refute(known)

    def refute(self, worker: Worker) -> None:
        """There never was such a worker."""
        self._channels.pop(worker, None)
        self._due.discard(worker)

    def is_over(self, worker: Worker) -> bool:
        """Whether that incarnation has ended for certain."""
        return worker[1] <= self._over.get(worker[0], -1)

    def _channel(self, worker: Worker) -> Channel:
        channel = self._channels.get(worker)
        if channel is None:
            channel = self._channels[worker] = Channel()
        return channel

    @property
    def has_messages(self) -> bool:
        """Whether messages are to be sent."""
        return any(self._channels[to].waiting for to in self._due)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be sent, not even an acknowledgement."""
        return not self._due

    @property
    def num_open(self) -> int:
        """Messages that wait, and batches that are not acknowledged, except for workers that are taken for dead."""
        open_ = [channel for channel in self._channels.values() if not channel.is_suspended]
        return sum(len(channel.waiting) + len(channel.unacknowledged) for channel in open_)


prepare(Batch)
