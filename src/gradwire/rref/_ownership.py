r"""Who holds which reference: events in, actions out. No threads, no sockets, no clocks.

The owner of a value keeps the list of its holders: forks, each with the worker that has it. A fork is made whenever a
reference travels, and lives as a child of its sender until the owner knows of it:

    owner A -- fork --> user B        A lists B before the message leaves; B says Accept when it has arrived
    user B  -- fork --> user C        C asks A to be listed (Adopt); B keeps its own fork until C says Accept
    user B  -- back --> owner A       A finds its own value; B keeps its fork until A says Accept

    C               B               A
    | <- message -- |               |     B pins its own fork: it is not deleted while a child is on its way
    | -- Adopt -------------------> |     A lists C
    | <- Confirm ------------------ |
    | -- Accept --> |               |     B unpins its fork, and deletes it if its code has none any more

Safety: while a holder lives, the value lives. A fork is deleted only when each child of it is listed, or will never be
taken. Liveness: when all holders are gone, or their workers are, the value is freed.

What is sent here arrives once, in any order, or its receiver has ended (`_outbox` sees to that). The messages of users that
carry references may be lost, though: the worker that sent one asks later (`overdue`). A worker that has twice said that
it does not have a fork never takes it.

A dead worker may have sent forks that are not listed yet. What it held, and what was on its way to it, is therefore kept
until every other worker has said that it has seen the end, too (`Mourn`, `EndSeen`), and that whatever it got from the dead
one is listed. See `_mourning`.

A worker that is taken for dead may live, behind a connection that was cut. Every decision about it is a message to it, too,
which waits until it is back: a user deletes the forks that it breaks, an owner tells a holder of each fork that it strikes
off. So both agree as soon as they meet again, whether one of them took the other for dead, or both did, or neither.

A reference may reach its owner before the call that makes the value does: the value is then *expected* until that call
arrives, or until the worker that made it says that it never will.

Every event names the worker that it comes from, and changes only what that worker has a say in.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

import msgspec

from gradwire.rref._messages import (
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
from gradwire.rref.reliable import Batch, Outbox

__all__ = ["ForkPhase", "Ownership"]


class Mourning:
    """The dead, as one worker knows them.

    Attributes:
        ended: Workers that are taken for dead.
        mourned: Those of them whose references are still kept, and which: values by fork. What is sent to a worker after
            its end was noticed is not among them: either it never leaves, or that worker is not dead.
    """

    def __init__(self) -> None:
        self.ended: set[Worker] = set()
        self.mourned: dict[Worker, dict[int, int]] = {}
        self._unseen: set[tuple[Worker, Worker]] = set()  # (a worker, whose end it has not seen yet)
        self._rounds: dict[Worker, int] = {}  # by dead worker: how often it died; answers to earlier times do not count
        self._mourners: dict[Worker, dict[Worker, int]] = {}  # by worker: those that wait for us to see its end

    def lost(self, worker: Worker, others: Collection[Worker], kept: dict[int, int], is_concerned: bool) -> list[Mourn]:
        """A worker died; `is_concerned` if anything is shared that it, or others through it, might have."""
        self.ended.add(worker)
        has_owed = any(by == worker for by, _ in self._unseen)
        self._unseen = {pair for pair in self._unseen if pair[0] != worker}
        if not (is_concerned or has_owed):
            return []
        self.mourned[worker] = kept
        self._rounds[worker] = self._rounds.get(worker, 0) + 1
        return self._ask(sorted(set(others) - self.ended), [worker])

    def returned(self, worker: Worker) -> list[Mourn]:
        """A worker is not dead after all: it keeps what it has, and is asked about those that are."""
        self.ended.discard(worker)
        self.mourned.pop(worker, None)
        self._unseen = {pair for pair in self._unseen if pair[1] != worker}
        return self._ask([worker], sorted(self.mourned))

    def seen(self, by: Worker, dead: Worker, round_: int) -> None:
        """Another worker has seen the end of a dead one, and whatever it got from that one is listed."""
        if self._rounds.get(dead) == round_:
            self._unseen.discard((by, dead))

    def take_over(self) -> dict[Worker, dict[int, int]]:
        """What was kept for each of the dead, once no worker can have got anything from them that is not listed."""
        if self._unseen:
            return {}
        over, self.mourned = self.mourned, {}
        return over

    def asked(self, by: Worker, dead: Worker, round_: int) -> None:
        """Another worker wants to be told when we have seen the end of a worker."""
        mourners = self._mourners.setdefault(dead, {})
        mourners[by] = max(round_, mourners.get(by, 0))

    def tell(self, dead: Worker) -> list[EndSeen]:
        """We have seen the end of a worker, and whatever it sent us is listed."""
        return [EndSeen(by, dead, round_) for by, round_ in self._mourners.pop(dead, {}).items()]

    def _ask(self, others: Collection[Worker], dead: Collection[Worker]) -> list[Mourn]:
        pairs = [(other, worker) for worker in dead for other in others]
        self._unseen.update(pairs)
        return [Mourn(other, worker, self._rounds[worker]) for other, worker in pairs]


_MEMORY = 65_536  # ids that are remembered for each worker
_MAX_EXPECTED = 4096  # well above the calls that one worker may have on their way here (`Limits.calls_in_flight`)
_MAX_HELD = 1 << 18  # references of one worker to values of another; 25 MB of lists


class ForkPhase(enum.Enum):
    """Where a user's fork is."""

    PENDING = "pending"
    CONFIRMED = "confirmed"
    BROKEN = "broken"


