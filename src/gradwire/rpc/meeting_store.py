"""The store through which separately started workers exchange a token, their addresses and a note.

`MeetingStore` is the interface. `TorchStore` uses one of torch's stores: a file, or a TCP service without encryption or
authentication, for one machine. `gradwire.rpc.secure_store` serves it over TLS, for several machines.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from gradwire import _interrupts
from gradwire.config import Limits
from gradwire.errors import ConfigurationError, DecodeError, RendezvousFailed, ResourceExhausted
from gradwire.transports.tcp import is_loopback
from gradwire.types import WorkerAddress
from gradwire.wire.messages import decode_address, encode_address

T = TypeVar("T")

LOOK_S = 0.05
"""How often to poll for an entry that does not exist yet."""

ANSWER_S = 2.0
"""How long a store may take to respond while a call waits for it."""

ADDRESS_LIMITS = Limits(name_bytes=1024)
"""Maximum size of a store's contents."""

START_RANK_0 = "Start rank 0, or check init_method (MASTER_ADDR and MASTER_PORT) on both ranks"
"""Advice in errors of ranks that did not find rank 0."""

_OPEN_S = 2.0  # for one attempt to open torch's client, which cannot be interrupted
_PREFIX = "gradwire"


class MeetingPointLost(RendezvousFailed):
    """The store does not respond or no longer exists; until all workers have met, it may be opened again."""


class MeetingStore(Protocol):
    """The store of a cluster's rendezvous. Every method raises `MeetingPointLost` if the store does not respond.

    Attributes:
        is_served_here: Whether this process serves the store, which then ends with it.
    """

    is_served_here: bool

    def agree_on_token(self) -> bytes:
        """Return one secret for all workers that meet here."""

    def publish(self, address: WorkerAddress) -> None:
        """Let the others find this worker by its name and its rank.

        Raises:
            IdentityTaken: The name or rank belongs to another worker.
        """

    def find(self, worker: str | int) -> WorkerAddress | None:
        """Return the address published under a name or a rank.

        Raises:
            ConfigurationError: The entry is not a valid address.
        """

    def names(self) -> list[str]:
        """Return the names of all that have published themselves."""

    def announce(self, note: str) -> None:
        """Leave a note for all who meet here, in place of the last one."""

    def note(self) -> tuple[str, float]:
        """Return the last note and its age in seconds; an empty one if there is none."""

    def withdraw(self, rank: int) -> None:
        """Record that a rank knows that there will be no meeting."""

    def has_withdrawn(self, rank: int) -> bool:
        """Return whether a rank has recorded that."""

    def refusals(self) -> str:
        """Return the refused connections as text; empty if there were none or they are not known here."""

    def rest(self) -> None:
        """Hold no connection until the next question; this worker has met the others."""

    def leave(self) -> None:
        """Release the store and its port, and remove this worker from a store that outlives it. Idempotent."""


