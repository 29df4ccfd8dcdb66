r"""Decide how long values live, by the references to them: events in, actions out. No threads, no sockets, no clocks.

The owner of a value keeps the list of its holders: forks, each with the worker that has it. A fork is made whenever a
reference travels, and is a child of its sender until the owner has listed it:

    owner A -- fork --> user B        A lists B before the message leaves; B sends Accept when it has arrived
    user B  -- fork --> user C        C asks A to be listed (Adopt); B keeps its own fork until C sends Accept
    user B  -- back --> owner A       A finds its own value; B keeps its fork until A sends Accept

    C               B               A
    | <- message -- |               |     B pins its own fork: it is not deleted while a child is in transit
    | -- Adopt -------------------> |     A lists C
    | <- Confirm ------------------ |
    | -- Accept --> |               |     B unpins its fork, and deletes it if its code no longer needs it

Safety: while a holder is alive, the value is alive. A fork is deleted only when each of its children is listed or will never
be accepted. Liveness: when all holders or their workers are gone, the value is freed.

Protocol messages arrive once, in any order, unless the receiver has ended (`reliable` guarantees that). The users' messages
that carry references may be lost, though: the sender asks for them later (`overdue`). A worker that has twice answered
that it does not have a fork never takes it.

A dead worker may have sent forks that are not listed yet. What it held, and what was in transit to it, is therefore retained
until all survivors have acknowledged its death (`ReportDeath`, `AcknowledgeDeath`), and with it that all they got from the
dead worker is listed. See `DeadWorkers`.

A worker that is presumed dead may live, behind a connection that was cut. Every decision about it is also a message to it,
which is kept until it is back: a user deletes the forks that it breaks, an owner tells a holder of each fork that it strikes
off. So both agree as soon as they meet again, whether one of them presumed the other dead, or both did, or neither.

A reference may reach its owner before the call that makes the value does: the value is then *expected* until that call
arrives, or until its maker reports that it never will.

Every event names the worker that it comes from, and changes only what that worker may decide.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from gradwire.rref._messages import (
    Accept,
    AcknowledgeDeath,
    Action,
    Adopt,
    Answer,
    Ask,
    Break,
    Confirm,
    Confirmed,
    Delete,
    Fail,
    Forget,
    Free,
    LocalAction,
    Message,
    ReportDeath,
    Worker,
)
from gradwire.rref.reliable import Batch, Outbox

_MEMORY = 65_536  # ids that are remembered for each worker
_MAX_EXPECTED = 4096  # well above the calls that one worker may have in flight (`Limits.calls_in_flight`)
_MAX_HELD = 1 << 18  # references of one worker to values of another; 25 MB of lists

_LOST = "its owner is lost"
_GONE = "its owner no longer has the value"
_STRUCK_OFF = "its owner could not reach this worker, declared it lost and dropped its references"


class ForkPhase(enum.Enum):
    PENDING = "pending"
    CONFIRMED = "confirmed"
    BROKEN = "broken"


class Fork(msgspec.Struct):
    """A reference that this worker has to a value of another."""

    rref_id: int
    owner: Worker
    phase: ForkPhase = ForkPhase.PENDING
    parent: Worker | None = None  # the worker that sent it, until it gets an Accept
    pins: int = 0  # children in transit
    is_needed: bool = True  # by this worker's own code
    is_first: bool = False  # a call of this worker has made the value for it, or is to
    maker: Worker | None = None  # whose call makes the value, while that may not have arrived


class Value(msgspec.Struct):
    """A value that this worker owns."""

    holders: dict[int, Worker] = {}  # by fork
    is_needed: bool = False  # by this worker's own code
    maker: Worker | None = None  # whose call will create it, while it is only expected
    expected_by: Worker | None = None  # the worker that named it first, until then
    first: int = 0  # the fork that it was made for, if another worker's call has made it


class Child(msgspec.Struct):
    """A fork that was sent and is not accepted yet."""

    to: Worker
    rref_id: int
    parent: int | None  # this worker's own fork, or None if the value is its own
    num_asked: int = 0


class RecentIds:
    """The latest ids that ended, so that a late message does not revive them: at least half of `_MEMORY`.

    Two sets take turns, so that forgetting the oldest ids costs nothing for each id.
    """

    def __init__(self) -> None:
        self.latest: set[int] = set()
        self.older: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self.latest or number in self.older

    def add(self, number: int) -> None:
        self.latest.add(number)
        if len(self.latest) >= _MEMORY // 2:
            self.latest, self.older = set(), self.latest


class DeadWorkers:
    """The workers that one worker presumes dead, and which survivors have acknowledged their deaths."""

    def __init__(self) -> None:
        self.dead: set[Worker] = set()
        # Their references that are not forgotten yet: values by fork. What is sent to a worker after its death was noticed
        # is not among them: either it never leaves, or that worker is not dead.
        self.retained: dict[Worker, dict[int, int]] = {}
        self._unacknowledged: set[tuple[Worker, Worker]] = set()  # (survivor, dead worker)
        self._rounds: dict[Worker, int] = {}  # by dead worker: how often it died; earlier acknowledgements do not count
        self._reports: dict[Worker, dict[Worker, int]] = {}  # by dead worker: the round of each worker's open report

    def add(
        self, worker: Worker, others: Collection[Worker], held: dict[int, int], has_shared: bool
    ) -> list[ReportDeath]:
        """Handle a death; `has_shared` if this worker shares anything that the dead one, or others through it, may have."""
        self.dead.add(worker)
        has_owed = any(survivor == worker for survivor, _ in self._unacknowledged)
        self._unacknowledged = {pair for pair in self._unacknowledged if pair[0] != worker}
        if not (has_shared or has_owed):
            return []
        self.retained[worker] = held
        self._rounds[worker] = self._rounds.get(worker, 0) + 1
        return self._report(sorted(set(others) - self.dead), [worker])

    def remove(self, worker: Worker) -> list[ReportDeath]:
        """Handle that a worker is alive after all: it keeps its references and is told which workers are dead."""
        self.dead.discard(worker)
        self.retained.pop(worker, None)
        self._unacknowledged = {pair for pair in self._unacknowledged if pair[1] != worker}
        return self._report([worker], sorted(self.retained))

    def acknowledged(self, by: Worker, dead: Worker, round_: int) -> None:
        if self._rounds.get(dead) == round_:
            self._unacknowledged.discard((by, dead))

    def take_acknowledged(self) -> dict[Worker, dict[int, int]]:
        """Release retained references once no survivor can have an unlisted reference from a dead worker."""
        if self._unacknowledged:
            return {}
        retained, self.retained = self.retained, {}
        return retained

    def reported(self, by: Worker, dead: Worker, round_: int) -> None:
        reports = self._reports.setdefault(dead, {})
        reports[by] = max(round_, reports.get(by, 0))

    def acknowledge(self, dead: Worker) -> list[AcknowledgeDeath]:
        """Answer the open reports of a death: it was noticed here, and all that the dead worker sent is listed."""
        return [AcknowledgeDeath(by, dead, round_) for by, round_ in self._reports.pop(dead, {}).items()]

    def _report(self, survivors: Collection[Worker], dead: Collection[Worker]) -> list[ReportDeath]:
        pairs = [(survivor, worker) for worker in dead for survivor in survivors]
        self._unacknowledged.update(pairs)
        return [ReportDeath(survivor, worker, self._rounds[worker]) for survivor, worker in pairs]


class Ownership:
    """The references of one worker: those it holds, and those to its own values."""

    def __init__(self, own: Worker) -> None:
        self._own = own
        self._values: dict[int, Value] = {}
        self._forks: dict[int, Fork] = {}
        self._children: dict[int, Child] = {}
        self._listed: dict[Worker, dict[int, int]] = {}  # what `Value.holders` say, by holder: values by fork
        self._num_expected: dict[Worker, int] = {}  # values by `expected_by`
        self._ended: dict[Worker, RecentIds] = {}  # forks and values that ended, by the worker that may yet name them
        self._over: dict[int, int] = {}  # by rank: the latest incarnation that is known to have ended
        self._deaths = DeadWorkers()

    def __repr__(self) -> str:
        counts = f"{len(self._values)} values, {len(self._forks)} forks, {len(self._children)} sent"
        return f"<Ownership of worker {self._own[0]}: {counts}>"

    # -- questions ---------------------------------------------------------------------------------------------------

    def phase_of(self, fork_id: int) -> ForkPhase | None:
        fork = self._forks.get(fork_id)
        return fork.phase if fork is not None else None

    def maker_of(self, fork_id: int) -> Worker | None:
        fork = self._forks.get(fork_id)
        return fork.maker if fork is not None else None

    def is_presumed_dead(self, worker: Worker) -> bool:
        """Return whether a worker's death was noticed, and the worker has not been connected since."""
        return worker in self._deaths.dead

    def is_holder(self, rref_id: int, worker: Worker) -> bool:
        """Return whether a worker is listed for a value of this one, or its call will create that value."""
        value = self._values.get(rref_id)
        return value is not None and (value.maker == worker or worker in value.holders.values())

    def can_expect(self, by: Worker) -> bool:
        return self._num_expected.get(by, 0) < _MAX_EXPECTED

    def can_hold(self, worker: Worker) -> bool:
        return len(self._listed.get(worker, ())) < _MAX_HELD

    def children(self) -> list[int]:
        return list(self._children)

    def holders(self) -> dict[Worker, int]:
        return {worker: len(listed) for worker, listed in self._listed.items()}

    @property
    def num_held(self) -> int:
        return sum(bool(value.holders) for value in self._values.values())

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """Count values, forks, forks that the owner has not confirmed, and forks that were sent and not accepted."""
        pending = sum(fork.phase is ForkPhase.PENDING for fork in self._forks.values())
        return len(self._values), len(self._forks), pending, len(self._children)

    # -- values of this worker ---------------------------------------------------------------------------------------

    def value_made(self, rref_id: int) -> None:
        self._values.setdefault(rref_id, Value()).is_needed = True

    def needed_again(self, rref_id: int, fork_id: int) -> None:
        """Handle a new reference of this worker's code: to its own value (fork 0), or through a fork that it has."""
        held = self._forks.get(fork_id) if fork_id else self._values.get(rref_id)
        if held is not None:
            held.is_needed = True

    def value_dropped(self, rref_id: int) -> list[Action]:
        value = self._values.get(rref_id)
        if value is None:
            return []
        value.is_needed = False
        return self._free_if_unheld(rref_id)

    def value_created(self, rref_id: int, fork_id: int, user: Worker) -> bool:
        """Handle a call that makes a value for another worker; False if that worker gave it up, or may not have it."""
        value = self._values.get(rref_id)
        is_taken = value is not None and value.maker != user
        if is_taken or user in self._deaths.dead or not self._can_list(rref_id, fork_id, user):
            return False
        if value is None:
            value = self._values[rref_id] = Value()
        else:
            self._stop_expecting(value)
        value.first = fork_id
        self._list(rref_id, fork_id, user)
        return True

    def value_expected(self, rref_id: int, maker: Worker | None, by: Worker) -> bool:
        """Handle the name of a value that `maker` may still have to make; False if it is not here and never will be."""
        if rref_id in self._values:
            return True
        if maker is None or self._has_ended(maker, rref_id) or maker in self._deaths.dead or not self.can_expect(by):
            return False
        self._values[rref_id] = Value(maker=maker, expected_by=by)
        self._num_expected[by] = self._num_expected.get(by, 0) + 1
        return True

    def _stop_expecting(self, value: Value) -> None:
        by, value.maker, value.expected_by = value.expected_by, None, None
        if by is not None:
            self._num_expected[by] -= 1
            if not self._num_expected[by]:
                del self._num_expected[by]

    def _give_up_expecting(self, rref_id: int, maker: Worker) -> list[Action]:
        value = self._values.get(rref_id)
        if value is None or value.maker != maker:
            return []
        self._stop_expecting(value)
        return [Fail(rref_id)]

    def _free_if_unheld(self, rref_id: int) -> list[Action]:
        value = self._values.get(rref_id)
        if value is None or value.is_needed or value.holders or value.maker is not None:
            return []
        del self._values[rref_id]
        return [Free(rref_id)]

    # -- the list of holders -----------------------------------------------------------------------------------------

    def adopt_received(self, user: Worker, rref_id: int, fork_id: int, maker: Worker | None) -> list[Action]:
        listed = self._values[rref_id].holders.get(fork_id) if rref_id in self._values else None
        is_known = (
            listed in (None, user)
            and self._can_list(rref_id, fork_id, user)
            and self.value_expected(rref_id, maker, user)
        )
        if is_known:
            self._list(rref_id, fork_id, user)
        return [Confirm(user, fork_id, is_known)]

    def delete_received(self, user: Worker, rref_id: int, fork_id: int, is_first: bool) -> list[Action]:
        """Handle that a user no longer needs its fork; if `is_first`, it will not have the value created either."""
        value, child = self._values.get(rref_id), self._children.get(fork_id)
        holder = value.holders.get(fork_id) if value is not None else None
        if holder not in (None, user):
            return []
        if child is not None and child.to == user and child.parent is None and child.rref_id == rref_id:
            del self._children[fork_id]  # it has arrived, and ended
        if holder is None:  # the message that lists it, or the call that makes the value for it, may still arrive
            self._remember(user, fork_id)
        self._strike_off(rref_id, fork_id)
        failed: list[Action] = []
        if is_first:  # others may yet name the value as one that is still to be made
            self._remember(user, rref_id)
            failed = self._give_up_expecting(rref_id, user)
        return [*failed, *self._free_if_unheld(rref_id)]

    def _can_list(self, rref_id: int, fork_id: int, worker: Worker) -> bool:
        is_of_value = self._listed.get(worker, {}).get(fork_id, rref_id) == rref_id  # not a fork of another value
        return is_of_value and not self._has_ended(worker, fork_id) and self.can_hold(worker)

    def _list(self, rref_id: int, fork_id: int, worker: Worker) -> None:
        self._values[rref_id].holders[fork_id] = worker
        self._listed.setdefault(worker, {})[fork_id] = rref_id

    def _strike_off(self, rref_id: int, fork_id: int) -> None:
        value = self._values.get(rref_id)
        worker = value.holders.pop(fork_id, None) if value is not None else None
        if worker is not None:
            del self._listed[worker][fork_id]
            if not self._listed[worker]:
                del self._listed[worker]

    # -- references to values elsewhere ------------------------------------------------------------------------------

    def fork_created(self, rref_id: int, fork_id: int, owner: Worker) -> None:
        self._forks[fork_id] = Fork(rref_id, owner, is_first=True, maker=self._own)

    def fork_dropped(self, fork_id: int) -> list[Action]:
        fork = self._forks.get(fork_id)
        if fork is None:
            return []
        fork.is_needed = False
        return self._delete_if_unneeded(fork_id)

    def fork_failed(self, fork_id: int, reason: str) -> list[Action]:
        """Handle that a call to create a value elsewhere failed; it may have arrived anyway, or still arrive."""
        return self._break([fork_id], reason) if self.phase_of(fork_id) is ForkPhase.PENDING else []

    def confirmed(self, fork_id: int, by: Worker, is_known: bool = True) -> list[Action]:
        """Handle the owner's report that a fork of this worker is listed, or that it is not and never will be."""
        fork = self._forks.get(fork_id)
        if fork is None:
            if not is_known:  # the message that carries it may still arrive
                self._remember(by, fork_id)
            return []
        if fork.owner != by or fork.phase is ForkPhase.BROKEN:
            return []
        if not is_known:
            return self._break([fork_id], _STRUCK_OFF if fork.phase is ForkPhase.CONFIRMED else _GONE)
        if fork.phase is ForkPhase.CONFIRMED:
            return []
        fork.phase, fork.maker = ForkPhase.CONFIRMED, None
        if fork.parent is None and fork.is_needed:  # mostly
            return [Confirmed(fork_id)]
        return [Confirmed(fork_id), *self._accept(fork_id), *self._delete_if_unneeded(fork_id)]

    def _delete_if_unneeded(self, fork_id: int) -> list[Action]:
        fork = self._forks.get(fork_id)
        if fork is None or fork.is_needed or fork.pins or fork.phase is ForkPhase.PENDING:
            return []
        del self._forks[fork_id]
        self._remember(fork.owner, fork_id)
        if fork.phase is ForkPhase.BROKEN:
            return [Forget(fork_id)]
        return [Forget(fork_id), Delete(fork.owner, fork.rref_id, fork_id, fork.is_first)]

    def _break(self, fork_ids: Iterable[int], reason: str) -> list[Action]:
        """Break forks and notify their owner, whether or not it has listed them."""
        actions: list[Action] = []
        for fork_id in fork_ids:
            fork = self._forks.get(fork_id)
            if fork is not None and fork.phase is not ForkPhase.BROKEN:
                fork.phase = ForkPhase.BROKEN
                actions += [Break(fork_id, reason), Delete(fork.owner, fork.rref_id, fork_id, fork.is_first)]
                actions += [*self._accept(fork_id), *self._delete_if_unneeded(fork_id)]
        return actions

    def _accept(self, fork_id: int) -> list[Action]:
        """Let the sender of a fork drop its own: the owner has listed the fork, or is dead."""
        fork = self._forks[fork_id]
        parent, fork.parent = fork.parent, None
        if parent is None:
            return []
        return [Accept(parent, fork_id), *self._acknowledge_death(parent), *self._forget_dead()]

    # -- references in transit ---------------------------------------------------------------------------------------

    def sent(self, rref_id: int, parent: int | None, child: int, to: Worker) -> bool:
        """Prepare to send a reference: to a value of this worker (`parent` None), or through one of its forks."""
        if parent is None:
            if rref_id not in self._values:
                return False  # there is nothing to send, as below
            self._list(rref_id, child, to)
        else:
            fork = self._forks.get(parent)
            if fork is None or fork.phase is ForkPhase.BROKEN:
                return False
            fork.pins += 1
        self._children[child] = Child(to, rref_id, parent)
        return True

    def not_sent(self, child: int) -> list[Action]:
        """Handle that the message with a fork will certainly never arrive."""
        return self._end_child(child, is_taken=False)

    def received(
        self, rref_id: int, fork_id: int, owner: Worker, sender: Worker, maker: Worker | None = None
    ) -> list[Action] | None:
        """Handle the arrival of a reference, whose value `maker` may still have to make; None if it cannot be used."""
        if sender in self._deaths.dead or owner in self._deaths.dead:
            return None
        if owner == self._own:
            if not self.value_expected(rref_id, maker, sender):
                return None  # gone
            self._values[rref_id].is_needed = True
            return [Accept(sender, fork_id)]
        if self._has_ended(sender, fork_id) or self._has_ended(owner, fork_id):
            return None  # it must no longer be accepted
        if fork_id in self._forks:
            return []  # a repeat
        if sender == owner:
            self._forks[fork_id] = Fork(rref_id, owner, ForkPhase.CONFIRMED)
            return [Confirmed(fork_id), Accept(sender, fork_id)]
        self._forks[fork_id] = Fork(rref_id, owner, parent=sender, maker=maker)
        return [Adopt(owner, rref_id, fork_id, maker)]

    def accepted(self, child: int, by: Worker) -> list[Action]:
        known = self._children.get(child)
        return self._end_child(child, is_taken=True) if known is not None and known.to == by else []

    def overdue(self, children: Iterable[int]) -> list[Action]:
        """Handle forks that were sent some time ago and have not been accepted."""
        actions: list[Action] = []
        for fork_id in children:
            child = self._children.get(fork_id)
            if child is None or fork_id in self._deaths.retained.get(child.to, ()):
                continue
            if child.to in self._deaths.dead:  # sent after that worker's death, so it never left
                actions += self._end_child(fork_id, is_taken=False)
                continue
            child.num_asked += 1
            actions.append(Ask(child.to, fork_id, child.num_asked > 1))
        return actions

    def asked(self, by: Worker, fork_id: int, is_last: bool, may_come: bool) -> list[Action]:
        """Handle a worker's query for a fork it sent; `may_come` if a message from it may still bring the fork."""
        has_it = fork_id in self._forks or may_come
        if is_last and not has_it:
            self._remember(by, fork_id)
        return [Answer(by, fork_id, has_it, is_last)]

    def answered(self, by: Worker, child: int, has_it: bool, is_last: bool) -> list[Action]:
        known = self._children.get(child)
        if known is None or known.to != by:
            return []
        if has_it:
            known.num_asked = 0
            return []
        return self._end_child(child, is_taken=False) if is_last else []

    def _end_child(self, fork_id: int, *, is_taken: bool) -> list[Action]:
        child = self._children.pop(fork_id, None)
        if child is None:
            return []
        if child.parent is not None:
            self._forks[child.parent].pins -= 1
            return self._delete_if_unneeded(child.parent)
        if is_taken:
            return []
        self._strike_off(child.rref_id, fork_id)
        return self._free_if_unheld(child.rref_id)

    # -- deaths ------------------------------------------------------------------------------------------------------

    def worker_seen(self, worker: Worker) -> list[Action]:
        """Handle that a worker is connected: if it was presumed dead, it keeps references not struck off yet."""
        if worker not in self._deaths.dead:
            return []
        return [*self._deaths.remove(worker), *self._forget_dead()]

    def worker_lost(self, worker: Worker, others: Collection[Worker], reason: str = _LOST) -> list[Action]:
        """Handle a presumed death; `others` are the workers that are still alive, without this one."""
        in_transit = {fork_id: child.rref_id for fork_id, child in self._children.items() if child.to == worker}
        held = self._listed.get(worker, {}) | in_transit
        # Others may have forks that are not listed, but protected by those that are listed here or were sent from here.
        reports = self._deaths.add(worker, others, held, has_shared=bool(self._children or self._listed))
        actions = self.break_forks_of(worker, reason)
        for rref_id in [rref_id for rref_id, value in self._values.items() if value.maker == worker]:
            actions += [*self._give_up_expecting(rref_id, worker), *self._free_if_unheld(rref_id)]
        return [*actions, *self._acknowledge_death(worker), *reports, *self._forget_dead()]

    def break_forks_of(self, owner: Worker, reason: str = _LOST) -> list[Action]:
        """Make the references to the values of a worker unusable: it is lost, or never existed."""
        return self._break([fork_id for fork_id, fork in self._forks.items() if fork.owner == owner], reason)

    def incarnation_ended(self, worker: Worker) -> None:
        """Handle the certain end of an incarnation and all earlier ones: no more messages of theirs will arrive."""
        rank, incarnation = worker
        self._over[rank] = max(incarnation, self._over.get(rank, 0))
        self._ended = {known: ids for known, ids in self._ended.items() if not self._is_over(known)}

    def death_reported(
        self, by: Worker, dead: Worker, round_: int, *, is_connected: bool, is_known: bool
    ) -> list[Action]:
        """Handle a request to acknowledge a death; `is_known` if the dead worker was ever connected to this one."""
        if is_known and not is_connected:
            self._deaths.dead.add(dead)
        self._deaths.reported(by, dead, round_)
        return self._acknowledge_death(dead, is_gone=not is_connected)

    def death_acknowledged(self, by: Worker, dead: Worker, round_: int) -> list[Action]:
        self._deaths.acknowledged(by, dead, round_)
        return self._forget_dead()

    def _acknowledge_death(self, worker: Worker, *, is_gone: bool = False) -> list[Action]:
        is_dead = is_gone or worker in self._deaths.dead
        if not is_dead or any(fork.parent == worker for fork in self._forks.values()):
            return []
        return [*self._deaths.acknowledge(worker)]

    def _forget_dead(self) -> list[Action]:
        """Drop references retained for dead workers once all survivors, this one included, have listed theirs."""
        if not self._deaths.retained:
            return []
        if any(fork.parent in self._deaths.dead for fork in self._forks.values()):
            return []  # it is not listed yet, and may come from what this worker sent to the dead one
        actions: list[Action] = []
        for worker, held in self._deaths.take_acknowledged().items():
            for fork_id, rref_id in held.items():
                value = self._values.get(rref_id)
                if value is not None and value.holders.get(fork_id) == worker:
                    self._strike_off(rref_id, fork_id)
                    self._remember(worker, fork_id)
                    if value.first == fork_id:
                        self._remember(worker, rref_id)
                    actions.append(Confirm(worker, fork_id, False))  # should it live
                actions += [*self._end_child(fork_id, is_taken=False), *self._free_if_unheld(rref_id)]
        return actions

    # -- ids that have ended -----------------------------------------------------------------------------------------

    def _remember(self, worker: Worker, number: int) -> None:
        """Record the end of a fork or value that the worker may still refer to."""
        if self._is_over(worker):
            return
        known = self._ended.get(worker)
        if known is None:
            known = self._ended[worker] = RecentIds()
        known.add(number)

    def _has_ended(self, worker: Worker, number: int) -> bool:
        known = self._ended.get(worker)
        return known is not None and number in known

    def _is_over(self, worker: Worker) -> bool:
        return worker[1] <= self._over.get(worker[0], -1)