class RecentIds:
    """The latest ids that ended, so that a late message does not revive them: at least half of `_MEMORY`.

    Two sets take turns, so that forgetting the oldest costs nothing for each id.
    """

    def __init__(self, latest: Iterable[int] = (), older: Iterable[int] = ()) -> None:
        self._latest = set(latest)
        self._older = set(older)

    def __contains__(self, number: int) -> bool:
        return number in self._latest or number in self._older

    def __iter__(self) -> Iterator[int]:
        return iter(self._latest | self._older)

    def __len__(self) -> int:
        return len(self._latest | self._older)

    def add(self, number: int) -> None:
        self._latest.add(number)
        if len(self._latest) >= _MEMORY // 2:
            self._latest, self._older = set(), self._latest

    def copy(self) -> RecentIds:
        return RecentIds(self._latest, self._older)


class Fork(msgspec.Struct):
    """A reference that this worker has to another one's value."""

    rref_id: int
    owner: Worker
    phase: ForkPhase = ForkPhase.PENDING
    parent: Worker | None = None  # the worker that sent it, as long as it waits to hear of it
    pins: int = 0  # children on their way
    is_needed: bool = True  # by this worker's own code
    is_first: bool = False  # the value was, or is to be, made for it by a call of this worker
    maker: Worker | None = None  # whose call makes the value, while that may not have arrived


class Value(msgspec.Struct):
    """A value that this worker owns."""

    holders: dict[int, Worker] = {}  # by fork
    is_needed: bool = False  # by this worker's own code
    maker: Worker | None = None  # whose call is to make it, while it is only expected
    expected_by: Worker | None = None  # the worker that spoke of it first, meanwhile
    first: int = 0  # the fork that it was made for, if another worker's call has made it


class Child(msgspec.Struct):
    """A fork that was sent and is not accepted yet."""

    to: Worker
    rref_id: int
    parent: int | None  # our own fork, or None if the value is ours
    num_asked: int = 0


