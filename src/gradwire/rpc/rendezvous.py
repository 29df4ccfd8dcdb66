"""How workers that were started separately find each other.

    every rank   open the store, agree on a token, listen, publish its address
    every rank   --join--> rank 0, which answers with all addresses once all ranks have joined

The store only carries addresses. Rank 0's word counts, so what an earlier run left in a file is harmless. A rank that
restarts publishes its new incarnation and joins again; the others find it when the old one stops answering. If rank 0
itself restarts, it asks those who have met already. A rank that cannot join (wrong keys, another trust level, a name or rank
that is taken) says so in the store, and all who wait give up at once. Without `world_size` there is no meeting: workers come
and go, and are looked up by name.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

from gradwire.errors import (
    AuthenticationFailed,
    ConfigurationError,
    ConnectFailed,
    DecodeError,
    DuplicateWorker,
    GradwireError,
    IdentityTaken,
    RendezvousFailed,
)
from gradwire.rpc._calls import PendingCall
from gradwire.rpc.agent import Agent
from gradwire.rpc.fields import EncodedAddress, WorldSize
from gradwire.rpc.futures import InterruptibleFuture
from gradwire.rpc.meeting_point import MeetingPoint, MeetingPointLost
from gradwire.rpc.store_directory import StoreDirectory
from gradwire.transports import registry
from gradwire.types import WorkerAddress, WorkerInfo
from gradwire.wire.addresses import decode_address, encode_address

_LOOK_S = 0.05
_ASK_S = 2.0
_OBSTACLE_LOOK_S = 0.2
_REFUSED_S = 1.0  # what refuses for so long is rank 0 itself, not what an earlier run has left
_REFUSED_LOOK_S = 0.5  # rank 0 logs each attempt

_Addresses = list[EncodedAddress]


class Host:
    """Rank 0: answers everybody with all addresses once all ranks are there.

    Args:
        agent: The worker of rank 0.
        world_size: How many must come.
        directory: Where they are published.
    """

    def __init__(self, agent: Agent, world_size: int, directory: StoreDirectory) -> None:
        self._agent = agent
        self._world_size = world_size
        self._directory = directory
        self._lock = threading.Lock()  # guards the two fields below
        self._joined: dict[int, WorkerAddress] = {}
        self._answers: dict[int, InterruptibleFuture[Any]] = {}  # owed, by rank
        agent.server.register_control("join", self._on_join, EncodedAddress, WorldSize)

    def join(self) -> InterruptibleFuture[Any]:
        """Rank 0 joins itself."""
        return self._on_join(self._agent.info, encode_address(self._agent.address), self._world_size)

    def adopt(self, addresses: list[WorkerAddress]) -> None:
        """Take over from a worker that has met the others before this rank 0 was restarted: they need not join again.

        One worker may not speak for the others, so what it says must be what they have published.
        """
        published = {rank: self._directory.at_rank(rank) for rank in {address.info.id for address in addresses}}
        with self._lock:
            for address in addresses:
                known = published[address.info.id]
                if address.info.id != self._agent.info.id and known is not None and known.info == address.info:
                    self._joined.setdefault(address.info.id, address)
        self._answer_if_complete()

    def _on_join(self, source: WorkerInfo, raw: bytes, world_size: int) -> InterruptibleFuture[Any]:
        address = decode_address(raw, self._agent.config.limits)
        if address.info != source:
            raise DecodeError(f"{source.name} of rank {source.id} cannot join as {address.info!r}")
        if world_size != self._world_size or source.id >= world_size:
            text = f"{source.name} has world_size={world_size}, rank 0 has {self._world_size}"
            self._directory.announce("refused", f"rank {source.id} ({source.name}) cannot join: {text}")
            raise ConfigurationError(text)
        answer: InterruptibleFuture[Any] = InterruptibleFuture()
        with self._lock:
            clash = self._clash_with(address)
            if clash is None:
                self._joined[source.id] = address
                replaced, self._answers[source.id] = self._answers.get(source.id), answer
        if clash is not None:
            self._directory.announce("duplicate", clash)
            raise DuplicateWorker(clash)
        if replaced is not None:
            replaced.set_exception(RendezvousFailed(f"{source.name} has joined again"))
        self._answer_if_complete()
        return answer

    def _clash_with(self, address: WorkerAddress) -> str | None:
        name, rank = address.info.name, address.info.id
        for other in self._joined.values():
            if (other.info.name == name) != (other.info.id == rank):
                return (
                    f"worker name or rank is not unique: {other.info.name} of rank {other.info.id} and {name} of rank "
                    f"{rank}; every rank needs a name of its own and every name a rank of its own"
                )
        return None

    def _answer_if_complete(self) -> None:
        with self._lock:
            if len(self._joined) < self._world_size:
                return
            ready, self._answers = list(self._answers.values()), {}
            addresses = [encode_address(item) for item in self._joined.values()]
        with self._agent.server.answering():  # one of them is rank 0's own, and it may leave at once
            for answer in ready:
                answer.set_result(addresses)


class Meeting:
    """One worker's way into a fixed world.

    Args:
        agent: The worker, listening and published.
        directory: Where the others are published.
        point: Where they meet.
    """

    def __init__(self, agent: Agent, directory: StoreDirectory, point: MeetingPoint) -> None:
        assert point.world_size is not None
        self._agent = agent
        self._directory = directory
        # Not the point itself: it would keep the store, and its port, as long as the agent.
        self._where, self._rank, self._world_size = point.where, point.rank, point.world_size
        self._met: list[bytes] = []
        self._problem: Exception | None = None
        self._arrived: set[int] = set()
        self._next_check = 0.0  # when to look for an obstacle again
        self._refused_by = 0  # incarnation of the rank 0 that does not let this worker in
        self._refused_at = 0.0
        self._pause = threading.Event()  # never set: a wait that Ctrl-C interrupts
        agent.server.register_control("met", lambda source: self._met)

    def join(self, deadline: float) -> None:
        """Returns when every rank is there.

        Raises:
            RendezvousFailed: A rank did not arrive in time, or was refused; says which, and why.
            DuplicateWorker: Two workers have the same name or rank; all who wait are told.
            ConfigurationError: World sizes contradict each other.
        """
        own = self._host() if self._rank == 0 else None
        # Those who give up withdraw, so look who is there shortly before.
        look = deadline - 0.1 * max(0.0, deadline - time.monotonic())
        while time.monotonic() < deadline:
            answer = own or self._ask_to_join()
            self._wait_for(answer, deadline if self._arrived else look)
            if answer is not None and answer.done() and self._take(answer):
                self._directory.settle()
                return
            if time.monotonic() >= look and not self._arrived:
                self._arrived = self._published()
            try:
                self._check_obstacle()
                self._directory.check_store()
            except MeetingPointLost as error:
                if self._arrived:  # rank 0 gave up a moment before this one: it says who did not come
                    raise self._failure() from error
                raise
            self._pause.wait(_REFUSED_LOOK_S if self._refused_by else _LOOK_S)
        raise self._failure() from self._problem

    def _host(self) -> InterruptibleFuture[Any]:
        host = Host(self._agent, self._world_size, self._directory)
        answer = host.join()
        for rank in range(1, self._world_size):
            address = self._directory.at_rank(rank)
            if address is not None:
                self._directory.hint(address)
                self._ask_whether_met(host, address.info.name)
        return answer

    def _ask_whether_met(self, host: Host, name: str) -> None:
        limits = self._agent.config.limits

        def on_done(call: PendingCall) -> None:
            if call.error is None and call.value:
                with contextlib.suppress(DecodeError):
                    host.adopt([decode_address(raw, limits) for raw in call.value])

        try:
            self._agent.control(name, "met", (), _ASK_S, on_done, _Addresses)
        except GradwireError:
            return  # left from an earlier run

    def _ask_to_join(self) -> InterruptibleFuture[Any] | None:
        """Sends this worker's address to rank 0; None if rank 0 is not there or cannot be reached yet."""
        leader = self._directory.at_rank(0)
        if leader is None or leader.info.name == self._agent.info.name:  # the latter is left from an earlier run
            return None
        self._directory.hint(leader)
        answer: InterruptibleFuture[Any] = InterruptibleFuture()

        def on_done(call: PendingCall) -> None:
            if call.error is not None:
                answer.set_exception(call.error)
            else:
                answer.set_result(call.value)

        args = (encode_address(self._agent.address), self._world_size)
        try:
            self._agent.control(leader.info.name, "join", args, 0.0, on_done, _Addresses)
        except GradwireError as error:
            self._problem = error
            self._on_failure(leader, error)
            return None
        self._refused_by = 0
        return answer

    def _on_failure(self, leader: WorkerAddress, error: GradwireError) -> None:
        """This worker cannot reach rank 0: goes on trying, unless rank 0 is there and does not let it in.

        Raises:
            RendezvousFailed, DuplicateWorker: So it is; the others are told.
        """
        if not isinstance(error, AuthenticationFailed) and self._has_way_to(leader):
            self._refused_by = 0
            return
        now = time.monotonic()
        if self._refused_by != leader.incarnation:
            self._refused_by, self._refused_at = leader.incarnation, now
        elif now >= self._refused_at + _REFUSED_S:
            text = f"rank {self._rank} ({self._agent.info.name}) cannot join rank 0 ({leader.info.name}): {error}"
            is_taken = isinstance(error, IdentityTaken)
            self._directory.announce("duplicate" if is_taken else "refused", text)
            raise DuplicateWorker(text) if is_taken else RendezvousFailed(text)

    def _has_way_to(self, leader: WorkerAddress) -> bool:
        """Whether both have a transport in common; beyond one machine that takes keys."""
        try:
            registry.choose_uri(leader, self._agent.address.host, self._agent.transports)
        except ConnectFailed:
            return False
        return True

    def _wait_for(self, answer: InterruptibleFuture[Any] | None, deadline: float) -> None:
        while answer is not None and not answer.done() and time.monotonic() < deadline:
            self._pause.wait(0.002 if time.monotonic() < deadline - 5 else _LOOK_S)
            if not answer.done():
                self._check_obstacle()

    def _check_obstacle(self) -> None:
        """Looks now and then whether the world cannot become complete: then there is nothing to wait for.

        Raises:
            DuplicateWorker, RendezvousFailed: It cannot.
        """
        if time.monotonic() >= self._next_check:
            self._next_check = time.monotonic() + _OBSTACLE_LOOK_S
            self._directory.check_obstacle(self._agent.address.incarnation)

    def _take(self, answer: InterruptibleFuture[Any]) -> bool:
        """Whether the answer was everybody's addresses."""
        try:
            met: list[bytes] = answer.wait()
            addresses = [decode_address(raw, self._agent.config.limits) for raw in met]
        except ConfigurationError:
            raise
        except GradwireError as error:  # what answered was not the rank 0 of this meeting
            self._problem = error
            return False
        try:
            for address in addresses:
                self._directory.update(address)
        except IdentityTaken as error:
            raise DuplicateWorker(str(error)) from error
        self._met = met
        return True

    def _published(self) -> set[int]:
        return {rank for rank in range(self._world_size) if self._directory.at_rank(rank) is not None}

    def _failure(self) -> RendezvousFailed:
        arrived = self._arrived | self._published()
        missing = [str(rank) for rank in range(self._world_size) if rank not in arrived]
        who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}" if missing else "a rank"
        last = f" (the last attempt to join rank 0 ended with: {self._problem})" if self._problem is not None else ""
        return RendezvousFailed(
            f"{who} never arrived at {self._where}: rank {self._rank} ({self._agent.info.name}) waited for a "
            f"world of {self._world_size}. Start the missing ranks with the same init_method and world_size{last}"
        )
