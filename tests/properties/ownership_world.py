"""Workers with real `Ownership` machines, everything that is on its way between them, and who really holds what.

A step is a move: somebody's code sends or drops a reference, something arrives, is repeated or lost, a worker ends, another
one notices. `World.moves` lists what may happen next, `World.apply` does it and raises `Violation` if a rule is broken:

    safety      no value is freed, and no reference broken, while the code of a living worker holds it
    liveness    when everything is dropped and has arrived, nothing is left (`settle`)

The protocol's own messages arrive at least once, so losing one that is sent again is nothing but a delay: there is no
move for it. What carries references (`Carry`), and the call that makes a value (`Make`), may be lost for good.

A worker may take a living one for dead (`cut`): it then forgets what it had for that one, and hears nothing of it until
it is (`see`). References that this breaks are excused, and those made of them; nothing else is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gradwire.rref import _actions as act
from gradwire.rref._ownership import ForkPhase, Ownership
from properties.ownership_items import (
    CHILDREN,
    Carry,
    Item,
    Make,
    Move,
    Note,
    Status,
    Violation,
    lineage,
    value_of,
    worker,
)
from properties.ownership_pool import Pool

_MAX_ROUNDS = 40
_EMPTY: frozenset[Any] = frozenset()


class World:
    """Workers, what is under way, and the truth.

    Args:
        num_workers: How many there are.
        make_machine: What each of them runs; other than the real one to see whether a fault would be found.
    """

    def __init__(self, num_workers: int, make_machine: type[Ownership] = Ownership) -> None:
        # all of these are replaced, never changed: copies of a world share them
        self._pool = Pool(make_machine)
        self._machines = tuple(self._pool.start(worker(rank)) for rank in range(num_workers))
        self.owner: tuple[int, ...] = (-1,)  # by value; there is none with number 0
        self.status: tuple[Status, ...] = (Status.FREED,)
        self.num_children: frozenset[tuple[int, int]] = _EMPTY  # by fork, or value for those that its owner sent
        self.alive = frozenset(range(num_workers))
        self.noticed: frozenset[tuple[int, int]] = _EMPTY  # (who, whose end), also of those that live
        self.items: frozenset[Item] = _EMPTY
        self.written: frozenset[Item] = _EMPTY  # what was under way when its sender took its receiver for dead
        self.needed: frozenset[int] = _EMPTY  # values that their owner's own code has
        self.held: frozenset[tuple[int, int]] = _EMPTY  # (who, fork) that somebody's code has
        self.excused: frozenset[int] = _EMPTY  # forks that may break: their call failed, or somebody was taken for dead
        self.taken: frozenset[int] = _EMPTY  # forks that have arrived
        self.refused: frozenset[int] = _EMPTY  # forks of which their receiver has said that it will never take them

    def copy(self) -> World:
        twin = object.__new__(World)
        vars(twin).update(vars(self))
        return twin

    def machine(self, rank: int) -> Ownership:
        return self._machines[rank].state

    def key(self) -> int:
        """Equal for worlds that go on alike: what no message and no machine speaks of any more makes no difference."""
        alive = [self._machines[rank] for rank in self.alive]
        ids = {item.fork_id for item in self.items if item.fork_id}.union(*(machine.ids for machine in alive))
        ids |= {value_of(fork_id) for fork_id in ids}
        machines = tuple((machine.number, machine.ended & ids) for machine in alive)
        past = (self.excused & ids.union(*map(lineage, ids)), self.taken & ids, self.refused & ids)
        truth = (self.alive, self.noticed, self.items, self.written, self.needed, self.held)
        parents = {fork_id for _, fork_id in self.held}
        counts = frozenset(item for item in self.num_children if item[0] < CHILDREN or item[0] in parents)
        return hash((machines, past, truth, self.status, counts))

    # -- what people do ----------------------------------------------------------------------------------------------

    def make(self, owner: int) -> None:
        """A worker's own code has a value to share."""
        rref_id = self._new_value(owner, Status.MADE)
        self._tell(owner, "value_made", rref_id)
        self.needed |= {rref_id}

    def create(self, creator: int, owner: int) -> None:
        """A worker has a value made elsewhere."""
        rref_id = self._new_value(owner, Status.EXPECTED)
        fork_id = rref_id * CHILDREN
        self._tell(creator, "fork_created", rref_id, fork_id, worker(owner))
        self.held |= {(creator, fork_id)}
        self.items |= {Make(creator, owner, rref_id, fork_id)}

    def send(self, sender: int, rref_id: int, parent: int | None, to: int) -> None:
        origin = rref_id if parent is None else parent
        counts = dict(self.num_children)
        counts[origin] = counts.get(origin, 0) + 1
        self.num_children = frozenset(counts.items())
        child = origin * CHILDREN + counts[origin]
        maker = None if parent is None else self.machine(sender).maker_of(parent)
        if not self._tell(sender, "sent", rref_id, parent, child, worker(to)):
            raise Violation(f"worker {sender} has a reference, and cannot send it")
        self.items |= {Carry(sender, to, rref_id, child, maker)}
        if (self.owner[rref_id], to) in self.noticed and parent is not None:
            self.excused |= {child}
        self._clear()

    def drop(self, rank: int, fork_id: int) -> None:
        self.held -= {(rank, fork_id)}
        self._act(rank, self._tell(rank, "fork_dropped", fork_id))

    def drop_own(self, rref_id: int) -> None:
        self.needed -= {rref_id}
        rank = self.owner[rref_id]
        self._act(rank, self._tell(rank, "value_dropped", rref_id))

    def fail(self, rank: int, fork_id: int) -> None:
        """The call that was to make a value got no answer in time."""
        self.excused |= {fork_id}
        self._act(rank, self._tell(rank, "fork_failed", fork_id, "no answer"))

    # -- what the network does ---------------------------------------------------------------------------------------

    def deliver(self, item: Item, keep: bool = False, may_come: bool | None = None) -> None:
        """Something arrives; with `keep`, and it will arrive again."""
        if not keep:
            self.items -= {item}
        if (item.to, item.sender) in self.noticed:
            self.see(item.to, item.sender)
        if isinstance(item, Carry):
            self._deliver_carry(item)
        elif isinstance(item, Make):
            self._deliver_make(item)
        else:
            self._act(item.to, self._tell(item.to, *self._event(item, may_come)))

    def lose(self, item: Item) -> None:
        self.items -= {item}

    def unsend(self, item: Carry) -> None:
        """A message never left, and its sender knows."""
        self.items -= {item}
        self._act(item.sender, self._tell(item.sender, "not_sent", item.fork_id))

    def overdue(self, rank: int, child: int) -> None:
        self._act(rank, self._tell(rank, "overdue", (child,)))

    def crash(self, rank: int) -> None:
        """A worker ends. What it sent may arrive at those that have not noticed yet."""
        self.alive -= {rank}
        self.held = frozenset(held for held in self.held if held[0] != rank)
        self.needed = frozenset(rref_id for rref_id in self.needed if self.owner[rref_id] != rank)
        self._clear()

    def notice(self, rank: int, dead: int) -> None:
        self.noticed |= {(rank, dead)}
        self._clear()
        self._lose_worker(rank, dead)

    def cut(self, rank: int, other: int, is_written: bool = False) -> None:
        """A worker takes a living one for dead, and forgets what it has for it, except what `is_written` already."""
        mine, its = self.machine(rank), self.machine(other)
        self.excused |= set(mine._kept_for(worker(other)))
        self.excused |= {fork_id for fork_id, fork in mine._forks.items() if fork.owner == worker(other)}
        self.excused |= {fork_id for fork_id, fork in its._forks.items() if fork.owner == worker(rank)}
        self.excused |= {
            item.fork_id
            for item in self.items
            if isinstance(item, Carry) and item.to == other and self.owner[item.rref_id] == rank
        }
        self.noticed |= {(rank, other)}
        under_way = {item for item in self.items if _is_between(item, rank, other)}
        if is_written:
            self.written |= under_way
        else:
            self.items -= {item for item in under_way if isinstance(item, Note)}
            self.written |= under_way & self.items
        self._lose_worker(rank, other)

    def see(self, rank: int, other: int) -> None:
        """Whom a worker took for dead is there. What it wrote before is read before what it writes now, or never."""
        self.noticed -= {(rank, other)}
        self.items -= {item for item in self.written if _is_between(item, rank, other)}
        self.written &= self.items
        self._act(rank, self._tell(rank, "worker_seen", worker(other)))

    # -- everything that may happen ----------------------------------------------------------------------------------

    def can_deliver(self, item: Item) -> bool:
        return item.sender in self.alive or (item.to, item.sender) not in self.noticed

    def sends(self) -> list[Move]:
        found: list[Move] = []
        for rank in sorted(self.alive):
            for to in range(len(self._machines)):
                if to == rank:
                    continue
                found += [
                    ("send", rank, self.machine(rank)._forks[fork_id].rref_id, fork_id, to)
                    for who, fork_id in sorted(self.held)
                    if who == rank and self.machine(rank).phase_of(fork_id) is not ForkPhase.BROKEN
                ]
                found += [
                    ("send", rank, rref_id, None, to) for rref_id in sorted(self.needed) if self.owner[rref_id] == rank
                ]
        return found

    def drops(self) -> list[Move]:
        return [("drop", *held) for held in sorted(self.held)] + [("drop_own", rref) for rref in sorted(self.needed)]

    def deliveries(self) -> list[Move]:
        return [("deliver", item) for item in self.items if self.can_deliver(item)]

    def losses(self) -> list[Move]:
        return [("lose", item) for item in self.items if isinstance(item, Carry | Make)]

    def unsends(self) -> list[Move]:
        return [
            ("unsend", item)
            for item in self.items
            if isinstance(item, Carry) and item.sender in self.alive and item.fork_id not in self.taken
        ]

    def failures(self) -> list[Move]:
        """Calls that may be given up."""
        return [
            ("fail", rank, fork_id)
            for rank in sorted(self.alive)
            for fork_id, fork in self.machine(rank)._forks.items()
            if fork.is_first and fork.phase is ForkPhase.PENDING
        ]

    def overdues(self) -> list[Move]:
        return [("overdue", rank, child) for rank in sorted(self.alive) for child in self.machine(rank).children()]

    def notices(self) -> list[Move]:
        return [
            ("notice", rank, dead)
            for rank in sorted(self.alive)
            for dead in range(len(self._machines))
            if dead not in self.alive and (rank, dead) not in self.noticed
        ]

    def sights(self) -> list[Move]:
        """Living workers that can be told from the dead."""
        return [("see", *pair) for pair in sorted(self.noticed) if pair[0] in self.alive and pair[1] in self.alive]

    def apply(self, move: Move) -> None:
        getattr(self, move[0])(*move[1:])

    def skip_noise(self) -> None:
        """What changes nothing, now or later, need not be delivered. True only where nobody is taken for dead and lives."""
        noise = {item for item in self.items if isinstance(item, Note) and self._is_noise(item)}
        if noise:
            self.items -= noise

    def _is_noise(self, note: Note) -> bool:
        message = note.message
        if isinstance(message, act.Answer) and message.has_it:
            return False  # it makes a difference after the next question
        if not isinstance(message, act.Answer | act.Accept | act.Confirm | act.EndSeen):
            return False
        machine, actions = self._pool.step(self._machines[note.to], *self._event(note, None))
        return machine is self._machines[note.to] and not actions

    # -- the end -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything is dropped, noticed, delivered and asked for; nothing may be left.

        Raises:
            Violation: Something is.
        """
        for _ in range(_MAX_ROUNDS):
            self._apply_all(self.sights, self.notices, self.drops, self.deliveries)
            if not self.items:
                self._fail_lost_calls()
                self._apply_all(self.overdues)
            if not self.items and self.is_clean():
                return
        raise Violation(f"something is left: {self.leftovers()}")

    def is_clean(self) -> bool:
        return not (self.held or self.needed or self.leftovers())

    def leftovers(self) -> list[str]:
        return [
            f"{self.machine(rank)!r} mourns {self.machine(rank).mourned()}"
            for rank in sorted(self.alive)
            if any(self.machine(rank).counts) or self.machine(rank).mourned()
        ]

    def _apply_all(self, *kinds: Any) -> None:
        for kind in kinds:
            for move in sorted(kind(), key=repr):
                if move in kind():
                    self.apply(move)

    def _fail_lost_calls(self) -> None:
        for move in self.failures():
            self.apply(move)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _new_value(self, owner: int, status: Status) -> int:
        self.owner += (owner,)
        self.status += (status,)
        return len(self.owner) - 1

    def _set_status(self, rref_id: int, status: Status) -> None:
        self.status = (*self.status[:rref_id], status, *self.status[rref_id + 1 :])

    def _tell(self, rank: int, event: str, *args: Any) -> Any:
        """Tells a machine of an event."""
        machine, result = self._pool.step(self._machines[rank], event, *args)
        self._machines = (*self._machines[:rank], machine, *self._machines[rank + 1 :])
        return result

    def _clear(self) -> None:
        """What can never arrive is not there."""
        gone = {item for item in self.items if item.to not in self.alive or not self.can_deliver(item)}
        if gone:
            self.items -= gone

    def _lose_worker(self, rank: int, dead: int) -> None:
        others = tuple(
            worker(other)
            for other in range(len(self._machines))
            if other not in (rank, dead) and (rank, other) not in self.noticed
        )
        self._act(rank, self._tell(rank, "worker_lost", worker(dead), others))

    def _deliver_carry(self, item: Carry) -> None:
        owner = self.owner[item.rref_id]
        is_new = item.fork_id not in self.machine(item.to)._forks
        args = (item.rref_id, item.fork_id, worker(owner), worker(item.sender), item.maker)
        found = self._tell(item.to, "received", *args)
        if found is None:
            self._check_refusal(item)
            return
        self.taken |= {item.fork_id}
        if (owner, item.to) in self.noticed and owner != item.sender:
            self.excused |= {item.fork_id}
        if owner == item.to:
            self.needed |= {item.rref_id}
        elif is_new:
            self.held |= {(item.to, item.fork_id)}
        self._act(item.to, found)

    def _check_refusal(self, item: Carry) -> None:
        was_made = self.status[item.rref_id] in (Status.MADE, Status.FREED)
        is_owner_dead = self._is_dead_for(item.to, self.owner[item.rref_id])
        was_handled = item.fork_id in self.taken | self.refused
        if was_made and not (is_owner_dead or was_handled or self._is_excused(item.fork_id)):
            raise Violation(f"worker {item.to} refuses a reference that nobody has given up: {item}")

    def _deliver_make(self, item: Make) -> None:
        is_held = self._tell(item.to, "value_created", item.rref_id, item.fork_id, worker(item.sender))
        if is_held:
            if self.status[item.rref_id] is Status.EXPECTED:
                self._set_status(item.rref_id, Status.MADE)
            self._act(item.to, [act.Confirm(worker(item.sender), item.fork_id, True)])

    def _event(self, note: Note, may_come: bool | None) -> tuple[Any, ...]:
        sender, message = worker(note.sender), note.message
        match message:
            case act.Adopt():
                return ("adopt_received", sender, message.rref_id, message.fork_id, message.maker)
            case act.Confirm():
                return ("confirmed", message.fork_id, message.is_known)
            case act.Accept():
                return ("accepted", message.fork_id, sender)
            case act.Delete():
                return ("delete_received", sender, message.rref_id, message.fork_id, message.is_first)
            case act.Ask():
                return ("asked", sender, message.fork_id, message.is_last, bool(may_come))
            case act.Answer():
                return ("answered", sender, message.fork_id, message.has_it, message.is_last)
            case act.Mourn():
                is_connected = (note.to, message.dead[0]) not in self.noticed
                return ("mourn_received", sender, message.dead, message.round, is_connected)
            case act.EndSeen():
                return ("end_seen", sender, message.dead, message.round)
            case act.Resume():
                return ("resume_received", sender)

    def _act(self, rank: int, actions: Iterable[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Free():
                    self._check_free(action.rref_id)
                case act.Fail():
                    self._check_fail(action.rref_id)
                case act.Break():
                    self._check_break(rank, action.fork_id)
                case _:
                    if isinstance(action, act.Answer) and action.is_last and not action.has_it:
                        self.refused |= {action.fork_id}
                    self.items |= {Note(rank, action)}
                    self.written -= {Note(rank, action)}
        unreached = {(rank, item.to) for item in self.items if item.sender == rank and item.to not in self.alive}
        self.noticed -= unreached  # that they are dead is told again
        self._clear()

    def _check_free(self, rref_id: int) -> None:
        if self.status[rref_id] in (Status.FREED, Status.EXPECTED):
            raise Violation(f"value {rref_id} is freed, and is {self.status[rref_id].value}")
        if rref_id in self.needed:
            raise Violation(f"value {rref_id} is freed, and its owner's code has it")
        for rank, fork_id in self.held:
            fork = self.machine(rank)._forks[fork_id]
            is_whole = fork.rref_id == rref_id and fork.phase is not ForkPhase.BROKEN
            if is_whole and self.status[rref_id] is Status.MADE and not self._is_excused(fork_id):
                raise Violation(f"value {rref_id} is freed, and worker {rank} holds {fork_id}")
        if self.status[rref_id] is Status.MADE:
            self._set_status(rref_id, Status.FREED)

    def _check_fail(self, rref_id: int) -> None:
        creator = [rank for rank in self.alive if rref_id * CHILDREN in self.machine(rank)._forks]
        if self.status[rref_id] is not Status.EXPECTED:
            raise Violation(f"value {rref_id} fails, and is {self.status[rref_id].value}")
        if creator and not self._is_excused(rref_id * CHILDREN):
            raise Violation(f"value {rref_id} fails, and worker {creator} still makes it")
        self._set_status(rref_id, Status.FAILED)

    def _check_break(self, rank: int, fork_id: int) -> None:
        was_held = (rank, fork_id) in self.held
        rref_id = value_of(fork_id)
        is_owner_dead = self._is_dead_for(rank, self.owner[rref_id])
        was_made = self.status[rref_id] in (Status.MADE, Status.FREED)
        if was_held and was_made and not is_owner_dead and not self._is_excused(fork_id):
            raise Violation(f"worker {rank} holds {fork_id}, and it is broken")

    def _is_excused(self, fork_id: int) -> bool:
        return bool(lineage(fork_id) & self.excused)

    def _is_dead_for(self, rank: int, other: int) -> bool:
        return other not in self.alive or (rank, other) in self.noticed


def _is_between(item: Item, sender: int, to: int) -> bool:
    return item.sender == sender and item.to == to
