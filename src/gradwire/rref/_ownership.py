r"""Who holds which reference: events in, actions out. No threads, no sockets, no clocks.

The owner of a value keeps the list of its holders: forks, each with the worker that has it. A fork is made whenever a
reference travels, and lives as a child of whoever sent it until the owner knows of it:

    owner A -- fork --> user B        A lists B before the message leaves; B says Accept when it has arrived
    user B  -- fork --> user C        C asks A to be listed (Adopt); B keeps its own fork until C says Accept
    user B  -- back --> owner A       A finds its own value; B keeps its fork until A says Accept

    C               B               A
    | <- message -- |               |     B pins its own fork: it is not deleted while a child is on its way
    | -- Adopt -------------------> |     A lists C
    | <- Confirm ------------------ |
    | -- Accept --> |               |     B unpins its fork, and deletes it if nobody needs it any more

Safety: while a holder lives, the value lives. A fork is deleted only when each child of it is listed, or will never be
taken. Liveness: when all holders are gone, or their workers are, the value is freed.

What is sent here arrives, in any order and maybe repeated, or its receiver is dead (`_outbox` sees to that). The messages of
users that carry references may be lost, though: whoever sent one asks later (`overdue`). A worker that has twice said that
it does not have a fork never takes it.

A dead worker may have sent forks that are not listed yet. What it held, and what was on its way to it, is therefore kept
until every other worker has said that it has seen the end, too (`Mourn`, `EndSeen`), and that whatever it got from the dead
one is listed. See `_mourning`.

Workers that live may take each other for dead and meet again (`worker_seen`): neither knows then what of its messages has
arrived. The owner keeps what it has listed and asks for it, a user asks again to be listed.

A reference may reach its owner before the call that makes the value does: the value is then *expected* until that call
arrives, or until whoever made it says that it never will.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gradwire.rref._actions import (
    Accept,
    Action,
    Adopt,
    Answer,
    Ask,
    Break,
    Confirm,
    Delete,
    Fail,
    Free,
    Resume,
    Worker,
)
from gradwire.rref._holdings import Child, Fork, ForkPhase, Holdings, Value

__all__ = ["ForkPhase", "Ownership"]


class Ownership(Holdings):
    """Decides what becomes of the references of one worker.

    Args:
        own: This worker.
    """

    # -- values that are here ----------------------------------------------------------------------------------------

    def value_made(self, rref_id: int) -> None:
        """This worker's own code has a value that it is going to share."""
        value = self._values.setdefault(rref_id, Value())
        value.is_needed, value.maker = True, None

    def needed_again(self, rref_id: int, fork_id: int) -> None:
        """This worker's own code has one more reference: to its own value (fork 0), or through a fork that it has."""
        held = self._forks.get(fork_id) if fork_id else self._values.get(rref_id)
        if held is not None:
            held.is_needed = True

    def value_dropped(self, rref_id: int) -> list[Action]:
        """This worker's own code needs its value no longer."""
        value = self._values.get(rref_id)
        if value is None:
            return []
        value.is_needed = False
        return self._free_if_unheld(rref_id)

    def value_created(self, rref_id: int, fork_id: int, user: Worker) -> bool:
        """Another worker has a value made here, and holds it; False if it has given it up already."""
        if fork_id in self._ended or user in self._mourning.ended:
            return False
        value = self._values.setdefault(rref_id, Value())
        value.maker = None
        value.holders[fork_id] = user
        return True

    def value_expected(self, rref_id: int, maker: Worker | None) -> bool:
        """Somebody refers to a value, which `maker` may still have to make; False if it is not here and never will be."""
        if rref_id in self._values:
            return True
        if maker is None or rref_id in self._ended or maker in self._mourning.ended:
            return False
        self._values[rref_id] = Value(maker=maker)
        return True

    # -- references to values elsewhere ------------------------------------------------------------------------------

    def fork_created(self, rref_id: int, fork_id: int, owner: Worker) -> None:
        """This worker has a value made elsewhere; the owner has not said so yet."""
        self._forks[fork_id] = Fork(rref_id, owner, is_first=True, maker=self._own)

    def fork_dropped(self, fork_id: int) -> list[Action]:
        """This worker's own code needs a reference no longer."""
        fork = self._forks.get(fork_id)
        if fork is None:
            return []
        fork.is_needed = False
        return self._delete_if_unneeded(fork_id)

    def fork_failed(self, fork_id: int, reason: str) -> list[Action]:
        """The call that was to make a value elsewhere failed; it may have arrived all the same, or arrive yet."""
        fork = self._forks.get(fork_id)
        if fork is None or fork.phase is not ForkPhase.PENDING:
            return []
        return [Delete(fork.owner, fork.rref_id, fork_id, True), *self._break([fork_id], reason)]

    # -- references on their way -------------------------------------------------------------------------------------

    def sent(self, rref_id: int, parent: int | None, child: int, to: Worker) -> bool:
        """A reference is about to travel: to a value of ours (`parent` None), or through a fork of ours.

        Returns:
            False if there is nothing to send: the value is not here, or the fork leads nowhere.
        """
        if parent is None:
            value = self._values.get(rref_id)
            if value is None:
                return False
            value.holders[child] = to
        else:
            fork = self._forks.get(parent)
            if fork is None or fork.phase is ForkPhase.BROKEN:
                return False
            fork.pins += 1
        self._children[child] = Child(to, rref_id, parent)
        return True

    def not_sent(self, child: int) -> list[Action]:
        """The message certainly never arrives."""
        return self._end_child(child, is_taken=False)

    def received(
        self, rref_id: int, fork_id: int, owner: Worker, sender: Worker, maker: Worker | None = None
    ) -> list[Action] | None:
        """A reference arrived; `maker` may still have to make its value.

        Returns:
            None if it cannot be used: the value is ours and gone, or we have said that we do not have the fork.
        """
        if sender in self._mourning.ended or owner in self._mourning.ended:
            return None
        if owner == self._own:
            if not self.value_expected(rref_id, maker):
                return None
            self._values[rref_id].is_needed = True
            return [Accept(sender, fork_id)]
        if fork_id in self._ended:
            return None
        if fork_id in self._forks:
            return []  # a repeat
        if sender == owner:
            self._forks[fork_id] = Fork(rref_id, owner, ForkPhase.CONFIRMED)
            return [Accept(sender, fork_id)]
        self._forks[fork_id] = Fork(rref_id, owner, parent=sender, maker=maker)
        return [Adopt(owner, rref_id, fork_id, maker)]

    def adopt_received(self, user: Worker, rref_id: int, fork_id: int, maker: Worker | None) -> list[Action]:
        """A user asks to be listed."""
        if user in self._mourning.ended:
            return []
        is_known = fork_id not in self._ended and self.value_expected(rref_id, maker)
        if is_known:
            self._values[rref_id].holders[fork_id] = user
        return [Confirm(user, fork_id, is_known)]

    def confirmed(self, fork_id: int, is_known: bool = True) -> list[Action]:
        """The owner answered: a fork of ours is listed, or its value is gone."""
        fork = self._forks.get(fork_id)
        if fork is None or fork.phase is not ForkPhase.PENDING:
            return []
        if not is_known:
            return self._break([fork_id], "its owner does not have the value any more")
        fork.phase, fork.maker = ForkPhase.CONFIRMED, None
        if fork.parent is None and fork.is_needed:
            return []
        return [*self._tell_parent(fork_id), *self._delete_if_unneeded(fork_id)]

    def accepted(self, child: int, by: Worker) -> list[Action]:
        """A fork that we sent has arrived, and the owner knows of it."""
        known = self._children.get(child)
        return self._end_child(child, is_taken=True) if known is not None and known.to == by else []

    def delete_received(self, user: Worker, rref_id: int, fork_id: int, is_first: bool) -> list[Action]:
        """A user has no more use for its fork."""
        self._end(fork_id)
        self._children.pop(fork_id, None)
        value = self._values.get(rref_id)
        if value is None:
            if is_first:  # somebody may yet refer to the value that will never be made
                self._end(rref_id)
            return []
        if value.holders.get(fork_id) == user:
            del value.holders[fork_id]
        failed = self._give_up_expecting(rref_id) if is_first else []
        return [*failed, *self._free_if_unheld(rref_id)]

    # -- messages of users that did not arrive -----------------------------------------------------------------------

    def overdue(self, children: Iterable[int]) -> list[Action]:
        """Nothing was heard of these for a while."""
        actions: list[Action] = []
        for fork_id in children:
            child = self._children.get(fork_id)
            if child is not None and fork_id not in self._mourning.mourned.get(child.to, ()):
                child.num_asked += 1
                actions.append(Ask(child.to, fork_id, child.num_asked > 1))
        return actions

    def asked(self, by: Worker, fork_id: int, is_last: bool, may_come: bool) -> list[Action]:
        """Somebody sent us a fork and heard nothing; `may_come` if a message of that worker may bring it yet."""
        phase = self.phase_of(fork_id)
        if phase is ForkPhase.CONFIRMED:
            return [Accept(by, fork_id)]  # that we said so before may have been lost while one took the other for dead
        has_it = phase is ForkPhase.PENDING or may_come
        if is_last and not has_it:
            self._end(fork_id)
        return [Answer(by, fork_id, has_it, is_last)]

    def answered(self, by: Worker, child: int, has_it: bool, is_last: bool) -> list[Action]:
        """The other side said whether a fork that we sent is there."""
        known = self._children.get(child)
        if known is None or known.to != by:
            return []
        if has_it:
            known.num_asked = 0
            return []
        return self._end_child(child, is_taken=False) if is_last else []

    # -- death -------------------------------------------------------------------------------------------------------

    def worker_seen(self, worker: Worker) -> list[Action]:
        """A worker is there; if it was taken for dead, it is told so."""
        if worker not in self._mourning.ended:
            return []
        return [Resume(worker), *self._mourning.returned(worker), *self._resume(worker)]

    def resume_received(self, by: Worker) -> list[Action]:
        """A worker had taken us for dead: what it had to tell us is lost, and what it was to make will not be made."""
        return [*self._stop_expecting_from(by), *self._mourning.remind(by), *self._resume(by)]

    def worker_lost(
        self, worker: Worker, others: Collection[Worker], reason: str = "its owner is lost"
    ) -> list[Action]:
        """A worker died; `others` are those still alive, without us."""
        mourn = self._mourning.lost(worker, others, self._kept_for(worker), self._has_shared())
        forks = {fork_id: fork for fork_id, fork in self._forks.items() if fork.owner == worker}
        actions: list[Action] = [  # if it lives, others may have made it expect a value of ours
            Delete(worker, fork.rref_id, fork_id, True)
            for fork_id, fork in forks.items()
            if fork.is_first and fork.phase is ForkPhase.PENDING
        ]
        actions += self._break(forks, reason)
        actions += self._stop_expecting_from(worker)
        return [*actions, *self._tell_mourners(worker), *mourn, *self._end_mourning()]

    def mourn_received(self, by: Worker, dead: Worker, round_: int, may_come: bool) -> list[Action]:
        """Somebody asks to be told when we have seen the end of a worker; `may_come` if we are still connected to it."""
        if not may_come:
            self._mourning.ended.add(dead)
        self._mourning.asked(by, dead, round_)
        return self._tell_mourners(dead)

    def end_seen(self, by: Worker, dead: Worker, round_: int) -> list[Action]:
        """Another worker has seen the end of a dead one, and whatever it got from that one is listed."""
        self._mourning.seen(by, dead, round_)
        return self._end_mourning()

    # -- rules -------------------------------------------------------------------------------------------------------

    def _free_if_unheld(self, rref_id: int) -> list[Action]:
        value = self._values.get(rref_id)
        if value is None or value.is_needed or value.holders or value.maker is not None:
            return []
        del self._values[rref_id]
        self._end(rref_id)
        return [Free(rref_id)]

    def _give_up_expecting(self, rref_id: int) -> list[Action]:
        """A value that is only expected will never be made."""
        value = self._values[rref_id]
        if value.maker is None:
            return []
        value.maker = None
        return [Fail(rref_id)]

    def _stop_expecting_from(self, maker: Worker) -> list[Action]:
        actions: list[Action] = []
        for rref_id in [rref_id for rref_id, value in self._values.items() if value.maker == maker]:
            actions += [*self._give_up_expecting(rref_id), *self._free_if_unheld(rref_id)]
        return actions

    def _delete_if_unneeded(self, fork_id: int) -> list[Action]:
        fork = self._forks.get(fork_id)
        if fork is None or fork.is_needed or fork.pins or fork.phase is ForkPhase.PENDING:
            return []
        del self._forks[fork_id]
        self._end(fork_id)
        is_listed = fork.phase is ForkPhase.CONFIRMED
        return [Delete(fork.owner, fork.rref_id, fork_id, fork.is_first)] if is_listed else []

    def _end_child(self, fork_id: int, *, is_taken: bool) -> list[Action]:
        """A child is accepted, or will never be taken."""
        child = self._children.pop(fork_id, None)
        if child is None:
            return []
        if child.parent is not None:
            self._forks[child.parent].pins -= 1
            return self._delete_if_unneeded(child.parent)
        value = self._values.get(child.rref_id)
        if is_taken or value is None:
            return []
        value.holders.pop(fork_id, None)
        return self._free_if_unheld(child.rref_id)

    def _break(self, fork_ids: Collection[int], reason: str) -> list[Action]:
        actions: list[Action] = []
        for fork_id in fork_ids:
            fork = self._forks.get(fork_id)
            if fork is not None and fork.phase is not ForkPhase.BROKEN:
                fork.phase = ForkPhase.BROKEN
                actions += [Break(fork_id, reason), *self._tell_parent(fork_id), *self._delete_if_unneeded(fork_id)]
        return actions

    def _tell_parent(self, fork_id: int) -> list[Action]:
        """The owner knows of a fork, or is dead: whoever sent it need not wait any longer."""
        fork = self._forks[fork_id]
        parent, fork.parent = fork.parent, None
        if parent is None:
            return []
        accept = [Accept(parent, fork_id)] if parent not in self._mourning.ended else []
        return [*accept, *self._tell_mourners(parent), *self._end_mourning()]

    def _tell_mourners(self, worker: Worker) -> list[Action]:
        if worker not in self._mourning.ended or any(fork.parent == worker for fork in self._forks.values()):
            return []
        return [*self._mourning.tell(worker)]

    def _end_mourning(self) -> list[Action]:
        if not self._mourning.mourned:
            return []
        if any(fork.parent in self._mourning.ended for fork in self._forks.values()):
            return []  # what we got from the dead is not listed yet, and may come from what we sent to them
        actions: list[Action] = []
        for fork_id, rref_id in self._mourning.take_over().items():
            actions += self._end_child(fork_id, is_taken=False)
            if rref_id in self._values:
                self._values[rref_id].holders.pop(fork_id, None)
                actions += self._free_if_unheld(rref_id)
        return actions

    def _resume(self, worker: Worker) -> list[Action]:
        """One has taken the other for dead. It keeps what is listed unless it says no; we ask again to be listed."""
        asks: list[Action] = []
        for fork_id, rref_id in self._kept_for(worker).items():
            if fork_id not in self._children:
                self._children[fork_id] = Child(worker, rref_id, None, num_asked=1)
                asks.append(Ask(worker, fork_id, True))
        adopts = [
            Adopt(worker, fork.rref_id, fork_id, fork.maker)
            for fork_id, fork in self._forks.items()
            if fork.owner == worker and fork.phase is ForkPhase.PENDING and not fork.is_first
        ]
        return [*asks, *adopts, *self._end_mourning()]