class Holdings:
    """All references of one worker.

    Args:
        own: This worker.
    """

    def __init__(self, own: Worker) -> None:
        self._own = own
        self._values: dict[int, Value] = {}
        self._forks: dict[int, Fork] = {}
        self._children: dict[int, Child] = {}
        self._listed: dict[Worker, dict[int, int]] = {}  # what `Value.holders` say, by holder: values by fork
        self._num_expected: dict[Worker, int] = {}  # values by `expected_by`
        self._ended: dict[Worker, RecentIds] = {}  # forks and values that ended, by the worker that may yet name them
        self._over: dict[int, int] = {}  # by rank: the latest incarnation that is dead for certain
        self._mourning = Mourning()

    def __repr__(self) -> str:
        counts = f"{len(self._values)} values, {len(self._forks)} forks, {len(self._children)} sent"
        return f"<Ownership of worker {self._own[0]}: {counts}>"

    def phase_of(self, fork_id: int) -> ForkPhase | None:
        """Where a fork of this worker is; None if it is not here."""
        fork = self._forks.get(fork_id)
        return fork.phase if fork is not None else None

    def is_pending(self, fork_id: int, owner: Worker) -> bool:
        """Whether a fork waits to be confirmed by that owner."""
        fork = self._forks.get(fork_id)
        return fork is not None and fork.owner == owner and fork.phase is ForkPhase.PENDING

    def is_taken_for_dead(self, worker: Worker) -> bool:
        """Whether a worker's end was noticed, and it was not there since."""
        return worker in self._mourning.ended

    def maker_of(self, fork_id: int) -> Worker | None:
        """Who may still have to make the value that a fork refers to."""
        fork = self._forks.get(fork_id)
        return fork.maker if fork is not None else None

    def holders(self) -> dict[Worker, int]:
        """How many forks of values of this worker each other worker has."""
        return {worker: len(listed) for worker, listed in self._listed.items()}

    def is_holder(self, rref_id: int, worker: Worker) -> bool:
        """Whether a worker is listed with a value of this one, or its call is to make it."""
        value = self._values.get(rref_id)
        return value is not None and (value.maker == worker or worker in value.holders.values())

    def can_expect(self, by: Worker) -> bool:
        """Whether a worker may speak of one more value that was not made yet."""
        return self._num_expected.get(by, 0) < _MAX_EXPECTED

    def can_hold(self, worker: Worker) -> bool:
        """Whether a worker may hold one more reference to values of this one."""
        return len(self._listed.get(worker, ())) < _MAX_HELD

    @property
    def num_remembered(self) -> int:
        """Forks and values that ended and are remembered."""
        return sum(map(len, self._ended.values()))

    @property
    def num_held(self) -> int:
        """Values here that another worker refers to."""
        return sum(bool(value.holders) for value in self._values.values())

    def children(self) -> list[int]:
        """Forks that were sent and are not accepted yet."""
        return list(self._children)

    def forks(self) -> list[int]:
        """Forks of others' values that are here."""
        return list(self._forks)

    def mourned(self) -> list[Worker]:
        """The dead whose references are still kept, because not every worker has seen their end."""
        return sorted(self._mourning.mourned)

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Values here, forks here, forks here that the owner has not confirmed, forks sent and not accepted."""
        pending = sum(fork.phase is ForkPhase.PENDING for fork in self._forks.values())
        return len(self._values), len(self._forks), pending, len(self._children)

    def _has_shared(self) -> bool:
        """Whether others may have something that is not listed, but protected by what is listed or was sent here."""
        return bool(self._children or self._listed)

    def _kept_for(self, worker: Worker) -> dict[int, int]:
        """What a worker is listed with, and what is on its way to it: values by fork."""
        sent = {fork_id: child.rref_id for fork_id, child in self._children.items() if child.to == worker}
        return self._listed.get(worker, {}) | sent

    def _can_list(self, rref_id: int, fork_id: int, worker: Worker) -> bool:
        """Whether a worker may be listed with a fork: it has not ended, nor is it one of another value."""
        is_of_value = self._listed.get(worker, {}).get(fork_id, rref_id) == rref_id
        return is_of_value and not self._has_ended(worker, fork_id) and self.can_hold(worker)

    def _list(self, rref_id: int, fork_id: int, worker: Worker) -> None:
        self._values[rref_id].holders[fork_id] = worker
        self._listed.setdefault(worker, {})[fork_id] = rref_id

    def _strike(self, rref_id: int, fork_id: int) -> None:
        """A fork is not listed any more."""
        value = self._values.get(rref_id)
        worker = value.holders.pop(fork_id, None) if value is not None else None
        if worker is not None:
            del self._listed[worker][fork_id]
            if not self._listed[worker]:
                del self._listed[worker]

    def _expect(self, rref_id: int, maker: Worker, by: Worker) -> None:
        self._values[rref_id] = Value(maker=maker, expected_by=by)
        self._num_expected[by] = self._num_expected.get(by, 0) + 1

    def _stop_expecting(self, value: Value) -> None:
        """A value was made, or never will be."""
        by, value.maker, value.expected_by = value.expected_by, None, None
        if by is not None:
            self._num_expected[by] -= 1
            if not self._num_expected[by]:
                del self._num_expected[by]

    def _remember(self, worker: Worker, number: int) -> None:
        """A fork or value ended of which that worker may yet speak."""
        if self._is_over(worker):
            return
        known = self._ended.get(worker)
        if known is None:
            known = self._ended[worker] = RecentIds()
        known.add(number)

    def _is_over(self, worker: Worker) -> bool:
        return worker[1] <= self._over.get(worker[0], -1)

    def _has_ended(self, worker: Worker, number: int) -> bool:
        known = self._ended.get(worker)
        return known is not None and number in known


_LOST = "its owner is lost"
_GONE = "its owner does not have the value any more"
_STRUCK = "its owner could not reach this worker for a while, took it for dead and dropped its references"


class Ownership(Holdings):
    """Decides what becomes of the references of one worker.

    Args:
        own: This worker.
    """

    # -- values that are here ----------------------------------------------------------------------------------------

    def value_made(self, rref_id: int) -> None:
        """This worker's own code has a value that it is going to share."""
        self._values.setdefault(rref_id, Value()).is_needed = True

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
        """Another worker has a value made here, and holds it; False if it has given it up already, or must not."""
        value = self._values.get(rref_id)
        is_taken = value is not None and value.maker != user
        if is_taken or user in self._mourning.ended or not self._can_list(rref_id, fork_id, user):
            return False
        if value is None:
            self._values[rref_id] = Value()
        else:
            self._stop_expecting(value)
        self._values[rref_id].first = fork_id
        self._list(rref_id, fork_id, user)
        return True

    def value_expected(self, rref_id: int, maker: Worker | None, by: Worker) -> bool:
        """A worker speaks of a value that `maker` may still have to make; False if it is not here and never will be."""
        if rref_id in self._values:
            return True
        if maker is None or self._has_ended(maker, rref_id) or maker in self._mourning.ended or not self.can_expect(by):
            return False
        self._expect(rref_id, maker, by)
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
        return self._break([fork_id], reason) if self.phase_of(fork_id) is ForkPhase.PENDING else []

    # -- references on their way -------------------------------------------------------------------------------------

    def sent(self, rref_id: int, parent: int | None, child: int, to: Worker) -> bool:
        """A reference is about to travel: to a value of ours (`parent` None), or through a fork of ours.

        Returns:
            False if there is nothing to send: the value is not here, or the fork leads nowhere.
        """
        if parent is None:
            if rref_id not in self._values:
                return False
            self._list(rref_id, child, to)
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
            None if it cannot be used: the value is ours and gone, or the fork is not to be taken any more.
        """
        if sender in self._mourning.ended or owner in self._mourning.ended:
            return None
        if owner == self._own:
            if not self.value_expected(rref_id, maker, sender):
                return None
            self._values[rref_id].is_needed = True
            return [Accept(sender, fork_id)]
        if self._has_ended(sender, fork_id) or self._has_ended(owner, fork_id):
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
        listed = self._values[rref_id].holders.get(fork_id) if rref_id in self._values else None
        is_known = (
            listed in (None, user)
            and self._can_list(rref_id, fork_id, user)
            and self.value_expected(rref_id, maker, user)
        )
        if is_known:
            self._list(rref_id, fork_id, user)
        return [Confirm(user, fork_id, is_known)]

    def confirmed(self, fork_id: int, by: Worker, is_known: bool = True) -> list[Action]:
        """The owner said that a fork of ours is listed, or that it is not and never will be."""
        fork = self._forks.get(fork_id)
        if fork is None:
            if not is_known:  # the message that carries it may still come
                self._remember(by, fork_id)
            return []
        if fork.owner != by or fork.phase is ForkPhase.BROKEN:
            return []
        if not is_known:
            return self._break([fork_id], _STRUCK if fork.phase is ForkPhase.CONFIRMED else _GONE)
        if fork.phase is ForkPhase.CONFIRMED:
            return []
        fork.phase, fork.maker = ForkPhase.CONFIRMED, None
        if fork.parent is None and fork.is_needed:
            return []
        return [*self._tell_parent(fork_id), *self._delete_if_unneeded(fork_id)]

    def accepted(self, child: int, by: Worker) -> list[Action]:
        """A fork that we sent has arrived, and the owner knows of it."""
        known = self._children.get(child)
        return self._end_child(child, is_taken=True) if known is not None and known.to == by else []

    def delete_received(self, user: Worker, rref_id: int, fork_id: int, is_first: bool) -> list[Action]:
        """A user has no more use for its fork; if that `is_first`, the user will not have the value made either."""
        value, child = self._values.get(rref_id), self._children.get(fork_id)
        holder = value.holders.get(fork_id) if value is not None else None
        if holder not in (None, user):
            return []
        if child is not None and child.to == user and child.parent is None and child.rref_id == rref_id:
            del self._children[fork_id]  # it has arrived, and ended
        if holder is None:  # what lists it, or made the value for it, may still come
            self._remember(user, fork_id)
        self._strike(rref_id, fork_id)
        if is_first:  # others may yet speak of the value as one that is still to be made
            self._remember(user, rref_id)
        failed = self._give_up_expecting(rref_id, user) if is_first else []
        return [*failed, *self._free_if_unheld(rref_id)]

    # -- messages of users that did not arrive -----------------------------------------------------------------------

    def overdue(self, children: Iterable[int]) -> list[Action]:
        """Nothing was heard of these for a while."""
        actions: list[Action] = []
        for fork_id in children:
            child = self._children.get(fork_id)
            if child is None or fork_id in self._mourning.mourned.get(child.to, ()):
                continue
            if child.to in self._mourning.ended:  # sent after that worker's end, so it never left
                actions += self._end_child(fork_id, is_taken=False)
                continue
            child.num_asked += 1
            actions.append(Ask(child.to, fork_id, child.num_asked > 1))
        return actions

    def asked(self, by: Worker, fork_id: int, is_last: bool, may_come: bool) -> list[Action]:
        """A worker sent us a fork and heard nothing; `may_come` if a message of that worker may bring it yet."""
        has_it = fork_id in self._forks or may_come
        if is_last and not has_it:
            self._remember(by, fork_id)
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
        """A worker is there: if it was taken for dead, it keeps what was not struck off yet."""
        if worker not in self._mourning.ended:
            return []
        return [*self._mourning.returned(worker), *self._end_mourning()]

    def worker_lost(self, worker: Worker, others: Collection[Worker], reason: str = _LOST) -> list[Action]:
        """A worker died, or seems to have; `others` are those still alive, without us."""
        mourn = self._mourning.lost(worker, others, self._kept_for(worker), self._has_shared())
        actions = self._break_all(worker, reason)
        for rref_id in [rref_id for rref_id, value in self._values.items() if value.maker == worker]:
            actions += [*self._give_up_expecting(rref_id, worker), *self._free_if_unheld(rref_id)]
        return [*actions, *self._tell_mourners(worker), *mourn, *self._end_mourning()]

    def worker_refuted(self, worker: Worker, reason: str = _LOST) -> list[Action]:
        """There is no such worker, and there was none: another one made it up."""
        return self._break_all(worker, reason)

    def forget(self, worker: Worker) -> None:
        """An incarnation is dead for certain, and so are earlier ones: they will not speak of anything any more."""
        rank, incarnation = worker
        self._over[rank] = max(incarnation, self._over.get(rank, 0))
        self._ended = {known: ids for known, ids in self._ended.items() if not self._is_over(known)}

    def mourn_received(
        self, by: Worker, dead: Worker, round_: int, *, is_connected: bool, is_known: bool
    ) -> list[Action]:
        """A worker asks to be told when we have seen the end of another; `is_known` if that one was ever connected."""
        if is_known and not is_connected:
            self._mourning.ended.add(dead)
        self._mourning.asked(by, dead, round_)
        return self._tell_mourners(dead, is_gone=not is_connected)

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
        return [Free(rref_id)]

    def _give_up_expecting(self, rref_id: int, maker: Worker) -> list[Action]:
        """A value that is only expected will never be made."""
        value = self._values.get(rref_id)
        if value is None or value.maker != maker:
            return []
        self._stop_expecting(value)
        return [Fail(rref_id)]

    def _delete_if_unneeded(self, fork_id: int) -> list[Action]:
        fork = self._forks.get(fork_id)
        if fork is None or fork.is_needed or fork.pins or fork.phase is ForkPhase.PENDING:
            return []
        del self._forks[fork_id]
        self._remember(fork.owner, fork_id)
        if fork.phase is ForkPhase.BROKEN:
            return [Forget(fork_id)]
        return [Forget(fork_id), Delete(fork.owner, fork.rref_id, fork_id, fork.is_first)]

    def _end_child(self, fork_id: int, *, is_taken: bool) -> list[Action]:
        """A child is accepted, or will never be taken."""
        child = self._children.pop(fork_id, None)
        if child is None:
            return []
        if child.parent is not None:
            self._forks[child.parent].pins -= 1
            return self._delete_if_unneeded(child.parent)
        if is_taken:
            return []
        self._strike(child.rref_id, fork_id)
        return self._free_if_unheld(child.rref_id)

    def _break(self, fork_ids: Collection[int], reason: str) -> list[Action]:
        """Forks lead nowhere any more, and their owner is told, whatever it knows of them."""
        actions: list[Action] = []
        for fork_id in fork_ids:
            fork = self._forks.get(fork_id)
            if fork is not None and fork.phase is not ForkPhase.BROKEN:
                fork.phase = ForkPhase.BROKEN
                actions += [Break(fork_id, reason), Delete(fork.owner, fork.rref_id, fork_id, fork.is_first)]
                actions += [*self._tell_parent(fork_id), *self._delete_if_unneeded(fork_id)]
        return actions

    def _break_all(self, owner: Worker, reason: str) -> list[Action]:
        return self._break([fork_id for fork_id, fork in self._forks.items() if fork.owner == owner], reason)

    def _tell_parent(self, fork_id: int) -> list[Action]:
        """The owner knows of a fork, or is dead: the worker that sent it need not wait any longer."""
        fork = self._forks[fork_id]
        parent, fork.parent = fork.parent, None
        if parent is None:
            return []
        return [Accept(parent, fork_id), *self._tell_mourners(parent), *self._end_mourning()]

    def _tell_mourners(self, worker: Worker, *, is_gone: bool = False) -> list[Action]:
        has_ended = is_gone or worker in self._mourning.ended
        if not has_ended or any(fork.parent == worker for fork in self._forks.values()):
            return []
        return [*self._mourning.tell(worker)]

    def _end_mourning(self) -> list[Action]:
        if not self._mourning.mourned:
            return []
        if any(fork.parent in self._mourning.ended for fork in self._forks.values()):
            return []  # what we got from the dead is not listed yet, and may come from what we sent to them
        actions: list[Action] = []
        for worker, kept in self._mourning.take_over().items():
            for fork_id, rref_id in kept.items():
                if rref_id in self._values and self._values[rref_id].holders.get(fork_id) == worker:
                    self._strike(rref_id, fork_id)
                    self._remember(worker, fork_id)
                    if self._values[rref_id].first == fork_id:
                        self._remember(worker, rref_id)
                    actions.append(Confirm(worker, fork_id, False))  # should it live
                actions += [*self._end_child(fork_id, is_taken=False), *self._free_if_unheld(rref_id)]
        return actions


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
