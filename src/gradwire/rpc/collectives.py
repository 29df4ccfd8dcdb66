"""Collective operations: all-gather, barrier, and the agreement to shut down.

The worker with the lowest rank collects. Each worker sends it one control call, and it replies when all calls have
arrived:

    worker1 --gather(names, value1)--> worker0 <--gather(names, value2)-- worker2
            <------- {all values} ----         ----- {all values} ----->

A worker joins the oldest open round of its group that it has not joined yet. Rounds are not numbered, so a worker that
restarted or timed out is in step again with its next call.

A round fails if one of its workers is lost. Rounds of a shutdown skip it instead, and wait for it again if it is back: the
collector decides, so that all agree on who takes part. If the collector itself is lost, each worker asks the next one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradwire import _interrupts
from gradwire.errors import (
    ConfigurationError,
    DecodeError,
    LimitExceeded,
    RpcTimeout,
    UnknownWorker,
    WorkerLost,
)
from gradwire.observe.log import get_logger
from gradwire.rpc.codec import EVERY_WORKER
from gradwire.rpc.functions import Codec, Group, WorkerName
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.types import Seconds, WorkerInfo

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_log = get_logger(__name__)
_LOOK_S = 0.02
_LONGEST_PAUSE_S = 0.2  # between attempts to find the worker that collects
_SEE_OFF_S = 2.0
_MAX_ROUNDS = 64  # collectives that one worker may have open at the same time

Entry = tuple[int, bytes, list[torch.Tensor]]
"""A packed value: codec, body, tensors."""

_ANSWER = dict[WorkerName, tuple[Codec, bytes, list[torch.Tensor]]]


class _Round:
    """One gathering, on the worker that collects."""

    def __init__(self, names: Sequence[str], skips_lost: bool) -> None:
        self.names = names
        self.skips_lost = skips_lost
        self.entries: dict[str, Entry] = {}
        # Deadline and the answer owed, by worker.
        self.answers: dict[str, tuple[float, InterruptibleFuture[Any]]] = {}

    def missing(self, lost: Container[str]) -> list[str]:
        """Return the workers to wait for."""
        return [name for name in self.names if name not in self.entries and not (self.skips_lost and name in lost)]


class Gathering:
    """This worker's part in gatherings."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._lock = threading.Lock()  # guards _rounds, the rounds in it and _lost
        self._rounds: list[_Round] = []
        self._lost: dict[str, str] = {}
        agent.server.register_control("gather", self._on_gather, Group, Codec, bytes, list[torch.Tensor], Seconds, bool)
        agent.on_worker_lost(lambda address, reason: self._on_worker_lost(address.info.name, reason))

    def all_gather(
        self, value: Any, names: Sequence[str] | None, deadline: float, *, skips_lost: bool = False
    ) -> dict[str, Any]:
        agent = self._agent
        group = sorted(set(names)) if names else sorted(info.name for info in agent.directory.infos())
        if agent.info.name not in group:
            raise ConfigurationError(
                f"{agent.info.name} is not one of the workers in this all-gather: {', '.join(group)}"
            )
        began = time.monotonic()
        packed = agent.codec.pack(value, EVERY_WORKER)
        if time.monotonic() >= deadline:
            text = (
                f"{agent.info.name} timed out in _all_gather after {deadline - began:.2f} seconds while "
                "serializing its value"
            )
            raise RpcTimeout(f"RPC ran for more than set timeout: {text}", agent.info.name, "send")
        timeout_s = max(0.001, deadline - time.monotonic()) if deadline < float("inf") else 0.0
        args = (group, packed.codec, packed.body, packed.tensors, timeout_s, skips_lost)
        collector = self._living_collector(group) if skips_lost else self._collector(group)
        if collector == agent.info.name:
            future = self._on_gather(agent.info, *args)
        else:  # the collector knows which workers are missing, so its error should come first
            future = agent.ask(collector, "gather", args, timeout_s + 0.5 if timeout_s else 0.0, _ANSWER)
        answer = future.wait()
        if sorted(answer) != group and not (skips_lost and agent.info.name in answer and set(answer) < set(group)):
            raise DecodeError(f"{collector} returned values for {', '.join(answer)}, expected {', '.join(group)}")
        return {
            name: agent.codec.unpack(codec, body, tensors, EVERY_WORKER)
            for name, (codec, body, tensors) in answer.items()
        }

    def _collector(self, names: Sequence[str]) -> str:
        return min((self._agent.directory.find(name).info for name in names), key=lambda info: info.id).name

    def _living_collector(self, names: Sequence[str]) -> str:
        return self._collector([name for name in names if not self._agent.has_ended(name)])

    def _on_gather(
        self,
        source: WorkerInfo,
        names: list[str],
        codec: int,
        body: bytes,
        tensors: list[torch.Tensor],
        timeout_s: float,
        skips_lost: bool,
    ) -> InterruptibleFuture[Any]:
        answer: InterruptibleFuture[Any] = InterruptibleFuture()
        deadline = time.monotonic() + timeout_s if timeout_s else float("inf")
        self._check_group(source.name, names, skips_lost)
        with self._lock:
            # Under the lock: `on_returned` either finds the round, or has made this worker see that another one collects.
            if skips_lost and (collector := self._living_collector(names)) != self._agent.info.name:
                raise WorkerLost(f"worker {collector} collects the agreement to shut down", collector)
            self._check_room(source.name, len(body) + sum(tensor.nbytes for tensor in tensors))
            gathering = self._round_for(source.name, names, skips_lost)
            gathering.entries[source.name] = (codec, body, tensors)
            gathering.answers[source.name] = (deadline, answer)
            missing = gathering.missing(self._lost)
            lost = next(((name, self._lost[name]) for name in missing if name in self._lost), None)
            if not missing:
                self._rounds.remove(gathering)
        if not missing:
            self._complete(gathering)
        elif lost is not None:
            self._on_worker_lost(*lost)
        elif skips_lost:
            self._find_lost(missing)
        self._agent.reactor.expect(deadline)
        return answer

    def _complete(self, gathering: _Round) -> None:
        for _, waiting in gathering.answers.values():
            waiting.set_result(gathering.entries)

    def _find_lost(self, names: Sequence[str]) -> None:
        """Look for workers that died without a connection to this one, which a shutdown would wait for."""
        with contextlib.suppress(UnknownWorker):
            for name in names:
                if name != self._agent.info.name:
                    self._agent.liveness.connection_ended(self._agent.directory.find(name))

    def _check_group(self, worker: str, names: list[str], skips_lost: bool) -> None:
        own = self._agent.info.name
        if names != sorted(set(names)) or worker not in names or own not in names:
            raise ConfigurationError(
                f"{worker} cannot gather on {own}: both must be in the list of workers, each listed once"
            )
        if self._agent.directory.is_fixed:
            unknown = set(names) - {info.name for info in self._agent.directory.infos()}
            if unknown and skips_lost and not self._agent.directory.is_complete:
                raise WorkerLost(f"worker {own} was restarted and has not joined the others yet", own)
            if unknown:
                raise ConfigurationError(f"{worker} cannot gather with unknown workers: {', '.join(sorted(unknown))}")
        elif skips_lost:
            raise ConfigurationError("workers that may join and leave do not shut down together")

    def _check_room(self, worker: str, num_bytes: int) -> None:
        """Limit the memory that one worker can make this one hold; the caller holds the lock."""
        held = [item.entries[worker] for item in self._rounds if worker in item.entries]
        limit = self._agent.config.limits.frame_bytes
        if len(held) >= _MAX_ROUNDS:
            raise LimitExceeded(f"{worker} already takes part in {len(held)} collectives that wait for other workers")
        if num_bytes + sum(len(body) + sum(tensor.nbytes for tensor in values) for _, body, values in held) > limit:
            raise LimitExceeded(f"the values of {worker} in open collectives exceed Limits.frame_bytes ({limit:,})")

    def _round_for(self, worker: str, names: list[str], skips_lost: bool) -> _Round:
        for gathering in self._rounds:
            is_same = gathering.names == names and gathering.skips_lost == skips_lost
            if is_same and worker not in gathering.entries:
                return gathering
        self._rounds.append(_Round(names, skips_lost))
        return self._rounds[-1]

    def _on_worker_lost(self, name: str, reason: str) -> None:
        failed: list[InterruptibleFuture[Any]] = []
        complete: list[_Round] = []
        with self._lock:
            if self._agent.has_ended(name):  # not if it has reconnected: see `on_returned`
                self._lost[name] = reason
            for gathering in [item for item in self._rounds if name in item.names]:
                if not gathering.skips_lost:
                    failed.extend(answer for _, answer in gathering.answers.values())
                else:
                    gathering.entries.pop(name, None)
                    if owed := gathering.answers.pop(name, None):
                        failed.append(owed[1])  # if the worker is back already, it asks again
                    if gathering.answers and gathering.missing(self._lost):
                        continue
                    complete.append(gathering)
                self._rounds.remove(gathering)
        with self._agent.server.answering():  # one of them may be this worker's own, which may then leave at once
            for gathering in complete:
                self._complete(gathering)
            for answer in failed:
                text = f"worker {name} is lost and cannot take part (in a barrier or _all_gather): {reason}"
                answer.set_exception(WorkerLost(text, name))

    def on_returned(self, name: str) -> None:
        """Clear the lost flag of a worker that has reconnected; late reports of its loss no longer count.

        If this worker collects a shutdown in its place, the others ask the one that is back.
        """
        if self._agent.is_leaving:  # all have agreed already
            return
        own = self._agent.info.name
        with self._lock:
            self._lost.pop(name, None)
            rounds = [item for item in self._rounds if item.skips_lost and self._living_collector(item.names) != own]
            self._rounds = [item for item in self._rounds if item not in rounds]
        error = WorkerLost(f"worker {name} is back, and collects the agreement to shut down", name)
        for answer in [answer for item in rounds for _, answer in item.answers.values()]:
            self._agent.reactor.run_soon(partial(answer.set_exception, error))

    def sweep(self, now: float) -> float:
        """End collectives whose deadline has passed and return when to check again."""
        wanted = float("inf")
        late: list[tuple[InterruptibleFuture[Any], list[str]]] = []
        with self._lock:
            for gathering in list(self._rounds):
                gone = {name: item for name, item in gathering.answers.items() if item[0] <= now}
                for name in gone:  # a worker that timed out is no longer part of the round
                    del gathering.answers[name], gathering.entries[name]
                missing = [name for name in gathering.missing(self._lost) if name not in gone]
                late += [(answer, missing) for _, answer in gone.values()]
                if not gathering.answers:
                    self._rounds.remove(gathering)
                wanted = min([wanted, *(deadline for deadline, _ in gathering.answers.values())])
        for answer, missing in late:
            names = ", ".join(missing)
            text = (
                f"these workers did not make the same call (barrier, _all_gather or shutdown) in time: {names}; check that "
                "all workers make these calls in the same order, or pass a larger timeout"
            )
            error = RpcTimeout(text, names, "run")
            self._agent.reactor.run_soon(partial(answer.set_exception, error))  # it is sent; the clock must not wait
        return wanted

    def wait_all_quiet(self, deadline: float) -> None:
        """Wait until every worker that is alive has called this and no call is in progress on any worker."""
        agent, before = self._agent, None
        if not agent.directory.is_fixed:  # workers may join and leave: only this one's own calls matter
            self._wait_quiet(deadline)
            return
        while True:
            self._wait_quiet(deadline)
            counts = self._gather_living((agent.client.num_made, agent.server.num_served), deadline)
            if counts == before:
                return
            before = counts

    def agree_to_leave(self, deadline: float) -> set[tuple[str, int]]:
        """Wait until every worker that is alive shuts down and has nothing left to do.

        A process that has left may start its next worker at once, which must not join this world. So there is one more
        round: each worker stops letting others in before it enters that round, and none leaves before all have entered it.

        Returns:
            On the collector the names and incarnations of the other workers, for `see_off`; elsewhere nothing.
        """
        self.wait_all_quiet(deadline)
        agent = self._agent
        if not agent.directory.is_fixed:
            return set()
        agent.is_leaving = True
        incarnations = self._connected()  # no worker has left yet; later incarnations belong to another world
        group = self._gather_living(None, deadline)
        if skipped := sorted({info.name for info in agent.directory.infos()} - set(group)):
            _log.warning("%s is shutting down without lost workers: %s", agent.info.name, ", ".join(skipped))
        if self._collector(list(group)) != agent.info.name:
            return set()
        return {(name, incarnation) for name, incarnation in incarnations if name in group}

    def _gather_living(self, value: Any, deadline: float) -> dict[str, Any]:
        pause_s = _LOOK_S
        while True:
            try:
                return self.all_gather(value, None, deadline, skips_lost=True)
            except WorkerLost as error:  # the collector is lost, or another worker collects
                lost = error
            self._find_lost([lost.worker])
            _interrupts.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            if time.monotonic() >= deadline:
                text = f"{self._agent.info.name} and the other workers did not agree to shut down in time: {lost}"
                raise RpcTimeout(f"RPC ran for more than set timeout: {text}", lost.worker, "run") from lost

    def see_off(self, others: set[tuple[str, int]], deadline: float) -> None:
        """Wait a moment until the other workers have left, so that the collector's answers reach all of them.

        The collector waits last: the others do not leave before it has deleted its references to their values.
        """
        limit = min(deadline, time.monotonic() + _SEE_OFF_S)
        while not others.isdisjoint(self._connected()) and time.monotonic() < limit:
            _interrupts.sleep(0.002)

    def _connected(self) -> set[tuple[str, int]]:
        """Return the names and incarnations of the workers that are connected to this one."""
        return {(lane.info.name, lane.address.incarnation) for lane in self._agent.server.control_lanes()}

    def _wait_quiet(self, deadline: float) -> None:
        while not self._agent.is_quiet:
            if time.monotonic() >= deadline:
                name, num_made = self._agent.info.name, self._agent.client.num_pending
                raise RpcTimeout(
                    f"timed out in rpc.shutdown: calls of worker {name} are still in progress (made: {num_made}, served: "
                    f"{len(self._agent.server.requests())}); pass a larger timeout, or graceful=False",
                    name,
                    "run",
                )
            _interrupts.sleep(_LOOK_S)