class Surroundings(Protocol):
    """Knowledge about other workers from outside the reference protocol; see `context.PeerKnowledge`."""

    def may_make(self, worker: Worker, rref_id: int) -> bool: ...
    def may_bring(self, worker: Worker) -> bool: ...
    def is_connected(self, worker: Worker) -> bool: ...
    def was_connected(self, worker: Worker) -> bool: ...


class ReferenceProtocol:
    """Both halves of the protocol for one worker: ownership decisions and reliable delivery."""

    def __init__(self, own: Worker) -> None:
        self.ownership = Ownership(own)
        self.outbox = Outbox(own)

    def put(self, actions: Iterable[Action]) -> list[LocalAction]:
        """Queue the messages among actions; return the others."""
        local: list[LocalAction] = []
        for action in actions:
            if isinstance(action, LocalAction):
                local.append(action)
            else:
                self.outbox.put(action)
        return local

    def batch_received(self, batch: Batch, around: Surroundings) -> list[LocalAction]:
        """Handle a batch. One from a worker presumed dead is ignored: if it is alive, it will send it again."""
        if self.ownership.is_presumed_dead(batch.sender) or not self.outbox.arrived(batch):
            return []
        return [
            action for message in batch.messages for action in self.put(self._handle(message, batch.sender, around))
        ]

    def _handle(self, message: Message, sender: Worker, around: Surroundings) -> list[Action]:
        known = self.ownership
        match message:
            case Adopt(_, rref_id, fork_id, maker):
                can_come = maker is not None and around.may_make(maker, rref_id)
                return known.adopt_received(sender, rref_id, fork_id, maker if can_come else None)
            case Confirm(_, fork_id, is_known):
                return known.confirmed(fork_id, sender, is_known)
            case Accept(_, fork_id):
                return known.accepted(fork_id, sender)
            case Delete(_, rref_id, fork_id, is_first):
                return known.delete_received(sender, rref_id, fork_id, is_first)
            case Ask(_, fork_id, is_last):
                return known.asked(sender, fork_id, is_last, around.may_bring(sender))
            case Answer(_, fork_id, has_it, is_last):
                return known.answered(sender, fork_id, has_it, is_last)
            case ReportDeath(_, dead, round_):
                is_connected, is_known = around.is_connected(dead), around.was_connected(dead)
                return known.death_reported(sender, dead, round_, is_connected=is_connected, is_known=is_known)
            case AcknowledgeDeath(_, dead, round_):
                return known.death_acknowledged(sender, dead, round_)

    def worker_lost(self, worker: Worker, others: Collection[Worker], reason: str) -> list[LocalAction]:
        self.outbox.suspend(worker)
        return self.put(self.ownership.worker_lost(worker, others, reason))

    def worker_seen(self, worker: Worker) -> list[LocalAction]:
        self.outbox.resume(worker)
        return self.put(self.ownership.worker_seen(worker))

    def incarnation_ended(self, worker: Worker) -> None:
        """Handle that a lost worker cannot come back: state kept for its return is dropped."""
        self.outbox.forget(worker)
        self.ownership.incarnation_ended(worker)

    def worker_refuted(self, worker: Worker, reason: str) -> list[LocalAction]:
        """Handle that no such worker ever existed."""
        local = self.put(self.ownership.break_forks_of(worker, reason))
        self.outbox.drop(worker)
        return local
