"""Messages to other workers that arrive for certain, unless the receiver dies. Pure: events in, batches out.

Batches are numbered for each receiver and kept until it has acknowledged them. A connection that is cut may have taken some
with it, so all that are not acknowledged are sent again: repeats are harmless. Acknowledgements go along with whatever is
sent the other way, or alone if nothing is.
"""

from __future__ import annotations

import msgspec

from gradwire.rref._actions import Accept, Delete, Message, Worker
from gradwire.wire.messages import prepare

_PATIENT = (Accept, Delete)  # nobody waits for these


class Batch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Messages that travel together.

    Attributes:
        sender: Who sends it.
        to: Whom it is meant for; another incarnation ignores it.
        number: Rises by one with each batch to that worker; 0 if it only acknowledges.
        acknowledged: Numbers of batches that have arrived the other way.
        messages: In order.
    """

    sender: Worker
    to: Worker
    number: int
    acknowledged: tuple[int, ...] = ()
    messages: tuple[Message, ...] = ()


class Outbox:
    """What one worker has to tell the others.

    Args:
        own: This worker.
    """

    def __init__(self, own: Worker) -> None:
        self._own = own
        self._waiting: dict[Worker, list[Message]] = {}
        self._unacknowledged: dict[Worker, dict[int, Batch]] = {}
        self._to_acknowledge: dict[Worker, list[int]] = {}
        self._last_number: dict[Worker, int] = {}
        self._lost: set[Worker] = set()
        self.has_urgent = False  # somebody waits for what is to be sent

    def __repr__(self) -> str:
        return f"<Outbox of worker {self._own[0]}: {self.num_open} open>"

    def put(self, message: Message) -> None:
        """A message to be sent with the next batch; nothing is said to the dead."""
        if message.to in self._lost:
            return
        self._waiting.setdefault(message.to, []).append(message)
        self.has_urgent = self.has_urgent or not isinstance(message, _PATIENT)

    def take(self) -> list[Batch]:
        """Everything that has to be sent now."""
        self.has_urgent = False
        batches = []
        for to in {*self._waiting, *self._to_acknowledge}:
            messages = tuple(self._waiting.pop(to, ()))
            number = 0
            if messages:
                number = self._last_number[to] = self._last_number.get(to, 0) + 1
            batch = Batch(self._own, to, number, tuple(self._to_acknowledge.pop(to, ())), messages)
            if messages:
                self._unacknowledged.setdefault(to, {})[number] = batch
            batches.append(batch)
        return batches

    def arrived(self, batch: Batch) -> None:
        """A batch of another worker is here."""
        if batch.number:
            self._to_acknowledge.setdefault(batch.sender, []).append(batch.number)
        known = self._unacknowledged.get(batch.sender, {})
        for number in batch.acknowledged:
            known.pop(number, None)

    def cut(self, rank: int) -> list[Batch]:
        """A connection to a worker ended, and it lives: what may be lost is to be sent again."""
        return [batch for to, known in self._unacknowledged.items() if to[0] == rank for batch in known.values()]

    def lost(self, worker: Worker) -> None:
        """A worker is dead."""
        self._lost.add(worker)
        for table in (self._waiting, self._unacknowledged, self._to_acknowledge, self._last_number):
            table.pop(worker, None)

    def seen(self, worker: Worker) -> None:
        """A worker that was taken for dead is there."""
        self._lost.discard(worker)

    @property
    def has_messages(self) -> bool:
        """Whether messages are to be sent."""
        return bool(self._waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is to be sent, not even an acknowledgement."""
        return not (self._waiting or self._to_acknowledge)

    @property
    def num_open(self) -> int:
        """Messages that wait, and batches that are not acknowledged."""
        return sum(map(len, self._waiting.values())) + sum(map(len, self._unacknowledged.values()))


prepare(Batch)
