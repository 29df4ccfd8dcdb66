"""Messages between a driver and the processes that a launcher started, through a key-value store.

    driver                                           process k
    round = <random>                 ------->
                                     <-------        <round>.<k>.hello
    <round>.<k>.request.0            ------->
                                     <-------        <round>.<k>.reply.0
    ...
    <round>.closed = <why>           ------->        if the driver aborts
                                     <-------        <round>.<k>.left

A store may outlive a run, or be used by the next round of it (torchrun starts all ranks again when one fails). What counts
is the round that the driver has made: a process that finds a new one says hello again, and what is left from an old one
is not looked at. Each message is proven (`gradwire.cluster.message_auth`) for its round, process, direction and place in
the order, and requests besides for the hello they answer; so none can be replayed. `left` is not: it only ends a wait.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec

from gradwire import _interrupts
from gradwire.cluster.kv_store import KeyValueStore
from gradwire.cluster.message_auth import MessageAuth
from gradwire.errors import AuthenticationFailed, RendezvousFailed, WorkerStartFailed
from gradwire.transports.registry import host_identity

_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.2
_NAMED = 8  # number of processes listed in an error
_DRIVER = -1


class Hello(msgspec.Struct, frozen=True):
    """Introduction of a process when it arrives."""

    host: str  # identity of the machine
    host_name: str
    pid: int
    pid_space: int  # which processes its number counts among: a container may count its own
    nonce: bytes
    auth: str  # how it proves its messages

    @classmethod
    def make(cls, auth: MessageAuth) -> Hello:
        nonce = secrets.token_bytes(16)
        return cls(host_identity(), socket.gethostname(), os.getpid(), _pid_space(), nonce, auth.name)


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    body: bytes
    proof: bytes


class _Statement(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    round: str
    process: int
    kind: str
    number: int
    nonce: bytes
    body: bytes


_envelopes = msgspec.msgpack.Decoder(_Envelope)
_hellos = msgspec.msgpack.Decoder(Hello)


class _Post:
    """Reads and writes proven messages of one run."""

    def __init__(self, store: KeyValueStore, topic: str, auth: MessageAuth) -> None:
        self.store = store
        self._topic = topic
        self._auth = auth

    def send(self, key: str, kind: str, process: int, number: int, nonce: bytes, body: bytes) -> None:
        round_id = key.partition(".")[0]
        proof = self._auth.sign(self._statement(round_id, process, kind, number, nonce, body))
        self.store.set(key, msgspec.msgpack.encode(_Envelope(body, proof)))

    def receive(self, key: str, kind: str, process: int, number: int, nonce: bytes) -> bytes | None:
        raw = self.store.get(key)
        if raw is None:
            return None
        try:
            envelope = _envelopes.decode(raw)
            round_id = key.partition(".")[0]
            self._auth.verify(self._statement(round_id, process, kind, number, nonce, envelope.body), envelope.proof)
        except msgspec.MsgspecError as error:
            raise AuthenticationFailed(f"it is not a gradwire message: {error}") from error
        return envelope.body

    def _statement(self, round_id: str, process: int, kind: str, number: int, nonce: bytes, body: bytes) -> bytes:
        return msgspec.msgpack.encode(_Statement(self._topic, round_id, process, kind, number, nonce, body))


class DriverExchange:
    """The driver's side, for all processes of one run.

    Args:
        store: The store that all of them use.
        topic: Identifies this run; the same in all processes.
        auth: How messages are authenticated.
        noun: Word for a process in errors, e.g. ``rank``.
    """

    def __init__(self, store: KeyValueStore, topic: str, auth: MessageAuth, noun: str) -> None:
        self._post = _Post(store, topic, auth)
        self._auth = auth
        self._noun = noun
        self._round = secrets.token_hex(8)
        self._hellos: dict[int, Hello] = {}
        self._num_requests: dict[int, int] = {}  # by process; each has one exchange at a time
        store.set("round", self._round.encode())

    def wait_hellos(
        self, processes: Iterable[int], deadline: float, check: Callable[[set[int]], None] = lambda missing: None
    ) -> Mapping[int, Hello]:
        """Wait until all of these processes have arrived, and return their introductions.

        Args:
            processes: Their numbers.
            deadline: In seconds of `time.monotonic`.
            check: Called repeatedly with the missing ones; may raise.

        Raises:
            WorkerStartFailed: Some did not arrive; the message lists them.
            AuthenticationFailed: One cannot prove that it belongs to this run.
        """
        wanted = list(processes)
        pause = _Pause(deadline)
        while missing := {process for process in wanted if process not in self._hellos}:
            for process in missing:
                self._look_for(process)
            missing -= set(self._hellos)
            if not missing:
                break
            check(missing)
            if not pause():
                raise WorkerStartFailed(self._missing_text(missing, len(wanted)))
        return {process: self._hellos[process] for process in wanted}

    def exchange(
        self, process: int, message: bytes, deadline: float, check: Callable[[], None] = lambda: None
    ) -> bytes:
        """Send a message to a process that has arrived, and return its reply.

        Args:
            process: Its number.
            message: The message that `WorkerExchange.serve` passes to its handler.
            deadline: In seconds of `time.monotonic`.
            check: Called repeatedly while there is no reply; may raise.

        Raises:
            TimeoutError: There is no reply by the deadline.
            AuthenticationFailed: The reply cannot be trusted.
        """
        number = self._num_requests.get(process, 0)
        self._num_requests[process] = number + 1
        nonce = self._hellos[process].nonce
        self._post.send(f"{self._round}.{process}.request.{number}", "request", process, number, nonce, message)
        pause = _Pause(deadline)
        while True:
            answer = self._receive(f"{self._round}.{process}.reply.{number}", "reply", process, number, nonce)
            if answer is not None:
                return answer
            check()
            if not pause():
                raise TimeoutError(f"{self._describe(process)} is not responding")

    def give_up(self, reason: str, processes: Iterable[int] = (), timeout_s: float = 0.0) -> None:
        """Tell all waiting processes that the driver has aborted.

        Args:
            reason: Why.
            processes: Numbers of the processes that get time to read it, if they have arrived.
            timeout_s: How much time they get.
        """
        self._post.send(f"{self._round}.closed", "closed", _DRIVER, 0, b"", reason.encode())
        store, pause = self._post.store, _Pause(time.monotonic() + timeout_s)
        for process in processes:
            key = f"{self._round}.{process}"
            while store.get(f"{key}.hello") is not None and store.get(f"{key}.left") is None:
                if not pause():
                    return

    def _look_for(self, process: int) -> None:
        raw = self._receive(f"{self._round}.{process}.hello", "hello", process, 0, b"")
        if raw is not None:
            try:
                self._hellos[process] = _hellos.decode(raw)
            except msgspec.MsgspecError as error:
                raise AuthenticationFailed(
                    f"the hello of {self._noun} {process} is not a gradwire message: {error}"
                ) from error

    def _receive(self, key: str, kind: str, process: int, number: int, nonce: bytes) -> bytes | None:
        try:
            return self._post.receive(key, kind, process, number, nonce)
        except AuthenticationFailed as error:
            raise AuthenticationFailed(
                f"a message from {self._describe(process)} cannot be trusted: {error} (the driver uses {self._auth.name})"
            ) from error

    def _describe(self, process: int) -> str:
        hello = self._hellos.get(process)
        return f"{self._noun} {process}" + (f" (pid {hello.pid} on {hello.host_name})" if hello else "")

    def _missing_text(self, missing: set[int], num_wanted: int) -> str:
        names = ", ".join(str(process) for process in sorted(missing)[:_NAMED])
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        return (
            f"{self._noun}{'s' if len(missing) > 1 else ''} {names}{more} never arrived at {self._post.store.where}: the "
            f"driver expected {num_wanted} {self._noun}{'s' if num_wanted > 1 else ''}"
        )


class ExchangeProcess:
    """A process that has arrived, as `gradwire.cluster.scheduler.RemoteProcess` wants it.

    One on this machine is watched and can be ended through a pidfd, which no later process can take over.
    """

    def __init__(self, exchange: DriverExchange, number: int, hello: Hello, place: str) -> None:
        self.number = number
        self.hello = hello
        self.place = place
        self._exchange = exchange
        self._lock = threading.Lock()  # guards _pidfd
        self._pidfd: int | None = None
        self._is_over = False
        if self.is_here and hello.pid_space == _pid_space():
            try:
                self._pidfd = os.pidfd_open(hello.pid)
            except OSError:
                self._is_over = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number} pid={self.hello.pid} on {self.hello.host_name}>"

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine."""
        return self.hello.host == host_identity()

    def exchange(self, message: bytes, deadline: float) -> bytes:
        return self._exchange.exchange(self.number, message, deadline, self._check)

    def end_reason(self) -> str | None:
        with self._lock:
            if self._pidfd is not None and not self._is_over:
                poll = select.poll()
                poll.register(self._pidfd, select.POLLIN)
                self._is_over = bool(poll.poll(0))
            return f"its process {self.hello.pid} exited" if self._is_over else None

    def kill(self) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching it. Idempotent."""
        with self._lock:
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None

    def _check(self) -> None:
        if (reason := self.end_reason()) is not None:
            raise WorkerStartFailed(reason)


class WorkerExchange:
    """The side of one process."""

    def __init__(self, store: KeyValueStore, topic: str, process: int, auth: MessageAuth) -> None:
        self._post = _Post(store, topic, auth)
        self._process = process
        self._auth = auth
        self._round = ""
        self._hello = Hello.make(auth)
        self._number = 0
        self._is_taken = False  # whether another process has said hello under this number in this round
        self._old_reason: str | None = None  # why the driver had aborted before this process arrived

    def serve(self, handle: Callable[[bytes], bytes], is_done: Callable[[], bool], deadline: float) -> None:
        """Answer requests of the driver until `is_done`.

        Raises:
            RendezvousFailed: The driver has aborted, or has not made this process a worker by the deadline.
            AuthenticationFailed: The sender cannot prove that it is the driver of this run.
        """
        try:
            pause = _Pause(deadline)
            while not is_done():
                self._follow_round()
                if self._round and not self._is_taken and self._answer_next(handle):
                    pause = _Pause(deadline)
                elif not pause():
                    raise RendezvousFailed(self._late_text())
        except RendezvousFailed:
            if not is_done():  # else the driver removed the store because all is done
                raise

    def _follow_round(self) -> None:
        raw = self._post.store.get("round")
        if raw is None:
            if self._round:
                raise RendezvousFailed(f"the driver left {self._post.store.where} without giving a reason")
            return
        found = raw.decode("ascii", "replace")
        if found == self._round or not (found.isalnum() and len(found) <= 64):
            return
        self._round, self._number, self._hello = found, 0, Hello.make(self._auth)
        # A driver that aborted before this process arrived may belong to an earlier round: the next one starts its own.
        self._old_reason = self._closed()
        # So may a process of this number that has said hello; or it is a second one, which the driver will not speak to.
        self._is_taken = self._post.store.get(f"{found}.{self._process}.hello") is not None
        if self._is_taken:
            return
        body = msgspec.msgpack.encode(self._hello)
        self._post.send(f"{found}.{self._process}.hello", "hello", self._process, 0, b"", body)

    def _answer_next(self, handle: Callable[[bytes], bytes]) -> bool:
        key = f"{self._round}.{self._process}.request.{self._number}"
        request = self._receive(key, "request", self._process, self._number, self._hello.nonce)
        if request is None:
            reason = self._closed()
            if reason is not None and self._old_reason is None:
                with contextlib.suppress(RendezvousFailed):  # the driver did not wait
                    self._post.store.set(f"{self._round}.{self._process}.left", b"1")
                raise RendezvousFailed(f"the driver aborted the start: {reason}")
            return False
        reply = f"{self._round}.{self._process}.reply.{self._number}"
        self._post.send(reply, "reply", self._process, self._number, self._hello.nonce, handle(request))
        self._number += 1
        return True

    def _closed(self) -> str | None:
        raw = self._receive(f"{self._round}.closed", "closed", _DRIVER, 0, b"")
        return None if raw is None else raw.decode("utf-8", "replace")

    def _receive(self, key: str, kind: str, process: int, number: int, nonce: bytes) -> bytes | None:
        try:
            return self._post.receive(key, kind, process, number, nonce)
        except AuthenticationFailed as error:
            raise AuthenticationFailed(
                f"a message from the driver cannot be trusted: {error} (this process uses {self._auth.name})"
            ) from error

    def _late_text(self) -> str:
        if self._old_reason is not None:
            return f"the driver aborted the start: {self._old_reason}"
        if self._is_taken:
            return (
                f"another process with the same rank or task number ({self._process}) has arrived at "
                f"{self._post.store.where}: start each only once"
            )
        if not self._round:
            return (
                f"the driver never arrived at {self._post.store.where}; start it, or check that all processes use the same "
                "address or folder"
            )
        return (
            f"the driver did not make this process a worker in time (at {self._post.store.where}); the driver's output may "
            "say why"
        )


def _pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class _Pause:
    """Waits a little between two looks, longer each time; False when time is over."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._next_s = _FIRST_LOOK_S

    def __call__(self) -> bool:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            return False
        _interrupts.sleep(min(self._next_s, left_s))
        self._next_s = min(2 * self._next_s, _LAST_LOOK_S)
        return True
