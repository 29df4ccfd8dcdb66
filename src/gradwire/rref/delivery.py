"""Carries the messages about references between workers, and tells the state machine who is gone.

What another worker waits for is sent at once; acceptances and deletions leave together, a moment later; acknowledgements go
along with them, or alone after a while. A worker that does not read is written to again, and one that cannot be reached is
taken for dead until it is connected again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from gradwire.errors import DecodeError, RpcError, RpcTimeout, TransportError, UnknownWorker
from gradwire.rpc._ids import creator_of
from gradwire.rpc.agent import Agent
from gradwire.rref._actions import Worker
from gradwire.rref._outbox import Batch
from gradwire.rref.decisions import Decisions
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.messages import read_note

_log = logging.getLogger("gradwire")

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
