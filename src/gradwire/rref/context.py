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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from gradwire.errors import DecodeError, OwnerLost, RpcError, RpcTimeout, RRefError, TransportError, UnknownWorker
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent
from gradwire.rpc.codec import Passage
from gradwire.rpc.connection import current_request
from gradwire.rpc.futures import copies_of
from gradwire.rpc.pending_calls import PendingCall
from gradwire.rref._messages import Action, Break, Fail, Forget, Free, LocalAction, Worker
from gradwire.rref._ownership import Exchange
from gradwire.rref.reliable import Batch
from gradwire.rref.values import Owned, UserFork, deleted, describe
from gradwire.types import COUNTER_BITS, WorkerAddress, WorkerInfo, creator_of, first_counter
from gradwire.wire.messages import read_note

_log = logging.getLogger("gradwire")


class Decisions:
    """What one worker knows of references.

    Use it as ``with decisions as known, known.lock:``. What is to be done is done when the lock is released; what Ctrl-C
    keeps from being done then is done next time. The lock is taken by the statement itself, because Ctrl-C between taking it
    in a function and returning would leave it taken for ever. Where nothing is to be done, `lock` alone is enough.

    Args:
        own: The worker.

    Attributes:
        exchange: Decides.
        ownership: The part of it that knows of references.
        outbox: The part of it that knows what is to be sent.
        owned: Values here that others know of, by id.
        forks: References to values elsewhere, by fork id.
        on_put: Called when there is something to be sent.
        asked_at: By fork that was sent and not accepted: when it was, or when it was last asked for.
        passages: By such a fork: what is known of the message that it is in.
    """

    def __init__(self, own: Worker) -> None:
        self.exchange = Exchange(own)
        self.ownership = self.exchange.ownership
        self.outbox = self.exchange.outbox
        self.owned: dict[int, Owned] = {}
        self.forks: dict[int, UserFork] = {}
        self.asked_at: dict[int, float] = {}
        self.passages: dict[int, Passage] = {}
        self.lock = threading.Lock()  # guards everything here; never held while anything is sent, freed or called back
        self._effects: list[Callable[[], Any]] = []
        self._due: collections.deque[Callable[[], Any]] = collections.deque()  # effects that wait for no lock any more
        self._has_put = False
        self.on_put: Callable[[], None] = lambda: None

    def __enter__(self) -> Decisions:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._has_put:  # first: an effect may be somebody's callback, which may wait for what is to be sent
            self._has_put = False
            try:
                self.on_put()
            except BaseException:
                self._has_put = True
                raise
        if self._effects:
            with self.lock:
                self._due.extend(self._effects)
                self._effects.clear()
        while self._due:
            self._do_next()

    def _do_next(self) -> None:
        """Has one effect. All may be repeated: after Ctrl-C they are, and two threads may have one at the same time."""
        try:
            effect = self._due[0]
        except IndexError:  # another thread had it
            return
        is_over = True
        try:
            effect()
        except KeyboardInterrupt:
            is_over = False
            raise
        finally:
            if is_over:
                with contextlib.suppress(ValueError):
                    self._due.remove(effect)

    def do(self, actions: Iterable[Action]) -> None:
        """Queues messages, and what concerns this worker alone for when the lock is released."""
        self.have(self.exchange.put(actions))

    def have(self, actions: Iterable[LocalAction]) -> None:
        """Queues what concerns this worker alone for when the lock is released."""
        self._has_put = self._has_put or self.outbox.has_messages
        for action in actions:
            if isinstance(action, Free):
                owned = self.owned.pop(action.rref_id, None)
                if owned is not None:
                    owned.is_freed = True
                    self._effects.append(owned.free)
            elif isinstance(action, Fail):
                self._fail(action.rref_id)
            elif isinstance(action, Break):
                self._break(action.fork_id, action.reason)
            elif isinstance(action, Forget):
                self.forks.pop(action.fork_id, None)
            else:
                self._confirm(action.fork_id)

    def later(self, effect: Callable[[], Any]) -> None:
        """Called when the lock is released."""
        self._effects.append(effect)

    def expect(self, rref_id: int) -> Owned:
        """The value of that id, which others know of."""
        owned = self.owned.get(rref_id)
        if owned is None:
            owned = self.owned[rref_id] = Owned(rref_id, num_local=0)
            owned.is_shared = True
        return owned

    def share(self, owned: Owned) -> None:
        """Others are going to know of a value."""
        if not owned.is_shared:
            owned.is_shared = True
            self.owned[owned.rref_id] = owned
            self.ownership.value_made(owned.rref_id)

    def _fail(self, rref_id: int) -> None:
        owned = self.owned.get(rref_id)
        if owned is not None:
            text = f"the value of reference {describe(rref_id)} was never made: the worker whose call was to make it gave up"
            self._effects.append(lambda: owned.fail(lambda: RRefError(f"{text} or died")))

    def _confirm(self, fork_id: int) -> None:
        fork = self.forks.get(fork_id)
        if fork is not None:
            self._effects.append(fork.confirm)

    def _break(self, fork_id: int, reason: str) -> None:
        fork = self.forks.get(fork_id)
        if fork is not None:
            name = fork.owner.name
            text = f"reference {describe(fork.rref_id)} to a value of worker {name} is lost: {reason}. Make the value again"
            self._effects.append(lambda: fork.end(lambda: OwnerLost(text, name)))


