"""The references of one worker: the driver of the protocol in `_ownership`.

`References` feeds events to the protocol under one lock, and acts on its decisions once the lock is released: it sends
batches, frees values, and completes or breaks the forks that `RRef` objects share.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from gradwire import _interrupts
from gradwire.errors import DecodeError, OwnerLost, RpcError, RpcTimeout, RRefError, TransportError, UnknownWorker
from gradwire.observe import events
from gradwire.observe.log import get_logger
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent
from gradwire.rpc.codec import TransferStatus
from gradwire.rpc.connection import current_request
from gradwire.rpc.futures import copies_of
from gradwire.rpc.pending_calls import PendingCall
from gradwire.rref._messages import Action, Break, Confirmed, Fail, Forget, Free, LocalAction, Worker
from gradwire.rref._ownership import ReferenceProtocol
from gradwire.rref.reliable import Batch
from gradwire.rref.transits import Transits
from gradwire.rref.values import Owned, UserFork, deleted, describe, lost_text
from gradwire.types import COUNTER_BITS, WorkerAddress, WorkerInfo, creator_of, first_counter

_log = get_logger(__name__)

_NOTICE: Final = "rref"
_EXTENSION: Final = "rref"
_ASK_S: Final = 5.0  # how long a reference that was sent may stay unaccepted before its receiver is asked for it
_DELAY_S: Final = 0.01  # messages wait this long for others to the same worker
_ACKNOWLEDGE_S: Final = 0.1  # no worker waits for an acknowledgement; mostly it travels with messages
_RETRY_S: Final = 1.0
_SEND_S: Final = 10.0
_LEAVE_S: Final = 10.0  # how long a worker that leaves waits for others to delete their references to its values
_LOOK_EVERY_S: Final = 0.05
_MAX_EARLY: Final = 64  # values that came with the answers to creations and were not fetched yet
_MAX_DROPPED: Final = 1000  # references whose end is noted without releasing the lock
_NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class ReferenceStatistics:
    """Snapshot of one worker's references.

    Attributes:
        num_values: Values on this worker that other workers refer to.
        num_forks: References on this worker to values of others.
        num_pending: Those that their owner has not confirmed yet.
        num_children: References that were sent and are not confirmed to have arrived.
        num_messages: Protocol messages in flight.
    """

    num_values: int
    num_forks: int
    num_pending: int
    num_children: int
    num_messages: int


class Effects:
    """A block that holds a lock; functions that are deferred in it are called, in order, once the lock is released."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._deferred: collections.deque[Callable[[], Any]] = collections.deque()  # guarded by the lock
        self.defer = self._deferred.append

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        effects = list(self._deferred)
        self._deferred.clear()
        self._lock.release()
        for effect in effects:
            try:
                effect()
            except Exception:  # a callback of the program's; the other effects must happen all the same
                _log.exception("a callback of a reference failed")


class FlushTimer:
    """Calls a function in a service thread at the earliest of the times that are planned."""

    def __init__(self, agent: Agent, flush: Callable[[], None]) -> None:
        self._reactor = agent.reactor
        self._flush = flush
        self._lock = threading.Lock()  # guards _flush_at
        self._flush_at = _NEVER
        agent.sweeps.append(self._sweep)

    def plan(self, delay_s: float = _DELAY_S) -> None:
        when = time.monotonic() + delay_s
        with self._lock:
            if when >= self._flush_at:
                return
            self._flush_at = when
        self._reactor.expect(when)

    def _sweep(self, now: float) -> float:
        with self._lock:
            is_due = self._flush_at <= now
            if is_due:
                self._flush_at = _NEVER
        if is_due:
            self._reactor.run_soon(self._flush)
        return self._flush_at


