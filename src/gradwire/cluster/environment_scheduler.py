"""`Cluster.from_env`: one program, started on every rank by a launcher; rank 0 is the driver, the others are workers.

    rank 0          Cluster.from_env() returns, the block runs
    other ranks     Cluster.from_env() serves until the driver exits, and then exits the process

Where all ranks share a machine, the channel between them is a folder that no other user can write to. Across machines it
is torch's store at MASTER_ADDR:MASTER_PORT, which others may write to as well; so each message has to be proven, by a
shared secret or by certificates (`gradwire.cluster.message_auth`). Without either, several machines are refused: nothing
listens beyond loopback before it is known who may come in.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NoReturn

from msgspec import Meta

from gradwire import _interrupts
from gradwire.cluster.driver import DRIVER, check_no_other
from gradwire.cluster.environment import LaunchEnvironment, detect
from gradwire.cluster.kv_store import FolderStore, KeyValueStore, TorchStore, make_private_folder
from gradwire.cluster.message_auth import KEYS_FOLDER, SECRET_FILE, CertificateAuth, MessageAuth, NoAuth, read_secret
from gradwire.cluster.network_address import ELSEWHERE, address_towards
from gradwire.cluster.remote_launcher import RemoteOptions, start_remote
from gradwire.cluster.remote_worker import RemoteWorker
from gradwire.cluster.scheduler import RemoteProcess
from gradwire.cluster.store_exchange import DriverExchange, ExchangeProcess, Hello, WorkerExchange
from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, ConfigurationError, RendezvousFailed, WorkerStartFailed
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent
from gradwire.transports.registry import host_identity
from gradwire.transports.tcp import is_loopback
from gradwire.transports.tls import keys_for
from gradwire.types import WorkerInfo
from gradwire.wire.exceptions import clean

_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.1
_FAIL_S = 2.0
_TELL_S = 1.0
_TELL_WHY_S = 3.0  # for ranks that wait
_LONGER_S = 10.0  # how much longer than the driver the others wait: its error names the missing ranks
_MAX_TEXT_BYTES = 4096
_REFUSED = "refused"
_Text = Annotated[str, Meta(max_length=_MAX_TEXT_BYTES)]

FAILED = "cluster.failed"
"""The operation with which the driver tells workers that its program failed."""


def choose_auth(
    environment: LaunchEnvironment, tls: TlsKeys | None, environ: Mapping[str, str] | None = None
) -> MessageAuth | None:
    """Return how messages between ranks are authenticated; None if they share a machine and need no authentication.

    Raises:
        ConfigurationError: The ranks are on several machines and have neither keys nor a secret, or those cannot be used.
    """
    env = os.environ if environ is None else environ
    if environment.is_one_host:
        return None
    if tls is not None:
        return CertificateAuth(tls)
    if folder := env.get(KEYS_FOLDER):
        return CertificateAuth(keys_for(folder))
    if file := env.get(SECRET_FILE):
        return read_secret(file)
    if environment.shares_machine:
        return None
    host = environment.master[0] if environment.master else "?"
    raise ConfigurationError(
        f"rank {environment.rank} runs on {socket.gethostname()}, but rank 0 runs on {host}: workers on several machines "
        f"must authenticate each other. {_PROOF_HINT}"
    )


_PROOF_HINT = (
    f"Give every rank the same secret ({SECRET_FILE}=<file readable only by you>) or keys ({KEYS_FOLDER}=<folder of "
    "make_keys>, or tls=); create them with `gradwire keys secret` or `gradwire keys init`"
)


def open_store(environment: LaunchEnvironment, auth: MessageAuth | None, deadline: float) -> KeyValueStore:
    """Open the channel between the ranks.

    Raises:
        ConfigurationError: The folder cannot be used, or rank 0 cannot listen.
        RendezvousFailed: Rank 0 does not listen at its address.
    """
    if auth is None:
        digest = hashlib.sha256(environment.topic.encode()).hexdigest()[:16]
        folder = Path(tempfile.gettempdir(), f"gradwire-{os.geteuid()}-{digest}")
        return FolderStore(make_private_folder(folder) if environment.rank == 0 else folder)
    assert environment.master is not None  # else they share a machine
    host, port = environment.master
    where = f"tcp://{host}:{port}"
    prefix = f"gradwire/{environment.topic}"
    if environment.serves_store and environment.rank == 0:
        return TorchStore(_serve_store(host, port, deadline), where, prefix)
    return TorchStore(_connect_store(host, port, deadline), where, prefix)


def open_refusals(environment: LaunchEnvironment, deadline: float) -> KeyValueStore | None:
    """Open the launcher's own store, where ranks on other machines without a proof report that; None if there is none.

    Rank 0 cannot serve one for that: without a proof nothing listens beyond loopback. Nothing else is read from it.
    """
    if environment.is_one_host or environment.serves_store or environment.master is None:
        return None
    host, port = environment.master
    try:
        store = _connect_store(host, port, min(deadline, time.monotonic() + _TELL_S))
    except RendezvousFailed:
        return None
    return TorchStore(store, f"tcp://{host}:{port}", f"gradwire/{environment.topic}")


def tell_refused(environment: LaunchEnvironment, reason: str) -> None:
    """Let rank 0 know that this rank does not come, where the launcher has a store; else rank 0 waits until its deadline."""
    store = open_refusals(environment, time.monotonic() + _TELL_S)
    if store is not None:
        with contextlib.suppress(RendezvousFailed):
            store.set(_REFUSED, reason.encode()[:_MAX_TEXT_BYTES])
        store.close()


def _serve_store(host: str, port: int, deadline: float) -> Any:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # A machine whose name means loopback to itself has to listen everywhere for the others to reach it.
        bind_host = "" if is_loopback(str(address[0])) and not is_loopback(host) else str(address[0])
        fd = socket.create_server((bind_host, port), family=family, backlog=1024).detach()
    except OSError as error:
        raise ConfigurationError(
            f"rank 0 cannot listen at {host}:{port}: {error.strerror or error}; set MASTER_ADDR to the name of its host and "
            "MASTER_PORT to a free port, the same on every rank"
        ) from error
    return _make_store(host, port, True, deadline, fd)


def _connect_store(host: str, port: int, deadline: float) -> Any:
    while True:  # unlike the store's own wait, Ctrl-C interrupts this one
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return _make_store(host, port, False, deadline, None)
        except (OSError, RuntimeError) as error:
            if time.monotonic() >= deadline:
                raise RendezvousFailed(
                    f"timed out waiting for the store at tcp://{host}:{port}: {error}; check that address (MASTER_ADDR and "
                    "MASTER_PORT, or GRADWIRE_MASTER), or raise start_timeout_s"
                ) from error
            _interrupts.sleep(_LOOK_S)


def _make_store(host: str, port: int, is_server: bool, deadline: float, fd: int | None) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    left = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    return TCPStore(host, port, None, is_server, left, wait_for_workers=False, master_listen_fd=fd)


class EnvironmentScheduler:
    """The other ranks, as seen by rank 0. They are there already, and the launcher above sees to them.

    Args:
        environment: What the launcher says.
        store: What all ranks reach.
        auth: How messages are proven; None where all ranks share a machine.
        refusals: Where ranks without a proof say that they are on another machine.
    """

    def __init__(
        self,
        environment: LaunchEnvironment,
        store: KeyValueStore,
        auth: MessageAuth | None,
        refusals: KeyValueStore | None = None,
    ) -> None:
        self._environment = environment
        self._refusals = refusals
        self._store = store
        self._is_one_host = auth is None
        self._exchange = DriverExchange(store, environment.topic, auth or NoAuth(), "rank")
        self._processes: list[RankProcess] = []

    def launch(self, count: int, deadline: float, replaces: RemoteProcess | None = None) -> Sequence[RankProcess]:
        launcher = self._environment.launcher
        if self._processes:
            raise ConfigurationError(
                f"{launcher} owns the processes of this cluster, so the cluster cannot add or restart workers. Let the "
                "launcher restart all ranks (torchrun --max-restarts), or use Cluster.ray or Cluster.slurm"
            )
        assert count == self._environment.world_size - 1
        try:
            hellos = self._exchange.wait_hellos(range(1, self._environment.world_size), deadline, self._check_refusals)
        except WorkerStartFailed as error:
            if not self._is_one_host or self._environment.is_one_host:
                raise
            raise WorkerStartFailed(f"{error}. If they are on other machines: {_PROOF_HINT}") from error
        if self._is_one_host:
            self._check_one_host(hellos)
        self._processes = [
            RankProcess(self._exchange, rank, hello, place=f"rank {rank} of {launcher}")
            for rank, hello in hellos.items()
        ]
        return self._processes

    def bind_host(self) -> str:
        if self._environment.master is None or self._is_one_host:
            return _LOOPBACK
        host, _ = self._environment.master
        address = address_towards(host)
        # The name of a machine may mean loopback to itself, where the others do not find it.
        return address_towards(ELSEWHERE) if is_loopback(address) and not is_loopback(host) else address

    def describe(self) -> str:
        """Return the line that `Cluster.from_env` prints."""
        environment = self._environment
        num_hosts = len({process.hello.host for process in self._processes} | {host_identity()})
        restarts = f", restart {environment.restart}" if environment.restart else ""
        workers, hosts = environment.world_size - 1, f"{num_hosts} host{'s' if num_hosts > 1 else ''}"
        return (
            f"{workers} worker{'s' if workers > 1 else ''} on {hosts} from {environment.launcher}, run id "
            f"{environment.run_id or '-'}{restarts}; rank 0 of {environment.world_size} is the driver"
        )

    def give_up(self, reason: str) -> None:
        """Tell the waiting ranks why there will be no cluster, and give them time to read it."""
        with contextlib.suppress(RendezvousFailed):  # the store is gone
            over = {process.number for process in self._processes if process.end_reason() is not None}
            others = [rank for rank in range(1, self._environment.world_size) if rank not in over]
            self._exchange.give_up(reason, others, _TELL_WHY_S)

    def close(self) -> None:
        """Release the other ranks: the launcher stops them, or they exit without a driver."""
        for process in self._processes:
            process.close()

    def settle(self) -> None:
        """Let go of the channel: the workers are connected, or there will be none."""
        self._store.close()
        if isinstance(self._store, FolderStore):
            self._store.remove()
        if self._refusals is not None:
            self._refusals.close()

    def _check_refusals(self, missing: set[int]) -> None:
        if self._refusals is not None and (raw := self._refusals.get(_REFUSED)) is not None:
            raise ConfigurationError(clean(raw.decode("utf-8", "replace"), _MAX_TEXT_BYTES))

    def _check_one_host(self, hellos: Mapping[int, Hello]) -> None:
        for rank, hello in hellos.items():
            if hello.host != host_identity():
                raise AuthenticationFailed(
                    f"rank {rank} ({hello.host_name}) shares a folder with the driver ({socket.gethostname()}), but is on "
                    f"another machine or in another network namespace: set {SECRET_FILE} or {KEYS_FOLDER} on every rank"
                )


class RankProcess(ExchangeProcess):
    """A rank started by the launcher, which treats killing it as a failure of the whole program."""

    def kill(self) -> None:
        """Release it: it exits by itself when the driver releases it, or when it loses the driver."""
        self._is_released = True

    def end_reason(self) -> str | None:
        return super().end_reason() or ("it is managed by its launcher" if self._is_released else None)

    _is_released = False


def start_from_env(make_options: Callable[[int], RemoteOptions], tls: TlsKeys | None) -> Any:
    """Implement `gradwire.Cluster.from_env`: in rank 0 return the result of `start_remote`, in others serve and exit.

    Args:
        make_options: Makes the options for a number of workers.
        tls: Keys for messages between machines.
    """
    environment = detect()
    if environment.world_size == 1:
        raise ConfigurationError(
            f"{environment.launcher} started a single rank, which is the driver, and no workers: start at least two ranks"
        )
    try:
        options = make_options(environment.world_size - 1)
        deadline = time.monotonic() + options.start_timeout_s
        try:
            auth = choose_auth(environment, tls)
        except ConfigurationError as error:
            tell_refused(environment, str(error))
            raise
        store = open_store(environment, auth, deadline)
        if environment.rank != 0:
            check_no_other()
            serve_rank(environment, store, auth, deadline + _LONGER_S)
        refusals = open_refusals(environment, deadline) if auth is None else None
        return _start_driver(EnvironmentScheduler(environment, store, auth, refusals), options)
    except Exception as error:
        record_error(error)
        raise


def _start_driver(scheduler: EnvironmentScheduler, options: RemoteOptions) -> Any:
    reason: str | None = "it was interrupted"
    try:
        started = start_remote(scheduler, options)
        reason = None
    except Exception as error:
        reason = str(error)
        raise
    finally:
        try:
            if reason is not None:
                scheduler.give_up(reason)
        finally:
            scheduler.settle()
    print(f"gradwire: {scheduler.describe()}", file=sys.stderr, flush=True)
    return started


def serve_rank(
    environment: LaunchEnvironment, store: KeyValueStore, auth: MessageAuth | None, deadline: float
) -> NoReturn:
    """Serve as a worker until the driver exits, then exit the process.

    Raises:
        SystemExit: With code 0 after the driver has released this worker; 1 if the driver failed, aborted or was lost.
    """
    worker = RemoteWorker(local_index=environment.rank, shares_output=True)
    failures: list[str] = []

    def handle(message: bytes) -> bytes:
        answer = worker.handle(message)
        if worker.info is not None:  # before the driver knows that this worker listens
            _note_failures(current_agent(), failures)
        return answer

    who, reason = f"rank {environment.rank}", None
    with _ignoring_ctrl_c():
        try:
            exchange = WorkerExchange(store, environment.topic, environment.rank, auth or NoAuth())
            exchange.serve(handle, lambda: worker.has_driver, deadline)
            if worker.info is not None:
                who += f" ({worker.info.name})"
            store.close()
            if (lost_reason := worker.serve()) is not None:
                reason = f"the driver was lost: {lost_reason}"
            elif failures:
                reason = f"the program failed in rank 0: {failures[0]}"
        except RendezvousFailed as error:
            reason = str(error)
    if reason is None:
        raise SystemExit(0)
    _interrupts.sleep(_FAIL_S)  # a launcher reports what fails first, and that should be the driver
    failed = RendezvousFailed(f"{who} is exiting: {reason}")
    record_error(failed)
    print(f"gradwire: {failed}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def _note_failures(agent: Agent, failures: list[str]) -> None:
    """Let the driver tell this worker that its program failed."""

    def on_failed(source: WorkerInfo, text: str) -> None:
        if source.name != DRIVER:
            raise AuthenticationFailed(f"only {DRIVER} may send this to {agent.info.name}, not {source.name}")
        failures.append(clean(text, _MAX_TEXT_BYTES))

    agent.server.register_control(FAILED, on_failed, _Text)


def tell_failed(agent: Agent, error: BaseException) -> None:
    """Tell the workers that the driver's program failed, before they are let go: they fail as well, each for its launcher.

    A launcher that restarts a program does so where ranks fail; a machine whose ranks all succeed would be done.
    """
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    text = f"{type(error).__name__}: {error}"[:_MAX_TEXT_BYTES]
    names = [info.name for info in agent.directory.infos() if info.name != agent.info.name]
    agent.ask_all(names, FAILED, (text,), _TELL_S, None)


def record_error(error: Exception) -> None:
    """Write an error where torchrun looks for it, so that its report includes the text."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and not os.path.exists(file):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        try:
            raise error  # the handler takes the traceback from the error that is being handled
        except Exception as raised:
            with contextlib.suppress(OSError):
                get_error_handler().record_exception(raised)


@contextlib.contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Leave Ctrl-C to the driver: a terminal sends it to every rank, and the driver stops the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
