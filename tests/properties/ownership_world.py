"""Workers with real `ReferenceProtocol` machines, everything that is on its way between them, and who really holds what.

A step is a move: a worker's code sends or drops a reference, something arrives, is repeated or lost, a worker ends, another
one notices. `World.moves` lists what may happen next, `World.apply` does it and raises `Violation` if a rule is broken:

    safety      no value is freed, and no reference broken, while the code of a living worker holds it
    liveness    when everything is dropped and has arrived, nothing is left (`settle`)
    agreement   when everything has arrived, a reference that looks whole is listed with its owner (`check_agreement`)

The protocol's own messages are in the outboxes of their senders until they are acknowledged (`Post`), and may arrive at any
time, in any order. What carries references (`Carry`), the call that makes a value (`Make`) and its answer (`Made`) may be
lost for good.

A worker may take a living one for dead (`cut`): it then hears nothing of it, and keeps what it has to say, until both are
connected again (`see`). References that this breaks are excused, and those made of them; nothing else is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradwire.rref import _messages as act
from gradwire.rref._ownership import ForkPhase, Ownership, ReferenceProtocol
from gradwire.rref.reliable import Batch
from properties.ownership_items import (
    CHILDREN,
    Carry,
    Item,
    Made,
    Make,
    Move,
    Post,
    Status,
    Violation,
    lineage,
    value_of,
    worker,
)
from properties.ownership_pool import Pool

_MAX_ROUNDS = 60
_EMPTY: frozenset[Any] = frozenset()
_QUIET = (act.Answer, act.Accept, act.Confirm, act.AcknowledgeDeath)


@dataclass(frozen=True)
class Around:
    """What a worker knows of others besides what they say of references."""

    brings: bool
    gone: frozenset[int]

    def may_make(self, worker: act.Worker, rref_id: int) -> bool:
        return True

    def may_bring(self, worker: act.Worker) -> bool:
        return self.brings

    def is_connected(self, worker: act.Worker) -> bool:
        return worker[0] not in self.gone

    def was_connected(self, worker: act.Worker) -> bool:
        return True


class World:
    """Workers, what is under way, and the truth.

    Args:
        num_workers: How many there are.
        make_machine: What each of them runs; other than the real one to see whether a fault would be found.
        make_protocol: The same for what surrounds it.
    """

    def __init__(
        self,
        num_workers: int,
        make_machine: type[Ownership] = Ownership,
        make_protocol: type[ReferenceProtocol] = ReferenceProtocol,
    ) -> None:
        # all of these are replaced, never changed: copies of a world share them
        self._pool = Pool(make_machine, make_protocol)
        self._machines = tuple(self._pool.start(worker(rank)) for rank in range(num_workers))
        self.owner: tuple[int, ...] = (-1,)  # by value; there is none with number 0
        self.status: tuple[Status, ...] = (Status.FREED,)
        self.num_children: frozenset[tuple[int, int]] = _EMPTY  # by fork, or value for those that its owner sent
        self.alive = frozenset(range(num_workers))
        self.noticed: frozenset[tuple[int, int]] = _EMPTY  # (who, whose end), also of those that live
        self.items: frozenset[Item] = _EMPTY
        self.needed: frozenset[int] = _EMPTY  # values that their owner's own code has
        self.held: frozenset[tuple[int, int]] = _EMPTY  # (who, fork) that somebody's code has
        self.excused: frozenset[int] = _EMPTY  # forks that may break: their call failed, or somebody was taken for dead
        self.taken: frozenset[int] = _EMPTY  # forks that have arrived
        self.refused: frozenset[int] = _EMPTY  # forks of which their receiver has said that it will never take them

    def copy(self) -> World:
        twin = object.__new__(World)
        vars(twin).update(vars(self))
        return twin

    def forget_steps(self) -> None:
        """For this world and all that came of it: free what was kept to try each event once."""
        self._pool.forget_steps()

    def machine(self, rank: int) -> Ownership:
        return self._machines[rank].protocol.ownership

    def key(self) -> int:
        """Equal for worlds that go on alike: what no message and no machine speaks of any more makes no difference."""
        machines = [self._machines[rank] for rank in sorted(self.alive)]
        posts = self._posts_whatever_their_numbers()
        users_items = frozenset(item for item in self.items if not isinstance(item, Post))
        ids = {item.fork_id for item in users_items}.union(*(machine.ids for machine in machines))
        ids |= {getattr(message, "fork_id", 0) for _, _, messages, *_ in posts for message in messages}
        ids |= {value_of(fork_id) for fork_id in ids}
        states = tuple(
            (machine.number, frozenset(pair for pair in machine.ended if pair[1] in ids)) for machine in machines
        )
        past = (self.excused & ids.union(*map(lineage, ids)), self.taken & ids, self.refused & ids)
        truth = (self.alive, self.noticed, users_items, self.needed, self.held)
        parents = {fork_id for _, fork_id in self.held}
        counts = frozenset(item for item in self.num_children if item[0] < CHILDREN or item[0] in parents)
        return hash((states, frozenset(posts.items()), past, truth, self.status, counts))

    def _posts_whatever_their_numbers(self) -> Counter[tuple[Any, ...]]:
        """What is under way: sender, receiver, messages, and whether they have arrived before."""
        found: Counter[tuple[Any, ...]] = Counter()
        for sender, to, number, messages, is_copy in [*self._written(), *self._copies()]:
            if to in self.alive and (sender in self.alive or (to, sender) not in self.noticed):
                received = self._machines[to].protocol.outbox._channels.get(worker(sender))
                has_arrived = received is not None and (number <= received.up_to or number in received.beyond)
                found[sender, to, messages, has_arrived, is_copy] += 1
        return found

    # -- what people do ----------------------------------------------------------------------------------------------

    def make(self, owner: int) -> None:
        """A worker's own code has a value to share."""
        rref_id = self._new_value(owner, Status.MADE)
        self._tell(owner, "value_made", rref_id)
        self.needed |= {rref_id}

    def create(self, creator: int, owner: int) -> None:
        """A worker has a value made elsewhere. It connects for that."""
        self._connect(creator, owner)
        rref_id = self._new_value(owner, Status.EXPECTED)
        fork_id = rref_id * CHILDREN
        self._tell(creator, "fork_created", rref_id, fork_id, worker(owner))
        self.held |= {(creator, fork_id)}
        self.items |= {Make(creator, owner, rref_id, fork_id)}

    def send(self, sender: int, rref_id: int, parent: int | None, to: int) -> None:
        self._connect(sender, to)
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
        if isinstance(item, Post):
            self._act(item.to, self._tell(item.to, *self._arrival(item, bool(may_come))))
            self.items -= {item}
            if keep:
                self.items |= {item._replace(is_copy=True)}
            self._acknowledge(item.sender, item.to)
            self._clear()
            return
        if not keep:
            self.items -= {item}
        if isinstance(item, Carry):
            self._deliver_carry(item)
        elif isinstance(item, Make):
            self._deliver_make(item)
        else:
            self._act(item.to, self._tell(item.to, "confirmed", item.fork_id, worker(item.sender)))

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
        self._lose_worker(rank, dead)
        self._tell(rank, "incarnation_ended", worker(dead))
        self._clear()

    def cut(self, rank: int, other: int) -> None:
        """A worker takes a living one for dead. What it wrote before may arrive."""
        mine, its = self.machine(rank), self.machine(other)
        self.excused |= {*mine._listed.get(worker(other), ())}
        self.excused |= {fork_id for fork_id, child in mine._children.items() if child.to == worker(other)}
        self.excused |= {fork_id for fork_id, fork in mine._forks.items() if fork.owner == worker(other)}
        self.excused |= {fork_id for fork_id, fork in its._forks.items() if fork.owner == worker(rank)}
        self.excused |= {
            item.fork_id
            for item in self.items
            if isinstance(item, Carry) and item.to == other and self.owner[item.rref_id] == rank
        }
        self._lose_worker(rank, other)

    def see(self, rank: int, other: int) -> None:
        """A worker is connected again with one that it took for dead."""
        self.noticed -= {(rank, other)}
        self._act(rank, self._tell(rank, "worker_seen", worker(other)))
        self._acknowledge(rank, other)
        self._acknowledge(other, rank)

    def _connect(self, rank: int, other: int) -> None:
        for pair in ((rank, other), (other, rank)):
            if pair in self.noticed and self.alive.issuperset(pair):
                self.see(*pair)

    # -- everything that may happen ----------------------------------------------------------------------------------

    def can_deliver(self, item: Item) -> bool:
        return item.to in self.alive and (item.to, item.sender) not in self.noticed

    def posts(self) -> list[Post]:
        """Batches that may arrive."""
        return [post for post in self._written() if self.can_deliver(post)]

    def _written(self) -> list[Post]:
        """Batches that are not acknowledged."""
        return [post for machine in self._machines for post in machine.posts]

    def _copies(self) -> list[Post]:
        return [item for item in self.items if isinstance(item, Post)]

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
        return [("deliver", item) for item in [*self.items, *self.posts()] if self.can_deliver(item)]

    def repeats(self) -> list[Move]:
        """Calls run once, and are answered once; everything else may arrive again."""
        return [(*move, True) for move in self.deliveries() if not isinstance(move[1], Make | Made)]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self.items or self.posts())

    def losses(self) -> list[Move]:
        return [("lose", item) for item in self.items if isinstance(item, Carry | Make | Made)]

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
        while noise := next((post for post in self.posts() if self._is_noise(post)), None):
            self.deliver(noise)

    def _is_noise(self, post: Post) -> bool:
        for message in post.messages:
            if not isinstance(message, _QUIET) or (isinstance(message, act.Answer) and message.has_it):
                return False  # that one makes a difference after the next question
        before = self._machines[post.to]
        after, actions = self._pool.step(before, *self._arrival(post, False))
        is_same = (after.known, after.ended, after.batches) == (before.known, before.ended, before.batches)
        return is_same and not actions

    # -- the end -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Everything is dropped, noticed, delivered and asked for; nothing may be left.

        Raises:
            Violation: Something is.
        """
        for _ in range(_MAX_ROUNDS):
            self._apply_all(self.sights, self.notices, self.drops, self.deliveries)
            if self.is_idle:
                self._fail_lost_calls()
                self._apply_all(self.overdues)
            if self.is_idle and self.is_clean():
                return
        raise Violation(f"something is left: {self.leftovers()}")

    def check_agreement(self) -> None:
        """Where nothing is under way, and living workers know each other, a confirmed fork is listed.

        Raises:
            Violation: One is not.
        """
        if not self.is_idle or self.notices() or self.sights():
            return
        for rank in self.alive:
            for fork_id, fork in self.machine(rank)._forks.items():
                owner = fork.owner[0]
                if fork.phase is ForkPhase.CONFIRMED and owner in self.alive:
                    value = self.machine(owner)._values.get(fork.rref_id)
                    if value is None or value.holders.get(fork_id) != worker(rank):
                        raise Violation(f"worker {rank} trusts {fork_id}, and worker {owner} does not list it")

    def is_clean(self) -> bool:
        return not (self.held or self.needed or self.leftovers())

    def leftovers(self) -> list[str]:
        return [text for rank in sorted(self.alive) if (text := self._leftover(rank))]

    def _leftover(self, rank: int) -> str:
        machine, outbox = self.machine(rank), self._machines[rank].protocol.outbox
        is_clean = not (any(machine.counts) or machine._deaths.retained or machine._listed or machine._num_expected)
        if is_clean and not outbox.num_open:
            return ""
        return f"{machine!r} retains {sorted(machine._deaths.retained)}; {outbox!r}"

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
        gone = {item for item in self.items if item.to not in self.alive or self._is_dead_and_noticed(item)}
        if gone:
            self.items -= gone

    def _is_dead_and_noticed(self, item: Item) -> bool:
        return item.sender not in self.alive and (item.to, item.sender) in self.noticed

    def _acknowledge(self, sender: int, to: int) -> None:
        """The sender learns what has arrived, if neither takes the other for dead; numbers begin anew where they can."""
        if (to, sender) in self.noticed or (sender, to) in self.noticed:
            return
        received = self._machines[to].protocol.outbox._channels.get(worker(sender))
        if received is None or worker(to) not in self._machines[sender].protocol.outbox._channels:
            return
        self._tell(sender, "acknowledge", worker(to), received.up_to, tuple(sorted(received.beyond)))
        sent = self._machines[sender].protocol.outbox._channels[worker(to)]
        copies = {post for post in self._copies() if (post.sender, post.to) == (sender, to)}
        less = min(
            [received.up_to, *(number - 1 for number in sent.unacknowledged), *(post.number - 1 for post in copies)]
        )
        if less:
            self._tell(sender, "renumber_sent", worker(to), less)
            self._tell(to, "renumber_received", worker(sender), less)
            self.items -= copies
            self.items |= {post._replace(number=post.number - less) for post in copies}

    def _lose_worker(self, rank: int, dead: int) -> None:
        self.noticed |= {(rank, dead)}
        others = tuple(
            worker(other)
            for other in range(len(self._machines))
            if other not in (rank, dead) and (rank, other) not in self.noticed
        )
        self._act(rank, self._tell(rank, "worker_lost", worker(dead), others, "it is lost"))

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
            self.items |= {Made(item.to, item.sender, item.rref_id, item.fork_id)}
            self._clear()

    def _arrival(self, post: Post, may_come: bool) -> tuple[Any, ...]:
        batch = Batch(worker(post.sender), worker(post.to), post.number, 0, (), post.messages)
        gone = frozenset(other for rank, other in self.noticed if rank == post.to)
        return "batch_received", batch, Around(may_come, gone)

    def _act(self, rank: int, actions: Iterable[act.LocalAction]) -> None:
        for action in actions:
            match action:
                case act.Free():
                    self._check_free(action.rref_id)
                case act.Fail():
                    self._check_fail(action.rref_id)
                case act.Break():
                    self._check_break(rank, action.fork_id)
                case act.Forget():
                    if (rank, action.fork_id) in self.held:
                        raise Violation(f"worker {rank} holds {action.fork_id}, and it is forgotten")
        self._note_refusals(rank)
        self._clear()

    def _note_refusals(self, rank: int) -> None:
        for batch in self._machines[rank].batches:
            for message in batch.messages:
                if isinstance(message, act.Answer) and message.is_last and not message.has_it:
                    self.refused |= {message.fork_id}

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