class TorchStore:
    """A `MeetingStore` on top of one of torch's stores.

    torch's operations cannot be interrupted and may block for long, so each runs in its own thread.

    Args:
        store: torch's store.
        where: Its address, for error messages.
        timeout_s: Timeout of an operation until `rest` is called.
        is_served_here: See `MeetingStore`.
        outlives_workers: Whether it is a file.
        reopen: Opens the store again for a query after `rest`. The process that serves it may exit before this one, and a
            client used after that prints C++ stack traces, so none is kept open.
    """

    def __init__(
        self,
        store: Any,
        where: str,
        timeout_s: float,
        *,
        is_served_here: bool = False,
        outlives_workers: bool = False,
        reopen: Callable[[], Any] | None = None,
    ) -> None:
        self.is_served_here = is_served_here
        self._where = where
        self._timeout_s = timeout_s
        self._outlives_workers = outlives_workers
        self._reopen = reopen
        self._is_resting = False
        self._is_left = False
        self._published: WorkerAddress | None = None
        self._turn = threading.Lock()  # held while a thread uses the store; guards `_store`
        self._store = store
        self._is_stuck = False  # whether an operation timed out and is still running: others need not wait for it

    def agree_on_token(self) -> bytes:
        token = secrets.token_hex(32)  # the first worker chooses
        return self._ask(lambda store: bytes(store.compare_set(f"{_PREFIX}/token", "", token)))

    def publish(self, address: WorkerAddress) -> None:
        info, raw = address.info, encode_address(address)

        def put(store: Any) -> None:
            is_new = not _get(store, f"name/{info.name}")
            store.set(f"{_PREFIX}/name/{info.name}", raw)
            store.set(f"{_PREFIX}/rank/{info.id}", raw)
            if is_new:
                index = store.add(f"{_PREFIX}/members", 1)
                store.set(f"{_PREFIX}/member/{index}", info.name)

        self._published = address  # before it: an operation that times out may still be done
        self._ask(put)

    def find(self, worker: str | int) -> WorkerAddress | None:
        key = f"name/{worker}" if isinstance(worker, str) else f"rank/{worker}"
        raw = self.read(key)
        try:
            return decode_address(raw, ADDRESS_LIMITS) if raw else None
        except DecodeError as error:
            raise ConfigurationError(
                f"the store at {self._where} has no valid address under {_PREFIX}/{key}: {error}"
            ) from error

    def names(self) -> list[str]:
        def look(store: Any) -> list[str]:
            num_members = store.add(f"{_PREFIX}/members", 0)
            return [_get(store, f"member/{index}").decode() for index in range(1, num_members + 1)]

        return self._ask(look)

    def announce(self, note: str) -> None:
        self.write("obstacle", f"{time.time_ns()}:{note}".encode())

    def note(self) -> tuple[str, float]:
        stamp, _, note = self.read("obstacle").decode(errors="replace").partition(":")
        return (note, (time.time_ns() - int(stamp)) / 1e9) if stamp.isdecimal() else ("", 0.0)

    def withdraw(self, rank: int) -> None:
        self.write(f"withdrawn/{rank}", b"1")

    def has_withdrawn(self, rank: int) -> bool:
        return bool(self.read(f"withdrawn/{rank}"))

    def refusals(self) -> str:
        return ""

    def read(self, key: str) -> bytes:
        """Return the value of a key; empty if there is none."""
        return self._ask(lambda store: _get(store, key))

    def write(self, key: str, value: bytes) -> None:
        self._ask(lambda store: store.set(f"{_PREFIX}/{key}", value))

    def rest(self) -> None:
        self._timeout_s, self._is_resting = ANSWER_S, True
        self._drop_if_unused()

    def leave(self) -> None:
        """Release the store, and remove the worker from a file, unless another one has taken its name or rank there.

        A server is not notified: it may exit at the same moment, for which torch would print C++ stack traces. A worker
        that looks for this one finds that nothing listens at its address.
        """
        published = self._published
        if self._outlives_workers and not self._is_left and published is not None:
            raw = encode_address(published)

            def take_back(store: Any) -> None:
                for key in (f"name/{published.info.name}", f"rank/{published.info.id}"):
                    store.compare_set(f"{_PREFIX}/{key}", raw, b"")

            with contextlib.suppress(MeetingPointLost):
                self._ask(take_back)
        self._is_left = True
        self._drop_if_unused()

    def _drop_if_unused(self) -> None:
        if self._turn.acquire(False):  # else the thread that uses it drops it
            self._drop()
            self._turn.release()

    def _drop(self) -> None:
        if self._is_left or (self._is_resting and self._reopen is not None):
            self._store = None

    def _ask(self, operation: Callable[[Any], T]) -> T:
        deadline = time.monotonic() + self._timeout_s
        while not self._turn.acquire(timeout=max(0.0, min(LOOK_S, deadline - time.monotonic()))):
            _interrupts.deliver()
            if self._is_stuck or time.monotonic() >= deadline:
                raise self._lost("it is not responding")

        def run() -> T:
            try:
                if self._is_left:
                    raise self._lost("this worker has shut down")
                if self._store is None:
                    assert self._reopen is not None
                    self._store = self._reopen()
                return operation(self._store)
            finally:
                self._is_stuck = False
                self._drop()
                self._turn.release()

        try:
            return run_in_thread(run, deadline)
        except ResourceExhausted as error:
            self._turn.release()
            raise self._lost(str(error)) from error
        except TimeoutError as error:
            self._is_stuck = self._turn.locked()
            raise self._lost("it is not responding") from error
        except RendezvousFailed:
            raise
        except (RuntimeError, ValueError, OSError) as error:  # torch's own
            raise self._lost(str(error)) from error

    def _lost(self, reason: str) -> MeetingPointLost:
        return MeetingPointLost(f"lost the meeting point {self._where}: {reason}")


