"""Exactly-once delivery: messages arrive once, in any order, unless the receiver ends. Pure: events in, batches out.

Batches are numbered for each receiver and kept until it has acknowledged them. A connection that ends may lose some, so all
that are not acknowledged are sent again, and the receiver takes each number once. An acknowledgement names all that has
arrived so far, so the next one makes up for a lost one; it travels with the messages in the other direction, or alone if
there are none.

A worker that is presumed dead may be behind a connection that was cut, and come back. Nothing is sent to it until then, and
nothing is dropped until its incarnation has ended (`forget`).

At most `WINDOW` batches of at most `MAX_MESSAGES` are in flight to one worker; the rest waits here.
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
WINDOW = 64  # batches in flight to one worker
_MAX_BACKLOG = 1 << 19  # messages to one worker; above, nothing that would need an answer is taken from it
_NOT_URGENT = (Accept, Delete)  # no worker waits for these


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages that travel together."""

    sender: Worker
    to: Worker  # another incarnation ignores it
    number: Number  # rises by one with each batch to that worker; 0 if it only acknowledges
    up_to: Number = 0  # all batches up to this number have arrived in the other direction
    # Numbers above that which have arrived as well.
    beyond: Annotated[tuple[Number, ...], msgspec.Meta(max_length=WINDOW)] = ()
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=MAX_MESSAGES)] = ()


@dataclass(slots=True)
class Channel:
    """The state of both directions between this worker and another."""

    waiting: collections.deque[Message] = field(default_factory=collections.deque)  # not in a batch yet
    unacknowledged: dict[int, Batch] = field(default_factory=dict)  # by number
    last_number: int = 0  # of the latest batch sent
    up_to: int = 0  # all batches up to this number have arrived here
    beyond: set[int] = field(default_factory=set)  # numbers above that which have arrived as well
    must_acknowledge: bool = False  # the other worker has not been told that yet
    must_repeat: bool = False  # batches that are not acknowledged may be lost
    is_suspended: bool = False  # the other worker is presumed dead

    @property
    def num_messages(self) -> int:
        return len(self.waiting) + sum(len(batch.messages) for batch in self.unacknowledged.values())

    def has_room(self) -> bool:
        return self.last_number < min(self.unacknowledged, default=self.last_number + 1) + WINDOW - 1


class Outbox:
    """The messages that one worker has to send to the others."""

    def __init__(self, own: Worker) -> None:
        self._own = own
        self._channels: dict[Worker, Channel] = {}
        self._due: set[Worker] = set()  # workers to which there may be something to send
        self._over: dict[int, int] = {}  # by rank: the latest incarnation that is known to have ended
        self.has_messages = False  # there may be more to send than acknowledgements
        self.has_urgent = False  # a worker waits for a message that is to be sent

    def __repr__(self) -> str:
        return f"<Outbox of worker {self._own[0]}: {self.num_open} open>"

    def put(self, message: Message) -> None:
        """Queue a message for the next batch to its receiver, or until the receiver is back."""
        to = message.to
        if self._is_over(to):
            return
        channel = self._channel(to)
        channel.waiting.append(message)
        if not channel.is_suspended:
            self._due.add(to)
            self.has_messages = True
            self.has_urgent = self.has_urgent or not isinstance(message, _NOT_URGENT)

    def take(self) -> list[Batch]:
        self.has_messages = self.has_urgent = False
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
        """Accept a batch; return False if its messages have arrived before, or it has none."""
        channel = self._channel(batch.sender)
        known = channel.unacknowledged
        for number in [number for number in known if number <= batch.up_to or number in batch.beyond]:
            del known[number]
        if channel.waiting:
            self._due.add(batch.sender)
            self.has_messages = True
        number = batch.number
        if not number:
            return False
        if number > channel.up_to + WINDOW:
            raise DecodeError(
                f"batch {number} of rank {batch.sender[0]} is out of sequence: {channel.up_to} have arrived"
            )
        channel.must_acknowledge = True
        self._due.add(batch.sender)
        if number <= channel.up_to or number in channel.beyond:
            return False
        if channel.num_messages > _MAX_BACKLOG:
            raise DecodeError(f"rank {batch.sender[0]} does not read the replies to its reference messages")
        channel.beyond.add(number)
        while channel.up_to + 1 in channel.beyond:
            channel.up_to += 1
            channel.beyond.discard(channel.up_to)
        return True

    def cut(self, rank: int) -> None:
        """Handle a broken connection to a live worker: batches in flight may be lost."""
        for worker, channel in self._channels.items():
            if worker[0] == rank:
                channel.must_repeat = channel.must_acknowledge = self.has_messages = True
                self._due.add(worker)

    def suspend(self, worker: Worker) -> None:
        """Stop sending to a worker that is presumed dead."""
        if not self._is_over(worker):
            self._channel(worker).is_suspended = True

    def resume(self, worker: Worker) -> None:
        """Resume sending to a worker that was presumed dead and is connected again."""
        channel = self._channels.get(worker)
        if channel is not None and channel.is_suspended:
            channel.is_suspended = False
            self.cut(worker[0])
            self.has_urgent = self.has_urgent or bool(channel.waiting)

    def forget(self, worker: Worker) -> None:
        """Handle the certain end of an incarnation and all earlier ones: drop everything kept for them."""
        self._over[worker[0]] = max(worker[1], self._over.get(worker[0], 0))
        for known in [known for known in self._channels if self._is_over(known)]:
            self.drop(known)

    def drop(self, worker: Worker) -> None:
        """Drop all messages queued for a worker and the state of its batches."""
        self._channels.pop(worker, None)
        self._due.discard(worker)

    def _is_over(self, worker: Worker) -> bool:
        return worker[1] <= self._over.get(worker[0], -1)

    def _channel(self, worker: Worker) -> Channel:
        channel = self._channels.get(worker)
        if channel is None:
            channel = self._channels[worker] = Channel()
        return channel

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send, not even an acknowledgement."""
        return not self._due

    @property
    def num_open(self) -> int:
        """Messages that wait and batches that are not acknowledged, without those for workers presumed dead."""
        open_ = [channel for channel in self._channels.values() if not channel.is_suspended]
        return sum(len(channel.waiting) + len(channel.unacknowledged) for channel in open_)


prepare(Batch)