_NOTICE: Final = "rref"
_ASK_S: Final = 5.0  # how long nothing may be heard of a reference that was sent
_DELAY_S: Final = 0.01
_ACKNOWLEDGE_S: Final = 0.1  # no worker waits to hear that something arrived; mostly it goes along with something else
_RETRY_S: Final = 1.0
_SEND_S: Final = 10.0
_NEVER: Final = float("inf")


class Delivery:
    """Sends and receives for one worker.

    Args:
        agent: The worker.
        decisions: What it knows of references.
        before_flush: Called before what waits is sent.
    """

    def __init__(self, agent: Agent, decisions: Decisions, before_flush: Callable[[], None]) -> None:
        self._agent = agent
        self._decisions = decisions
        self._before_flush = before_flush
        decisions.on_put = self.plan
        self._own: Worker = (agent.info.id, agent.address.incarnation)
        self._lock = threading.Lock()  # guards _flush_at
        self._flush_at = _NEVER  # when the clock is to look again
        self._unreached: set[int] = set()  # ranks that could not be written to; single operations only
        agent.notices.register(_NOTICE, self._on_batch, Batch)
        agent.notices.on_cut(self._on_cut)
        agent.on_worker_lost(self._on_worker_lost)
        agent.on_worker_connected(self._on_worker_connected)
        agent.sweeps.append(self._sweep)

    # -- when ------------------------------------------------------------------------------------------------------

    def plan(self, delay_s: float = _DELAY_S) -> None:
        """Something is to be sent soon."""
        when = time.monotonic() + delay_s
        with self._lock:
            if when >= self._flush_at:
                return
            self._flush_at = when
        self._agent.reactor.expect(when)

    def plan_to_ask(self) -> None:
        """A reference was sent; if nothing is heard of it, its arrival is asked for."""
        self.plan(_ASK_S)

    def _sweep(self, now: float) -> float:
        with self._lock:
            is_due = self._flush_at <= now
            if is_due:
                self._flush_at = _NEVER
        if is_due:
            self._agent.reactor.run_soon(self._flush_later)
        return self._flush_at

    def _flush_later(self) -> None:
        """In a service thread: sends what waits, asks for what was not heard of, tries again where it failed."""
        now = time.monotonic()
        self._before_flush()
        with self._decisions as known, known.lock:
            for child in known.asked_at.keys() - set(known.ownership.children()):
                del known.asked_at[child]
                known.passages.pop(child, None)
            for child in known.ownership.children():  # those of a worker that is back are asked for, too
                known.asked_at.setdefault(child, now)
            overdue = [child for child, asked in known.asked_at.items() if asked <= now - _ASK_S]
            # While a call is under way, what it carries may still have to leave, or wait behind something large.
            lost = [child for child in overdue if not (child in known.passages and known.passages[child].call_id)]
            known.do(known.ownership.overdue(lost))
            known.asked_at.update(dict.fromkeys(overdue, now))
            next_ask = min(known.asked_at.values(), default=_NEVER)
            for rank in self._take_unreached():
                known.outbox.cut(rank)
        self.flush()
        if next_ask < _NEVER:
            self.plan(max(0.0, next_ask + _ASK_S - now))

    def _take_unreached(self) -> list[int]:
        ranks = []
        while self._unreached:  # one by one: another may be added meanwhile
            ranks.append(self._unreached.pop())
        return ranks

    # -- sending -----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends whatever waits."""
        with self._decisions as known, known.lock:
            batches = known.outbox.take()
        self._send(batches)

    def flush_urgent(self) -> None:
        """Sends what waits if another worker waits for it; else plans to."""
        with self._decisions as known, known.lock:
            batches = known.outbox.take() if known.outbox.has_urgent else []
            is_empty, delay_s = known.outbox.is_empty, _DELAY_S if known.outbox.has_messages else _ACKNOWLEDGE_S
        self._send(batches)
        if not is_empty:
            self.plan(delay_s)

    def flush_urgent_soon(self) -> None:
        """As `flush_urgent`, in a service thread: a worker that does not read must not hold the caller up."""
        if self._decisions.outbox.has_urgent:
            self._agent.reactor.run_soon(self.flush_urgent)
        else:
            self.plan()

    def _send(self, batches: list[Batch]) -> None:
        for batch in batches:
            if self._agent.is_closed:
                return
            rank, incarnation = batch.to
            try:
                name = self._agent.worker_info(rank).name
                address = self._agent.peers.address_of(name, _SEND_S)
                if address.incarnation != incarnation:
                    self._refute(batch.to)
                    continue
                self._agent.notices.send(name, _NOTICE, batch, deadline=time.monotonic() + _SEND_S)
            except (RpcTimeout, TransportError):
                self._unreached.add(rank)
                self.plan(_RETRY_S)
            except (UnknownWorker, RpcError) as error:
                self._lose(batch.to, str(error), is_told=False)

    # -- receiving -----------------------------------------------------------------------------------------------------

    def _on_batch(self, sender: WorkerInfo, note: Any, _: list[torch.Tensor]) -> None:
        batch = read_note(note, Batch)
        if batch.sender[0] != sender.id:
            raise DecodeError(f"{sender.name} sent messages about references in the name of worker {batch.sender[0]}")
        if batch.to != self._own or batch.sender[1] != self._agent.newest_incarnation(sender.name):
            return  # for an earlier life of this worker, or from one of the other
        with self._decisions as known, known.lock:
            self.see(batch.sender)
            known.have(known.exchange.on_batch(batch, self))
        self.flush_urgent()

    # -- what is known of other workers; the caller holds the lock -----------------------------------------------------

    def may_make(self, worker: Worker, rref_id: int) -> bool:
        """Whether a call of that worker that makes that value may be on its way: it has connected for that."""
        return creator_of(rref_id) == worker[0] and self.was_connected(worker)

    def may_bring(self, worker: Worker) -> bool:
        """Whether a call or an answer of that worker may be here or on its way that was not unpacked yet."""
        name = self._agent.worker_info(worker[0]).name
        return self._agent.server.has_unread_call_of(name) or self._may_be_answered_by(name)

    def is_connected(self, worker: Worker) -> bool:
        """Whether anything may still come from that worker."""
        return self._agent.peers.is_connected(*worker)

    def was_connected(self, worker: Worker) -> bool:
        """Whether that is the latest incarnation of a worker that was ever connected."""
        with contextlib.suppress(UnknownWorker):
            return 0 < worker[1] == self._agent.newest_incarnation(self._agent.worker_info(worker[0]).name)
        return False

    def see(self, worker: Worker) -> None:
        """Something came from a worker, or goes to it: unless these are its last words, it is not dead."""
        known = self._decisions
        if known.ownership.is_taken_for_dead(worker) and not self._is_gone(worker):
            known.have(known.exchange.seen(worker))

    def _is_gone(self, worker: Worker) -> bool:
        return not self.was_connected(worker) or self._agent.has_ended(self._agent.worker_info(worker[0]).name)

    def _may_be_answered_by(self, name: str) -> bool:
        """Whether the answer to a call may be on its way from a worker that asks for what it has sent long ago."""
        peer = self._agent.peers.known(name)
        lane = peer.lanes.get("calls") if peer is not None else None
        return lane is not None and lane.calls.has_older_than(time.monotonic() - _ASK_S / 2)

    # -- workers that are gone -----------------------------------------------------------------------------------------

    def _on_cut(self, name: str) -> None:
        """A connection ended, and the worker lives: what was not acknowledged is sent again."""
        self._unreached.add(self._agent.worker_info(name).id)
        self.plan()

    def _on_worker_lost(self, address: WorkerAddress, reason: str) -> None:
        worker = (address.info.id, address.incarnation)
        self._agent.reactor.run_soon(lambda: self._lose(worker, f"worker {address.info.name} is lost: {reason}"))

    def _on_worker_connected(self, address: WorkerAddress) -> None:
        """Before anything is read from the connection. What follows from it is done by another thread."""
        worker, known = (address.info.id, address.incarnation), self._decisions
        with known.lock:
            known.exchange.ended((address.info.id, address.incarnation - 1))  # earlier ones cannot come back
            is_back = known.ownership.is_taken_for_dead(worker)
            self.see(worker)
        if is_back:
            self._agent.reactor.run_soon(self.flush_urgent)

    def _lose(self, worker: Worker, reason: str, *, is_told: bool = True) -> None:
        """Takes a worker for dead; if that `is_told` by the agent, only if it has not been connected again meanwhile."""
        others = self._others(worker)
        with self._decisions as known, known.lock:
            if is_told and not self._is_gone(worker):
                known.outbox.cut(worker[0])
            else:
                known.have(known.exchange.lost(worker, others, reason))
                if is_told and self._is_certain(worker):
                    known.exchange.ended(worker)
        self.flush_urgent()

    def _is_certain(self, worker: Worker) -> bool:
        """Whether a worker that is gone cannot come back: it was restarted, or its supervisor has seen its end."""
        with contextlib.suppress(UnknownWorker):
            name = self._agent.worker_info(worker[0]).name
            peer = self._agent.peers.known(name)
            is_supervised = peer is not None and peer.lost_reason is not None
            return is_supervised or worker[1] < self._agent.newest_incarnation(name)
        return True

    def _refute(self, worker: Worker) -> None:
        """Another incarnation answers: this one has ended before it was ever connected, or was made up."""
        with self._decisions as known, known.lock:
            known.have(known.exchange.refuted(worker, "it was restarted"))
        self.flush_urgent()

    def _others(self, dead: Worker) -> list[Worker]:
        """The workers that may have got a reference from a dead one."""
        with self._decisions as known, known.lock:
            if not any(known.ownership.counts):
                return []
        others: list[Worker] = []
        for info in self._agent.directory.infos():
            if info.id in (dead[0], self._own[0]) or self._agent.has_ended(info.name):
                continue
            with contextlib.suppress(RpcError, TransportError):  # one that cannot be reached is as good as dead
                others.append((info.id, self._agent.incarnation_of(info.name)))
        return others


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