class PeerKnowledge:
    """The agent's knowledge of other workers by rank and incarnation: the `Surroundings` of the protocol."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def may_make(self, worker: Worker, rref_id: int) -> bool:
        """Return whether a call of that worker that makes that value may be in flight: it has connected for that."""
        return creator_of(rref_id) == worker[0] and self.was_connected(worker)

    def may_bring(self, worker: Worker) -> bool:
        """Return whether a call or an answer of that worker may be here or in flight that was not unpacked yet."""
        name = self._agent.worker_info(worker[0]).name
        if self._agent.server.has_unread_call_of(name):
            return True
        # It asks for what it sent long ago, so an answer can only be one to a call that is as old.
        peer = self._agent.peers.by_name.get(name)
        lane = peer.lanes.get("calls") if peer is not None else None
        if lane is None:
            return False
        return bool(lane.unpacking) or lane.calls.has_older_than(time.monotonic() - _ASK_S / 2)

    def is_connected(self, worker: Worker) -> bool:
        """Return whether anything may still arrive from that worker."""
        return self._agent.peers.is_connected(*worker)

    def was_connected(self, worker: Worker) -> bool:
        """Return whether that is the latest incarnation of a worker that was ever connected."""
        with contextlib.suppress(UnknownWorker):
            return 0 < worker[1] == self._agent.newest_incarnation(self._agent.worker_info(worker[0]).name)
        return False

    def is_gone(self, worker: Worker) -> bool:
        """Return whether that incarnation is no longer connected, or never was."""
        return not self.was_connected(worker) or self._agent.has_ended(self._agent.worker_info(worker[0]).name)

    def cannot_return(self, worker: Worker) -> bool:
        """Return whether a lost worker cannot come back: it was restarted, or its supervisor has confirmed its end."""
        with contextlib.suppress(UnknownWorker):
            name = self._agent.worker_info(worker[0]).name
            peer = self._agent.peers.by_name.get(name)
            is_supervised = peer is not None and peer.lost_reason is not None
            return is_supervised or worker[1] < self._agent.newest_incarnation(name)
        return True

    def survivors(self, dead: Worker) -> list[Worker]:
        """Return the other workers that may have got a reference from a dead one."""
        found: list[Worker] = []
        for info in self._agent.directory.infos():
            if info.id in (dead[0], self._agent.info.id) or self._agent.has_ended(info.name):
                continue
            with contextlib.suppress(RpcError, TransportError):  # one that cannot be reached is as good as dead
                found.append((info.id, self._agent.incarnation_of(info.name)))
        return found


class References:
    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self.own: Worker = (agent.info.id, agent.address.incarnation)
        first = (agent.info.id << COUNTER_BITS) | first_counter(agent.address.incarnation)
        self.new_id: Callable[[], int] = itertools.count(first).__next__  # of a value or fork
        # Nothing is sent, freed or called back while the lock is held: `_effects` holds it for a while and does that
        # afterwards. Where the protocol takes no actions, the lock alone is enough.
        self._lock = threading.Lock()  # guards what follows, down to `_unreached`
        self._effects = Effects(self._lock)
        self._protocol = ReferenceProtocol(self.own)
        self._ownership, self._outbox = self._protocol.ownership, self._protocol.outbox
        self._owned: dict[int, Owned] = {}  # values here that others know of
        self._forks: dict[int, UserFork] = {}  # references to values elsewhere
        self._transits = Transits()
        self._unreached: set[int] = set()  # ranks to which unacknowledged messages must be sent again
        # Single operations only:
        self._dropped: collections.deque[Owned | UserFork] = collections.deque()  # filled by finalizers
        self._early: collections.deque[UserFork] = collections.deque()
        self._is_drop_planned = False  # a flush is planned that looks at `_dropped`
        self._peers = PeerKnowledge(agent)
        self._timer = FlushTimer(agent, self._on_timer)
        agent.codec.tracker = self
        agent.notices.register(_NOTICE, self._on_batch, Batch)
        agent.notices.on_cut(self._on_cut)
        agent.on_worker_lost(self._on_worker_lost)
        agent.on_worker_connected(self._on_worker_connected)
        agent.farewells.append(self._on_leave)

    def __repr__(self) -> str:
        return f"<References of {self.agent.info.name}: {self.statistics()}>"

    def holders(self) -> dict[str, int]:
        """Return how many references to values of this worker each other worker has, by name."""
        with self._lock:
            found = self._ownership.holders()
        return {self.agent.worker_info(rank).name: count for (rank, _), count in sorted(found.items())}

    @property
    def num_held(self) -> int:
        with self._lock:
            return self._ownership.num_held

    def statistics(self) -> ReferenceStatistics:
        self.take_dropped()
        with self._lock:
            return ReferenceStatistics(*self._ownership.counts, self._outbox.num_open)

    # -- what the protocol decides; the caller is in a block of `_effects` -----------------------------------------------

    def _apply(self, actions: Iterable[Action]) -> None:
        self._act(self._protocol.put(actions))

    def _act(self, actions: Iterable[LocalAction]) -> None:
        if self._outbox.has_messages:
            self._timer.plan()
        for action in actions:
            match action:
                case Free(rref_id):
                    owned = self._owned.pop(rref_id, None)
                    if owned is not None:
                        owned.is_freed = True
                        self._effects.defer(functools.partial(self._free, owned))
                case Fail(rref_id):
                    owned = self._owned.get(rref_id)
                    if owned is not None:
                        text = f"the value of reference {describe(rref_id)} was never created"
                        why = "the worker that made the call to create it cancelled the call or died"
                        error: Any = functools.partial(RRefError, f"{text}: {why}")
                        self._effects.defer(functools.partial(owned.fail, error))
                case Forget(fork_id):
                    self._forks.pop(fork_id, None)
                case Confirmed(fork_id):
                    fork = self._forks.get(fork_id)
                    if fork is not None:
                        self._effects.defer(fork.confirm)
                case Break(fork_id, reason):
                    fork = self._forks.get(fork_id)
                    if fork is not None:
                        owner = fork.owner.name
                        error = functools.partial(OwnerLost, lost_text(fork.rref_id, owner, reason), owner)
                        self._effects.defer(functools.partial(fork.end, error))

    def _free(self, owned: Owned) -> None:
        owned.free()
        if events.sink is not None:
            details = {"reference": describe(owned.rref_id), "function": owned.label}
            events.tell_now("rref", "free", self.agent.info.name, details=details)

    def _share(self, owned: Owned) -> None:
        if not owned.is_shared:
            owned.is_shared = True
            self._owned[owned.rref_id] = owned
            self._ownership.value_made(owned.rref_id)

    def _find_or_expect(self, rref_id: int) -> Owned:
        owned = self._owned.get(rref_id)
        if owned is None:
            owned = self._owned[rref_id] = Owned(rref_id, num_local=0, is_shared=True)
        return owned

    # -- values of this worker -------------------------------------------------------------------------------------

    def find(self, rref_id: int, maker: Worker | None = None) -> Owned:
        """Return a value of this worker, which `maker` may still have to make."""
        owned = self._owned.get(rref_id)
        if owned is not None:
            return owned
        with self._lock:
            if self._ownership.value_expected(rref_id, maker, maker or self.own):
                return self._find_or_expect(rref_id)
        raise RRefError(
            f"worker {self.agent.info.name} no longer has the value of reference {describe(rref_id)}: no worker held "
            f"a reference to it, or its holder was unreachable and declared lost. Create the value again"
        )

    def access_of(self, caller: Worker, rref_id: int) -> tuple[bool, bool, bool]:
        """Return whether a value is here or expected, the caller holds it or owns it, and may wait for one more value."""
        with self._lock:
            is_held = caller == self.own or self._ownership.is_holder(rref_id, caller)
            return rref_id in self._owned, is_held, self._ownership.can_expect(caller)

    def begin_making(self, rref_id: int, fork_id: int, user: Worker) -> Owned:
        """Return the value that a call will create for a worker."""
        if user == self.own:  # not found: dropped before it was made, so that no code will see it
            return self._owned.get(rref_id) or Owned(rref_id)
        if not (self._peers.may_make(user, rref_id) and creator_of(fork_id) == user[0]):
            raise DecodeError(f"rank {user[0]} requested a value on behalf of another worker: {describe(rref_id)}")
        self._see(user)
        with self._lock:
            if self._ownership.value_created(rref_id, fork_id, user):
                return self._find_or_expect(rref_id)
            can_hold = self._ownership.can_hold(user)
        name = self.agent.info.name
        if not can_hold:
            raise RRefError(
                f"rank {user[0]} holds too many references to values of worker {name}. Delete some of them first"
            )
        raise RRefError(
            f"worker {name} did not create the value of reference {describe(rref_id)}: the call was cancelled "
            "before it arrived"
        )

    def make_here(self) -> Owned:
        owned = Owned(self.new_id())
        self.share(owned)
        return owned

    def share(self, owned: Owned) -> None:
        """Make a value of this worker known to the protocol: calls are going to name it."""
        if not owned.is_shared:
            with self._lock:
                self._share(owned)

    # -- references to values elsewhere ------------------------------------------------------------------------------

    def create_fork(self, owner: WorkerAddress) -> UserFork:
        worker, rref_id, fork_id = (owner.info.id, owner.incarnation), self.new_id(), self.new_id()
        fork = UserFork(rref_id, fork_id, owner.info, worker, is_first=True, is_used=False)
        self._see(worker)
        with self._lock:
            self._forks[fork_id] = fork
            self._ownership.fork_created(rref_id, fork_id, worker)
        return fork

    def on_answered(self, state: Owned | UserFork, call: PendingCall) -> None:
        """Handle the completion of a call that creates a value; the reply may carry a copy of a small value."""
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
        with self._lock:
            actions = self._ownership.confirmed(fork.fork_id, fork.owner_life)
        if len(actions) > 1:  # it is no longer needed; messages may leave in any order, so the lock need not be held
            with self._effects:
                self._apply(actions)
        fork.confirm()

    def on_failed(self, state: Owned | UserFork, error: Exception) -> None:
        if isinstance(state, Owned):
            state.fail(copies_of(error))
            return
        with self._effects:
            # First: this error tells more than that of a broken fork.
            self._effects.defer(functools.partial(state.end, copies_of(error)))
            self._apply(self._ownership.fork_failed(state.fork_id, str(error)))

    def watch(self, fork: UserFork) -> None:
        """Have the owner's answers read until the fork is done: no call may be waiting for them."""
        peer = self.agent.peers.by_name.get(fork.owner.name)
        lane = peer.lanes.get("calls") if peer is not None else None
        if lane is not None and not fork.is_done:
            lane.reader.ensure_watched()

    def maker_of(self, fork: UserFork, deadline: float) -> Worker | None:
        """Return the worker whose call may not yet have created the value of a reference about to be used."""
        if not (fork.is_done or fork.is_first):
            owner = fork.owner.name
            what = f"reference {describe(fork.rref_id)} was not confirmed by its owner, worker {owner}"
            fork.wait(deadline, what, owner)
        fork.check()
        return None if fork.is_done else self.own

    # -- references in messages ----------------------------------------------------------------------------------------

    def fork_for(self, state: Owned | UserFork, to: str, status: TransferStatus) -> tuple[int, Worker | None]:
        """Make the fork that a message to another worker carries; return its id, and the maker if the value is expected."""
        if isinstance(state, UserFork):
            state.check()
            state.use()
        receiver = (self.agent.worker_info(to).id, self.agent.incarnation_of(to))
        child, maker, parent = self.new_id(), None, None
        self._see(receiver)
        with self._lock:
            if isinstance(state, UserFork):
                parent = state.fork_id
                maker = self._ownership.maker_of(parent)
            else:
                self._share(state)
            self._transits.add(child, status, time.monotonic())  # first, should a signal end this: `scan` needs it
            is_sent = self._ownership.sent(state.rref_id, parent, child, receiver)
            if not is_sent:
                self._transits.discard(child)
        if not is_sent:
            raise RRefError(
                f"reference {describe(state.rref_id)} was deleted on this worker and cannot be sent to worker {to}"
            )
        self._timer.plan(_ASK_S)
        return child, maker

    def receive(
        self, rref_id: int, fork_id: int, owner: Worker, sender: Worker, maker: Worker | None
    ) -> Owned | UserFork:
        """Return the state of a received reference; a broken fork if it cannot be used."""
        if sender == self.own:
            return self._receive_own(rref_id, fork_id)
        info, sender_info = self.agent.worker_info(owner[0]), self.agent.worker_info(sender[0])
        fork = UserFork(rref_id, fork_id, info, owner)
        self._see(sender)
        with self._effects:
            actions = None
            if self._peers.was_connected(sender):
                if maker is not None and owner == self.own and not self._peers.may_make(maker, rref_id):
                    maker = None
                actions = self._ownership.received(rref_id, fork_id, owner, sender, maker)
            if actions is not None:
                if owner == self.own:
                    state: Owned | UserFork = self._find_or_expect(rref_id)
                    state.num_local += 1  # for the reference that is made of it next
                elif fork_id in self._forks:  # a repeat
                    state = self._forks[fork_id]
                    state.num_local += 1
                    self._ownership.needed_again(rref_id, fork_id)
                else:
                    state = self._forks[fork_id] = fork
                self._apply(actions)
                return state
        text = f"reference {describe(rref_id)}, sent by {sender_info.name}, cannot be used"
        fork.end(lambda: OwnerLost(f"{text}: {info.name} does not have its value. Create the value again", info.name))
        return fork

    def _receive_own(self, rref_id: int, fork_id: int) -> Owned | UserFork:
        with self._lock:
            state = self._forks.get(fork_id) if fork_id else self._owned.get(rref_id)
            if state is None:
                raise RRefError(f"reference {describe(rref_id)} was deleted on this worker")
            state.num_local += 1  # for the reference that is made of it next
            self._ownership.needed_again(rref_id, fork_id)
        return state

    def on_not_sent(self, contents: dict[Any, Any]) -> None:
        with self._effects:
            for child in contents.values():
                if type(child) is int:
                    self._apply(self._ownership.not_sent(child))
                    self._transits.discard(child)

    def on_arrived(self, contents: dict[Any, Any]) -> None:
        """Handle an unpacked message with references: have their owners list them, without waiting for it."""
        if self._outbox.has_urgent:  # in a service thread: a worker that does not read must not hold the caller up
            self.agent.reactor.run_soon(self._flush_urgent)
        else:
            self._timer.plan()

    # -- the end of references -----------------------------------------------------------------------------------------

    def on_dropped(self, state: Owned | UserFork) -> None:
        """Handle that this worker's code has released a reference. Takes no lock, because finalizers call it."""
        self._dropped.append(state)
        if not self._is_drop_planned:
            self._is_drop_planned = True
            self.agent.reactor.run_soon(self._timer.plan)

    def take_dropped(self) -> None:
        self._is_drop_planned = False
        while self._dropped:
            with self._effects:
                for _ in range(_MAX_DROPPED):  # other threads want the lock as well
                    try:
                        state = self._dropped.popleft()
                    except IndexError:
                        break
                    self._take_dropped(state)

    def _take_dropped(self, state: Owned | UserFork) -> None:
        state.num_local -= 1
        if state.num_local:
            return
        if isinstance(state, UserFork):
            if not state.is_done:
                self._effects.defer(functools.partial(self.watch, state))
            self._apply(self._ownership.fork_dropped(state.fork_id))
        elif state.is_shared:
            self._apply(self._ownership.value_dropped(state.rref_id))

    def delete_all(self) -> None:
        """Delete every reference of this worker to values elsewhere, also those that its code still has."""
        self.take_dropped()
        with self._effects:
            for fork in list(self._forks.values()):
                self._apply(self._ownership.fork_dropped(fork.fork_id))
                self._effects.defer(functools.partial(fork.end, deleted(fork.rref_id)))
        self._flush()

    def _on_leave(self, deadline: float) -> None:
        """Delete this worker's references, and wait until others have deleted theirs to its values."""
        limit = min(deadline, time.monotonic() + _LEAVE_S)
        num_forks = self.statistics().num_forks
        if num_forks:
            _log.info(
                "%s is shutting down while it holds %d references to values of other workers",
                self.agent.info.name,
                num_forks,
            )
        self.delete_all()
        while holders := self.holders():
            if time.monotonic() >= limit:
                listed = ", ".join(f"{name} ({count})" for name, count in holders.items())
                text = (
                    f"worker {self.agent.info.name} shut down while other workers still held references to its "
                    f"values: {listed}"
                )
                raise RpcTimeout(
                    f"{text}. Delete them on those workers, or call shutdown there as well", next(iter(holders)), "run"
                )
            _interrupts.sleep(_LOOK_EVERY_S)

    # -- messages about references -------------------------------------------------------------------------------------

    def _on_timer(self) -> None:
        """Send waiting messages, query overdue references and resend messages that may be lost; runs in a service thread."""
        now = time.monotonic()
        self.take_dropped()
        with self._effects:
            next_scan = self._transits.next_scan(_ASK_S)
            if next_scan <= now:
                overdue, next_scan = self._transits.scan(self._ownership.children(), now, _ASK_S)
                self._apply(self._ownership.overdue(overdue))
            for rank in self._unreached:
                self._outbox.cut(rank)
            self._unreached.clear()
        self._flush()
        if next_scan < _NEVER:
            self._timer.plan(max(0.0, next_scan - time.monotonic()))

    def _flush(self) -> None:
        with self._lock:
            batches = self._outbox.take()
        self._send(batches)

    def _flush_urgent(self) -> None:
        """Send queued messages if another worker waits for them; otherwise schedule it."""
        with self._lock:
            batches = self._outbox.take() if self._outbox.has_urgent else []
            if not self._outbox.is_empty:
                self._timer.plan(_DELAY_S if self._outbox.has_messages else _ACKNOWLEDGE_S)
        self._send(batches)

    def _send(self, batches: list[Batch]) -> None:
        for batch in batches:
            if self.agent.is_closed:
                return
            rank, incarnation = batch.to
            try:
                name = self.agent.worker_info(rank).name
                if self.agent.peers.address_of(name, _SEND_S).incarnation == incarnation:
                    self.agent.notices.send(name, _NOTICE, batch, deadline=time.monotonic() + _SEND_S)
                else:
                    self._refute(batch.to)
            except (RpcTimeout, TransportError):
                self._send_again(rank, _RETRY_S)
            except (UnknownWorker, RpcError) as error:
                self._lose(batch.to, str(error))

    def _send_again(self, rank: int, delay_s: float) -> None:
        with self._lock:
            self._unreached.add(rank)
        self._timer.plan(delay_s)

    def _on_batch(self, sender: WorkerInfo, batch: Batch, _: list[torch.Tensor]) -> None:
        if batch.sender[0] != sender.id:
            raise DecodeError(f"{sender.name} sent reference messages on behalf of rank {batch.sender[0]}")
        if batch.to != self.own or batch.sender[1] != self.agent.newest_incarnation(sender.name):
            return  # for an earlier incarnation of this worker, or from one of the other
        self._see(batch.sender)
        with self._effects:
            self._act(self._protocol.batch_received(batch, self._peers))
        self._flush_urgent()

    # -- workers that are gone, or back --------------------------------------------------------------------------------

    def _on_cut(self, name: str) -> None:
        """Handle a broken connection to a live worker: resend unacknowledged messages."""
        rank = self.agent.worker_info(name).id
        self.agent.reactor.run_soon(lambda: self._send_again(rank, _DELAY_S))

    def _on_worker_lost(self, address: WorkerAddress, reason: str) -> None:
        text = f"worker {address.info.name} is lost: {reason}"
        self.agent.reactor.run_soon(lambda: self._lose((address.info.id, address.incarnation), text, is_reported=True))

    def _on_worker_connected(self, address: WorkerAddress) -> None:  # before anything is read from the connection
        worker = (address.info.id, address.incarnation)
        with self._lock:
            self._protocol.incarnation_ended((address.info.id, address.incarnation - 1))  # earlier ones cannot return
        self._see(worker)

    def _see(self, worker: Worker) -> None:
        """Handle a message from or to a worker: unless it is the worker's last, the worker is not dead."""
        if not self._ownership.is_presumed_dead(worker):
            return
        with self._effects:
            is_back = self._ownership.is_presumed_dead(worker) and not self._peers.is_gone(worker)
            if is_back:
                self._act(self._protocol.worker_seen(worker))
        if is_back:
            self.agent.reactor.run_soon(self._flush_urgent)

    def _lose(self, worker: Worker, reason: str, *, is_reported: bool = False) -> None:
        """Presume a worker dead; if `is_reported` by the agent, only if it has not reconnected in the meantime."""
        with self._lock:
            has_any = any(self._ownership.counts)
        survivors = self._peers.survivors(worker) if has_any else []
        with self._effects:
            if is_reported and not self._peers.is_gone(worker):
                self._outbox.cut(worker[0])
            else:
                self._act(self._protocol.worker_lost(worker, survivors, reason))
                if is_reported and self._peers.cannot_return(worker):
                    self._protocol.incarnation_ended(worker)
        self._flush_urgent()

    def _refute(self, worker: Worker) -> None:
        """Handle that another incarnation responds: this one ended before it ever connected, or was invented."""
        with self._effects:
            self._act(self._protocol.worker_refuted(worker, "it was restarted"))
        self._flush_urgent()


_attached: weakref.WeakSet[References] = weakref.WeakSet()
_lock = threading.Lock()  # guards _attached


def attach(agent: Agent) -> None:
    made = agent.extensions[_EXTENSION] = References(agent)
    with _lock:
        _attached.add(made)


def all_open() -> list[References]:
    """Return those of all workers of this process that are not closed."""
    with _lock:
        return [item for item in _attached if not item.agent.is_closed]


def of(agent: Agent) -> References:
    found: References = agent.extensions[_EXTENSION]
    return found


def here() -> References:
    """Return those of the worker whose call the current thread serves, or of this process."""
    request = current_request()
    return of(request.source.server.agent if request is not None else current_agent())