def run_in_thread(function: Callable[[], T], deadline: float) -> T:
    """Run a function that cannot be interrupted; Ctrl-C and the deadline end the wait for it, not the function.

    Raises:
        ResourceExhausted: No thread can be started.
        TimeoutError: The function has not returned by the deadline.
    """
    done, results, errors = threading.Event(), list[T](), list[Exception]()

    def run() -> None:
        try:
            results.append(function())
        except Exception as error:  # raised in the thread that waits
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="gradwire-store", daemon=True).start()
    except RuntimeError as error:
        raise ResourceExhausted(f"cannot start a thread: {error}") from error
    if not _interrupts.wait(done, max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    if errors:
        raise errors[0]
    return results[0]


def _get(store: Any, key: str) -> bytes:
    full = f"{_PREFIX}/{key}"
    return bytes(store.get(full)) if store.check([full]) else b""  # `get` alone would wait for it


def open_file_store(path: str, where: str, timeout_s: float) -> TorchStore:
    return TorchStore(FileStore(path, -1), where, timeout_s, outlives_workers=True)


def serve_tcp_store(host: str, port: int, timeout_s: float) -> TorchStore:
    """Serve torch's TCP store.

    Raises:
        RendezvousFailed: It cannot be served there.
    """
    where, timeout = f"tcp://{host}:{port}", timedelta(seconds=timeout_s)
    descriptor = _listen(host, port) if is_loopback(host) else None
    try:
        store = TCPStore(host, port, None, True, timeout, False, multi_tenant=True, master_listen_fd=descriptor)
        return TorchStore(store, where, timeout_s, is_served_here=True)
    except (RuntimeError, ValueError) as error:
        raise RendezvousFailed(
            f"rank 0 cannot open the meeting point at {where}: {error}. If the port is in use, choose another one"
        ) from error


def open_tcp_store(host: str, port: int, rank: int, timeout_s: float, *, is_hosted: bool = False) -> TorchStore:
    """Wait for torch's TCP store that rank 0 serves, or a launcher if `is_hosted`, and return it.

    Raises:
        RendezvousFailed: It does not appear in time, or requires keys.
    """
    where, deadline = f"tcp://{host}:{port}", time.monotonic() + timeout_s

    def open_client(timeout_s: float) -> Any:
        timeout = timedelta(seconds=max(0.1, timeout_s))
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False, multi_tenant=True)

    def reopen() -> Any:
        socket.create_connection((host, port), timeout=1.0).close()  # torch's client would try again and again
        return open_client(ANSWER_S)

    while True:
        _wait_for_server(host, port, deadline)
        left_s = deadline - time.monotonic()
        try:
            store = run_in_thread(lambda: open_client(min(_OPEN_S, left_s)), time.monotonic() + 2 * _OPEN_S)  # noqa: B023
            store.set_timeout(timedelta(seconds=max(0.1, left_s)))
            return TorchStore(store, where, timeout_s, reopen=reopen)
        except (RuntimeError, ValueError, TimeoutError, ResourceExhausted) as error:
            if time.monotonic() >= deadline:
                what, advice = "rank 0 never arrived", START_RANK_0
                if is_hosted:
                    what = "the launcher's store never answered"
                    advice = "Check MASTER_ADDR and MASTER_PORT, and that the launcher is still running"
                text = f"{what}: rank {rank} waited for it at {where} for {timeout_s:g} s. {advice}"
                raise RendezvousFailed(text) from error
            if _speaks_tls(host, port):
                raise RendezvousFailed(
                    f"rank 0 serves the meeting point {where} with TLS, but rank {rank} has no keys; pass tls= to every "
                    f"rank or to none"
                ) from error


def _listen(host: str, port: int) -> int | None:
    """Return a descriptor that listens only on loopback; by default, the store would listen on all interfaces.

    None if the port is in use: by another store of this process, which is then shared, or by another program, which the
    store reports.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024).detach()
    except OSError:
        return None


def _wait_for_server(host: str, port: int, deadline: float) -> None:
    """Return when a server listens there or time is over; unlike the store's own wait, Ctrl-C interrupts it."""
    while time.monotonic() < deadline:
        try:
            _connect(host, port).close()
            return
        except OSError:
            _interrupts.sleep(LOOK_S)


@_interrupts.interruptible
def _connect(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=1.0)


@_interrupts.interruptible
def _speaks_tls(host: str, port: int) -> bool:
    """Return whether the server at that address speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with _connect(host, port) as sock, context.wrap_socket(sock):
            return True
    except OSError:  # includes ssl errors: no keys are presented here, but that fails only after TLS has started
        return False
