"""All references of one worker: what they refer to, how they travel, and how their end is noticed."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gradwire.errors import DecodeError, OwnerLost, RpcTimeout, RRefError
from gradwire.rpc._calls import PendingCall
from gradwire.rpc._ids import COUNTER_BITS, creator_of, first_counter
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent
from gradwire.rpc.futures import copies_of
from gradwire.rpc.incoming import current_request
from gradwire.rpc.trips import Passage
from gradwire.rref._actions import Worker
from gradwire.rref.decisions import Decisions
from gradwire.rref.delivery import Delivery
from gradwire.rref.values import Owned, UserFork, deleted, describe
from gradwire.types import WorkerAddress

_log = logging.getLogger("gradwire")

_EXTENSION: Final = "rref"
_FAREWELL_S: Final = 10.0
_SLICE_S: Final = 0.05
_MAX_EARLY: Final = 64
_MAX_DROPPED: Final = 1000


@dataclass(frozen=True, slots=True)
class ReferenceStatistics:
    """A snapshot of one worker's references.

    Attributes:
        num_values: Values here that other workers know of.
        num_forks: References here to values elsewhere.
        num_pending: Those among them that their owner has not confirmed yet.
        num_children: References that were sent and are not known to have arrived.
        num_messages: Messages about references that are on their way.
    """

    num_values: int
    num_forks: int
    num_pending: int
    num_children: int
    num_messages: int


class Access(NamedTuple):
    """What a worker has to do with a value.

    Attributes:
        is_here: Whether the value is here, or expected.
        is_held: Whether that worker holds a reference to it, or is its owner.
        can_expect: Whether it may wait for one more value that calls of its own are to make.
    """

    is_here: bool
    is_held: bool
    can_expect: bool


class References:
    """The references of one worker.

    Args:
        agent: The worker.

    Attributes:
        own: The worker by rank and incarnation.
        new_id: Gives ids of values and forks.
    """

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.own: Worker = (agent.info.id, agent.address.incarnation)
        first = (agent.info.id << COUNTER_BITS) | first_counter(agent.address.incarnation)
        self.new_id: Callable[[], int] = itertools.count(first).__next__
        self._decisions = Decisions(self.own)
        self._delivery = Delivery(agent, self._decisions, self.take_dropped)
        self._dropped: collections.deque[Owned | UserFork] = collections.deque()  # filled by finalizers
        self._early: collections.deque[UserFork] = collections.deque()  # single operations only
        self._is_noticed = False  # somebody is going to look at _dropped
        agent.codec.carrier = self
        agent.farewells.append(self._say_farewell)

    def __repr__(self) -> str:
        return f"<References of {self.agent.info.name}: {self.statistics()}>"

    # -- values here -----------------------------------------------------------------------------------------------

    def find(self, rref_id: int, maker: Worker | None = None) -> Owned:
        """A value of this worker, which `maker` may still have to make.

        Raises:
            RRefError: It is not here and never will be.
        """
        owned = self._decisions.owned.get(rref_id)
        if owned is not None:
            return owned
        with self._decisions as known, known.lock:
            if known.ownership.value_expected(rref_id, maker, maker or self.own):
                return known.expect(rref_id)
        raise RRefError(
            f"worker {self.agent.info.name} does not have the value of reference {describe(rref_id)} any more: no worker "
            f"held a reference to it, or the holder was out of reach for a while and taken for dead. Make the value again"
        )

    def begin_making(self, rref_id: int, fork_id: int, user: Worker) -> Owned:
        """A call arrived that makes a value for a worker.

        Raises:
            DecodeError: It speaks for another worker.
            RRefError: That worker has given it up already, or holds too many.
        """
        known = self._decisions
        with known.lock:
            if user == self.own:
                return known.owned.get(rref_id) or Owned(rref_id)  # dropped before it was made: no code will see it
            if not (self._delivery.may_make(user, rref_id) and creator_of(fork_id) == user[0]):
                raise DecodeError(f"worker {user[0]} asked for a value in the name of another: {describe(rref_id)}")
            self._delivery.see(user)
            if known.ownership.value_created(rref_id, fork_id, user):
                return known.expect(rref_id)
            can_hold = known.ownership.can_hold(user)
        name = self.agent.info.name
        if not can_hold:
            raise RRefError(
                f"the caller holds too many references to values of worker {name}. Delete some of them first"
            )
        raise RRefError(
            f"worker {name} did not make the value of reference {describe(rref_id)}: its call was given up before it arrived"
        )

    def make_here(self) -> Owned:
        """A value of this worker that a call of its own is going to make."""
        owned = Owned(self.new_id())
        with self._decisions as known, known.lock:
            known.share(owned)
        return owned

    def share(self, owned: Owned) -> None:
        """Calls are going to name a value of this worker."""
        if not owned.is_shared:
            with self._decisions as known, known.lock:
                known.share(owned)

    def arrive_here(self, rref_id: int, fork_id: int) -> Owned | UserFork:
        """A reference that this worker sent to itself arrived: what it refers to.

        Raises:
            RRefError: Nothing.
        """
        with self._decisions as known, known.lock:
            state = known.forks.get(fork_id) if fork_id else known.owned.get(rref_id)
            if state is None:
                raise RRefError(f"reference {describe(rref_id)} was deleted here")
            state.num_local += 1  # for the reference that is made of it next
            known.ownership.needed_again(rref_id, fork_id)
        return state

    def wait(self, owned: Owned, deadline: float) -> Any:
        """A value of this worker, once it is made.

        Raises:
            RpcTimeout: It was not, in time.
            Exception: What went wrong when it was made.
        """
        owned.wait(deadline, f"the value of reference {describe(owned.rref_id)} was not made", self.agent.info.name)
        return owned.get()

    # -- references to values elsewhere ------------------------------------------------------------------------------

    def create_fork(self, owner: WorkerAddress) -> UserFork:
        """A reference to a value that a call is going to make on another worker."""
        life = (owner.info.id, owner.incarnation)
        known, rref_id, fork_id = self._decisions, self.new_id(), self.new_id()
        fork = UserFork(rref_id, fork_id, owner.info, life, is_first=True, is_used=False)
        with known.lock:
            self._delivery.see(life)
            known.forks[fork_id] = fork
            known.ownership.fork_created(rref_id, fork_id, life)
        return fork

    def on_answered(self, state: Owned | UserFork, call: PendingCall) -> None:
        """The call that makes a value has ended; a copy of a small value came with the answer from elsewhere."""
        state.call = state.keeps = None
        if call.error is not None:
            self.on_failed(state, call.error)
        elif isinstance(state, UserFork):
            if call.value is not None and not state.is_used:
                state.early = call.value
                self._early.append(state)
                if len(self._early) > _MAX_EARLY:  # only the latest are kept
                    with contextlib.suppress(IndexError):
                        self._early.popleft().early = None
            self.on_created(state)

    def on_created(self, fork: UserFork) -> None:
        """The owner has the value."""
        with self._decisions.lock:
            actions = self._decisions.ownership.confirmed(fork.fork_id, fork.owner_life)
        if actions:  # it is not needed any more; messages may leave in any order, so the lock need not be kept
            with self._decisions as known, known.lock:
                known.do(actions)
        fork.confirm()

    def on_failed(self, state: Owned | UserFork, error: Exception) -> None:
        """The call that was to make a value has failed."""
        if isinstance(state, Owned):
            state.fail(copies_of(error))
            return
        with self._decisions as known, known.lock:
            known.later(functools.partial(state.end, copies_of(error)))  # first: it says more than that it is broken
            known.do(known.ownership.fork_failed(state.fork_id, str(error)))

    def watch(self, fork: UserFork) -> None:
        """Somebody wants to know whether the owner has answered; until then nobody may be reading its answers."""
        peer = self.agent.peers.known(fork.owner.name)
        lane = peer.lanes.get("calls") if peer is not None else None
        if lane is not None and not fork.is_done:
            lane.reader.ensure_watched()

    def maker_of(self, fork: UserFork, deadline: float) -> Worker | None:
        """Who may still have to make the value of a reference that is about to be used.

        Raises:
            OwnerLost, RRefError: It leads nowhere.
            RpcTimeout: The owner did not confirm it in time.
        """
        if not (fork.is_done or fork.is_first):
            fork.wait(deadline, f"reference {describe(fork.rref_id)} was not confirmed by its owner", fork.owner.name)
        fork.check()
        return None if fork.is_done else self.own

    # -- references on their way ---------------------------------------------------------------------------------------

    def depart(self, state: Owned | UserFork, to: str, passage: Passage) -> tuple[int, Worker | None]:
        """A reference is about to travel: the id of the new fork, and who may still have to make the value.

        Raises:
            OwnerLost, RRefError: It leads nowhere.
        """
        if isinstance(state, UserFork):
            state.check()
            state.use()
        receiver = (self.agent.worker_info(to).id, self.agent.incarnation_of(to))
        child, maker, known = self.new_id(), None, self._decisions
        with known.lock:  # nothing is to be done; and what others left must not run in the middle of packing
            self._delivery.see(receiver)
            if isinstance(state, Owned):
                known.share(state)
                is_sent = known.ownership.sent(state.rref_id, None, child, receiver)
            else:
                maker = known.ownership.maker_of(state.fork_id)
                is_sent = known.ownership.sent(state.rref_id, state.fork_id, child, receiver)
            if is_sent:
                known.asked_at[child] = time.monotonic()
                known.passages[child] = passage
        if not is_sent:
            raise RRefError(f"reference {describe(state.rref_id)} was deleted here and cannot be sent to worker {to}")
        self._delivery.plan_to_ask()
        return child, maker

    def arrive(
        self, rref_id: int, fork_id: int, owner: Worker, sender: Worker, maker: Worker | None
    ) -> Owned | UserFork:
        """A reference arrived: what it refers to. One that cannot be used is a broken fork.

        Raises:
            UnknownWorker: There is no worker of the owner's rank.
        """
        info, sender_info = self.agent.worker_info(owner[0]), self.agent.worker_info(sender[0])
        with self._decisions as known, known.lock:
            if not self._delivery.was_connected(sender):
                actions = None
            else:
                self._delivery.see(sender)
                if maker is not None and owner == self.own and not self._delivery.may_make(maker, rref_id):
                    maker = None
                actions = known.ownership.received(rref_id, fork_id, owner, sender, maker)
            if actions is not None:
                known.do(actions)
                if owner == self.own:
                    owned = known.expect(rref_id)
                    owned.num_local += 1  # for the reference that is made of it next
                    return owned
                fork = known.forks.get(fork_id)
                if fork is not None:  # a repeat
                    fork.num_local += 1
                    known.ownership.needed_again(rref_id, fork_id)
                    return fork
                fork = known.forks[fork_id] = UserFork(rref_id, fork_id, info, owner)
                if owner == sender:
                    known.later(fork.confirm)
                return fork
        fork = UserFork(rref_id, fork_id, info, owner)
        text = f"reference {describe(rref_id)}, sent by {sender_info.name}, leads nowhere"
        fork.end(lambda: OwnerLost(f"{text}: {info.name} does not have its value. Make the value again", info.name))
        return fork

    def on_not_sent(self, cargo: dict[Any, Any]) -> None:
        """References were packed into a message that will never arrive."""
        with self._decisions as known, known.lock:
            for child in cargo.values():
                if type(child) is int:
                    known.asked_at.pop(child, None)
                    known.passages.pop(child, None)
                    known.do(known.ownership.not_sent(child))

    def on_arrived(self, cargo: dict[Any, Any]) -> None:
        """A message with references was unpacked: their owners are asked to list them, which nobody here waits for."""
        self._delivery.flush_urgent_soon()

    # -- their end -------------------------------------------------------------------------------------------------------

    def on_dropped(self, state: Owned | UserFork) -> None:
        """This worker's own code has let go of a reference. Called by finalizers, so it takes no lock."""
        self._dropped.append(state)
        if not self._is_noticed:
            self._is_noticed = True
            self.agent.reactor.run_soon(self._delivery.plan)

    def take_dropped(self) -> None:
        """Tells the state machine of references that were let go of."""
        self._is_noticed = False
        while self._dropped:
            with self._decisions as known, known.lock:
                for _ in range(_MAX_DROPPED):  # others want the lock, too
                    try:
                        self._take_dropped(known, self._dropped.popleft())
                    except IndexError:
                        break

    def _take_dropped(self, known: Decisions, state: Owned | UserFork) -> None:
        state.num_local -= 1
        if state.num_local:
            return
        if isinstance(state, UserFork):
            if not state.is_done:
                known.later(functools.partial(self.watch, state))
            known.do(known.ownership.fork_dropped(state.fork_id))
        elif state.is_shared:
            known.do(known.ownership.value_dropped(state.rref_id))

    def delete_all(self) -> None:
        """Deletes every reference of this worker to values elsewhere, whoever still has one."""
        self.take_dropped()
        with self._decisions as known, known.lock:
            for fork in list(known.forks.values()):
                known.do(known.ownership.fork_dropped(fork.fork_id))
                known.later(functools.partial(fork.end, deleted(fork.rref_id)))
        self._delivery.flush()

    def _say_farewell(self, deadline: float) -> None:
        """Before this worker leaves: nobody is to hold anything of it, nor it of others; whoever still does is named."""
        limit = min(deadline, time.monotonic() + _FAREWELL_S)
        mine = self.statistics().num_forks
        if mine:
            _log.info("%s leaves while it has %d references to values of other workers", self.agent.info.name, mine)
        self.delete_all()
        pause = threading.Event()  # never set: its wait is a pause that lets signals through
        while holders := self.holders():
            if time.monotonic() >= limit:
                listed = ", ".join(f"{name} ({count})" for name, count in holders.items())
                text = f"worker {self.agent.info.name} left while others still had references to its values: {listed}"
                raise RpcTimeout(f"{text}. Delete them there, or call shutdown there, too", next(iter(holders)), "run")
            pause.wait(_SLICE_S)

    def access_of(self, caller: Worker, rref_id: int) -> Access:
        """What another worker, or this one, has to do with a value."""
        with self._decisions as known, known.lock:
            is_held = caller == self.own or known.ownership.is_holder(rref_id, caller)
            return Access(rref_id in known.owned, is_held, known.ownership.can_expect(caller))

    # -- questions -----------------------------------------------------------------------------------------------------

    def holders(self) -> dict[str, int]:
        """How many references to values of this worker each other worker has, by name."""
        with self._decisions as known, known.lock:
            found = known.ownership.holders()
        return {self.agent.worker_info(rank).name: count for (rank, _), count in sorted(found.items())}

    @property
    def num_held(self) -> int:
        """Values here that other workers refer to."""
        with self._decisions as known, known.lock:
            return known.ownership.num_held

    def statistics(self) -> ReferenceStatistics:
        """Counts, right now."""
        self.take_dropped()
        with self._decisions as known, known.lock:
            return ReferenceStatistics(*known.ownership.counts, known.outbox.num_open)


_made: weakref.WeakSet[References] = weakref.WeakSet()
_lock = threading.Lock()  # guards _made


def attach(agent: Agent) -> None:
    """Gives a new worker references."""
    made = agent.extensions[_EXTENSION] = References(agent)
    with _lock:
        _made.add(made)


def all_open() -> list[References]:
    """Those of all workers of this process that are not closed."""
    with _lock:
        return [item for item in _made if not item.agent.is_closed]


def of(agent: Agent) -> References:
    """The references of a worker."""
    found: References = agent.extensions[_EXTENSION]
    return found


def here() -> References:
    """Those of the worker whose call the current thread serves, or of this process.

    Raises:
        NotInitialized: This process is no worker.
    """
    request = current_request()
    agent = request.source.server.agent if request is not None else current_agent()
    found: References = agent.extensions[_EXTENSION]
    return found
