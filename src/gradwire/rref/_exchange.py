"""What one worker does with batches about references, and with workers that go and come back. Pure.

Joins `_ownership`, which decides, and `_outbox`, which carries: messages go into the outbox, and what concerns this worker
alone is returned.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from gradwire.rref._actions import (
    Accept,
    Action,
    Adopt,
    Answer,
    Ask,
    Break,
    Confirm,
    Confirmed,
    Delete,
    EndSeen,
    Fail,
    Forget,
    Free,
    LocalAction,
    Message,
    Mourn,
    Worker,
)
from gradwire.rref._outbox import Batch, Outbox
from gradwire.rref._ownership import Ownership

_LOCAL = (Free, Fail, Break, Confirmed, Forget)


class Surroundings(Protocol):
    """What is known of other workers besides what they say of references."""

    def may_make(self, worker: Worker, rref_id: int) -> bool:
        """Whether a call of that worker that makes that value may be on its way."""

    def may_bring(self, worker: Worker) -> bool:
        """Whether a message of that worker may be here or on its way that was not unpacked yet."""

    def is_connected(self, worker: Worker) -> bool:
        """Whether anything may still come from that worker."""

    def was_connected(self, worker: Worker) -> bool:
        """Whether that worker was ever connected."""


class Exchange:
    """The references of one worker.

    Args:
        own: This worker.
        ownership: Decides.

    Attributes:
        ownership: Decides.
        outbox: What is to be sent.
    """

    def __init__(self, own: Worker, ownership: Ownership | None = None) -> None:
        self.ownership = ownership or Ownership(own)
        self.outbox = Outbox(own)

    def put(self, actions: Iterable[Action]) -> list[LocalAction]:
        """Queues messages; returns the rest."""
        local: list[LocalAction] = []
        for action in actions:
            if isinstance(action, _LOCAL):
                local.append(action)
            else:
                self.outbox.put(action)
        return local

    def on_batch(self, batch: Batch, around: Surroundings) -> list[LocalAction]:
        """A batch arrived. That of a worker that is taken for dead is not taken: should it live, it will send it again.

        Raises:
            DecodeError: It cannot be right.
        """
        if self.ownership.is_taken_for_dead(batch.sender) or not self.outbox.arrived(batch):
            return []
        return [action for message in batch.messages for action in self.put(self._event(message, batch.sender, around))]

    def _event(self, message: Message, sender: Worker, around: Surroundings) -> list[Action]:
        known = self.ownership
        match message:
            case Adopt():
                maker = message.maker
                if maker is not None and not around.may_make(maker, message.rref_id):
                    maker = None
                return known.adopt_received(sender, message.rref_id, message.fork_id, maker)
            case Confirm():
                is_new = message.is_known and known.is_pending(message.fork_id, sender)
                actions = known.confirmed(message.fork_id, sender, message.is_known)
                return [Confirmed(message.fork_id), *actions] if is_new else actions
            case Accept():
                return known.accepted(message.fork_id, sender)
            case Delete():
                return known.delete_received(sender, message.rref_id, message.fork_id, message.is_first)
            case Ask():
                return known.asked(sender, message.fork_id, message.is_last, around.may_bring(sender))
            case Answer():
                return known.answered(sender, message.fork_id, message.has_it, message.is_last)
            case Mourn():
                is_connected, is_known = around.is_connected(message.dead), around.was_connected(message.dead)
                return known.mourn_received(
                    sender, message.dead, message.round, is_connected=is_connected, is_known=is_known
                )
            case EndSeen():
                return known.end_seen(sender, message.dead, message.round)

    def lost(self, worker: Worker, others: Collection[Worker], reason: str) -> list[LocalAction]:
        """A worker is taken for dead; `others` are those still alive, without us."""
        self.outbox.suspend(worker)
        return self.put(self.ownership.worker_lost(worker, others, reason))

    def seen(self, worker: Worker) -> list[LocalAction]:
        """A worker is there."""
        self.outbox.resume(worker)
        return self.put(self.ownership.worker_seen(worker))

    def ended(self, worker: Worker) -> None:
        """An incarnation that was lost is dead for certain: what waits for it to come back need not wait any longer."""
        self.outbox.forget(worker)
        self.ownership.forget(worker)

    def refuted(self, worker: Worker, reason: str) -> list[LocalAction]:
        """There never was such a worker."""
        local = self.put(self.ownership.worker_refuted(worker, reason))
        self.outbox.refute(worker)
        return local
