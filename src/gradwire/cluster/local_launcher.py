"""`Cluster.local`: its options, and workers on this machine that a fork server makes.

    driver ---- ForkWorker ----> fork server ---- fork ----> worker0, worker1, ...
       |                                                        |
       +---- lifeline, stdout, stderr, calls -------------------+

See `gradwire.cluster._forkserver` for why there is a fork server, and for what ends when one of these is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire import _interrupts
from gradwire._progress_bar import REFRESH_S, DelayedBar
from gradwire.cluster._control import (
    AdoptFolder,
    FolderMade,
    ForgetFolder,
    ForkWorker,
    MakeFolder,
    SendSignal,
    Surroundings,
    WorkerStart,
    write_start,
)
from gradwire.cluster._forkserver import borrow_fork_server, return_fork_server
from gradwire.cluster._supervisor import LocalWorker, Supervisor
from gradwire.cluster.driver import ClusterOptions, check_no_other
from gradwire.cluster.launcher import Launcher, OnLost, WorkerHandle, WorkerSpec, WorkerState, start_bar
from gradwire.cluster.monitor import Monitor
from gradwire.cluster.supervision import SupervisionOptions
from gradwire.cluster.worker import Worker
from gradwire.config import WorkerConfig
from gradwire.errors import WorkerStartFailed
from gradwire.rpc.api import set_current_agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.types import WorkerAddress

_MAX_BASE_CHARS = 40  # the path of a socket is limited to 107 bytes
_HOST = "local"
_ANY_INCARNATION = 0
_FORKS_AT_ONCE = 16  # descriptors on their way through a socket count against a limit
_TERM_TIMEOUT_S = 0.5
_KILL_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions(ClusterOptions):
    """The options of `gradwire.Cluster.local`; see there."""

    def worker_config(self) -> WorkerConfig:
        return dataclasses.replace(self.config, transports=("unix",), token=self.token)


def start_local(
    options: LocalOptions,
    supervision: SupervisionOptions = SupervisionOptions(),  # noqa: B008  (frozen)
    on_restart: Callable[[Worker], object] | None = None,
) -> tuple[Monitor, contextlib.ExitStack]:
    """Start everything, or nothing; closing the stack ends all of it at once."""
    check_no_other()
    deadline = time.monotonic() + options.start_timeout_s
    *infos, driver = options.infos()
    with _interrupts.installed(), start_bar(len(infos)) as bar, contextlib.ExitStack() as resources:
        last = resources.enter_context(contextlib.ExitStack())  # what ends after everything else
        launcher = LocalLauncher(options.start_timeout_s, bar)
        resources.callback(launcher.close)
        members = [
            WorkerAddress(info, _ANY_INCARNATION, _HOST, (f"unix://{launcher.folder / info.name}.sock",))
            for info in (*infos, driver)
        ]
        directory = StaticDirectory(members)
        directory.complete()
        config = options.worker_config()
        agent = start_worker(driver, config, directory, folder=launcher.folder)
        resources.callback(set_current_agent, None)
        resources.callback(agent.shutdown, graceful=False)
        set_current_agent(agent)
        specs = [options.spec(info, config, tuple(members)) for info in infos]
        monitor = Monitor(agent, launcher, supervision, on_restart, options.start_timeout_s)
        last.callback(monitor.close)
        resources.callback(monitor.stop)
        monitor.start(specs, max(0.0, deadline - time.monotonic()))
        return monitor, resources.pop_all()


class LocalLauncher(Launcher):
    def __init__(self, timeout_s: float = 60.0, bar: DelayedBar | None = None) -> None:
        """Have a fork server. `bar` shows that wait, and the first `start`."""
        self._first_bar = bar
        self._fork_server = borrow_fork_server(timeout_s, on_wait=self._show_import)
        self._owner_pid = os.getpid()
        self._renewal = threading.Lock()  # held while another fork server is started
        self._lock = threading.Lock()  # guards _is_closed, _workers, and which fork server and supervisor are used
        self._is_closed = False
        self._workers: list[LocalWorker] = []
        self.folder = self._make_folder()  # removed when the launcher is closed or the driver dies
        self._supervisor = Supervisor(self._fork_server)

    def _show_import(self) -> None:
        if self._first_bar is not None:
            self._first_bar.update(0, None, "importing torch")

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"fork server pid={self._fork_server.pid}"
        return f"<LocalLauncher {state}, {sum(not worker.handle.state.is_over for worker in self._workers)} workers>"

    def start(self, specs: Sequence[WorkerSpec], on_lost: OnLost, timeout_s: float) -> Sequence[WorkerHandle]:
        deadline = time.monotonic() + timeout_s
        self._renew_fork_server(deadline)
        workers: list[LocalWorker] = []

        def wait(condition: Callable[[], bool]) -> None:
            while (left_s := deadline - time.monotonic()) > 0:
                if self._supervisor.wait_until(condition, min(left_s, REFRESH_S)):
                    return
                num_running = sum(worker.handle.state is WorkerState.RUNNING for worker in workers)
                bar.update(num_running, len(specs))

        def is_room() -> bool:
            waiting = [w for w in workers if w.handle.pid is None and not w.handle.state.is_over]
            return len(waiting) < _FORKS_AT_ONCE

        with contextlib.ExitStack() as undo:
            undo.callback(lambda: self._end(workers, grace_s=0))
            bar, self._first_bar = self._first_bar or start_bar(len(specs)), None
            undo.enter_context(bar)
            try:
                for spec in specs:
                    workers.append(self._fork(spec, on_lost))
                    wait(is_room)
            except OSError as error:
                raise WorkerStartFailed(f"cannot start {spec.info.name}: {error}") from error
            wait(lambda: _are_settled(workers))
            _raise_if_not_running(workers, timeout_s)
            undo.pop_all()
        bar.stop()
        return [worker.handle for worker in workers]

    def wait_exit(self, handle: WorkerHandle, timeout_s: float) -> bool:
        return self._supervisor.wait_until(lambda: handle.state.is_over, timeout_s)

    def terminate(self, handles: Sequence[WorkerHandle], grace_s: float) -> bool:
        """Ask workers to leave; after the time of grace come SIGTERM, then SIGKILL.

        A worker that is there even after that, because it hangs in the kernel for instance, ends when it finds its lifeline
        closed. The end of the fork server, with `close`, takes it along at the latest.
        """
        with self._lock:
            workers = [worker for worker in self._workers if worker.handle in handles]
        return self._end(workers, grace_s)

    def _end(self, workers: Sequence[LocalWorker], grace_s: float) -> bool:
        self._supervisor.expect_end_of(workers, ask=grace_s > 0)
        steps = [(None, grace_s), (signal.SIGTERM, _TERM_TIMEOUT_S), (signal.SIGKILL, _KILL_TIMEOUT_S)]
        for signum, timeout_s in steps if grace_s > 0 else steps[-1:]:
            if signum is not None:
                self._signal(workers, signum)
            if self._supervisor.wait_until(lambda: all(w.handle.state.is_over for w in workers), timeout_s):
                return True
        self._supervisor.give_up(worker for worker in workers if not worker.handle.state.is_over)
        return False

    def describe(self) -> str:
        return (
            f"processes on this machine, forked by process {self._fork_server.pid}; their sockets are in {self.folder}"
        )

    def close(self) -> None:
        """Kill every worker and remove the folder; keep the fork server. Idempotent."""
        with self._lock:
            is_copy = os.getpid() != self._owner_pid  # a process that the driver forked must not end its workers
            if self._is_closed or is_copy:
                return
            self._is_closed = True
            workers = tuple(self._workers)
        is_clean = False
        try:
            is_over = not self._fork_server.is_alive or self._end(workers, grace_s=0)
            is_clean = self._supervisor.close(_STOP_TIMEOUT_S) and is_over
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # the fork server is gone
                self._fork_server.send(ForgetFolder(str(self.folder)))
            self._give_up_fork_server(is_clean)

    def _give_up_fork_server(self, is_clean: bool) -> None:
        """Keep the fork server for the next launcher if it is as good as new."""
        if is_clean and self._fork_server.is_alive:
            return_fork_server(self._fork_server)
        else:
            self._fork_server.close(force=True)

    def _renew_fork_server(self, deadline: float) -> None:
        """Start another fork server if the first one was killed.

        Raises:
            WorkerStartFailed: That is not possible.
        """
        if self._supervisor.can_fork:
            return
        if not _interrupts.acquire(self._renewal, max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))):
            raise WorkerStartFailed(
                "the fork server was killed, and its replacement was not ready in time; raise start_timeout_s (or "
                "timeout, for add_workers)"
            )
        try:
            old_server, old_supervisor = self._fork_server, self._supervisor
            if old_supervisor.can_fork:
                return  # another thread was faster
            # The thread of the supervisor tells of each worker's end first.
            if not old_supervisor.wait_until(lambda: old_supervisor.has_ended, max(0.0, deadline - time.monotonic())):
                raise WorkerStartFailed(
                    "the fork server was killed, and its workers did not exit in time; raise start_timeout_s (or "
                    "timeout, for add_workers)"
                )
            if not self.folder.is_dir():
                raise WorkerStartFailed(
                    f"the fork server exited, and {self.folder} no longer exists; start another cluster"
                )
            with contextlib.ExitStack() as undo:
                server = borrow_fork_server(max(0.0, deadline - time.monotonic()))
                undo.callback(server.close, force=True)
                server.send(AdoptFolder(str(self.folder)))
                with self._lock:
                    if self._is_closed:
                        raise WorkerStartFailed("no worker was started: the cluster is closed")
                    self._fork_server, self._supervisor = server, Supervisor(server)
                undo.pop_all()
            old_supervisor.close(_STOP_TIMEOUT_S)
            old_server.close(force=True)
        except OSError as error:
            raise WorkerStartFailed(
                f"the fork server was killed, and its replacement cannot be started: {error}"
            ) from error
        finally:
            self._renewal.release()

    def _make_folder(self) -> Path:
        base = tempfile.gettempdir()
        answer = None
        with contextlib.suppress(OSError):  # the fork server has just ended
            self._fork_server.send(MakeFolder(base if len(base) <= _MAX_BASE_CHARS else "/tmp"))
            answer = self._fork_server.receive()
        if isinstance(answer, FolderMade) and answer.path:
            return Path(answer.path)
        self._give_up_fork_server(is_clean=answer is not None)  # else the answer may still come
        reason = answer.error if isinstance(answer, FolderMade) else "the fork server exited"
        raise WorkerStartFailed(f"cannot create a folder for the workers' sockets: {reason}")

    def _fork(self, spec: WorkerSpec, on_lost: OnLost) -> LocalWorker:
        start = WorkerStart(spec, str(self.folder), Surroundings.capture(spec.environment))
        with contextlib.ExitStack() as sent:
            fds = [write_start(start)]
            sent.callback(os.close, fds[0])
            worker = LocalWorker(spec.info, on_lost)
            for fd in worker.make_pipes():
                sent.callback(os.close, fd)
                fds.append(fd)
            with self._lock:
                if self._is_closed:
                    worker.close()
                    raise WorkerStartFailed(f"{spec.info.name} was not started: the cluster is closed")
                self._workers = [*(item for item in self._workers if not item.handle.state.is_over), worker]
                fork_server, supervisor = self._fork_server, self._supervisor
            supervisor.watch(worker)
            fork_server.send(ForkWorker(worker.ticket), tuple(fds))
        if self._is_closed:  # `close` may have ended it before there was a process
            self._signal([worker], signal.SIGKILL)
        return worker

    def _signal(self, workers: Sequence[LocalWorker], signum: int) -> None:
        for worker in workers:
            if not worker.handle.state.is_over:
                with contextlib.suppress(OSError):  # the fork server is gone, and so are they
                    self._fork_server.send(SendSignal(worker.ticket, signum))


def _are_settled(workers: Sequence[LocalWorker]) -> bool:
    """Return whether there is nothing to wait for: all are ready, or one has failed."""
    return all(map(_is_ready, workers)) or any(worker.handle.state.is_over for worker in workers)


def _is_ready(worker: LocalWorker) -> bool:
    # Its `Listening` may arrive before the fork server's `WorkerForked`.
    return worker.handle.state is WorkerState.RUNNING and worker.handle.pid is not None


def _raise_if_not_running(workers: Sequence[LocalWorker], timeout_s: float) -> None:
    for worker in workers:
        if worker.handle.state.is_over:
            name, reason = worker.handle.info.name, worker.handle.exit_reason
            raise WorkerStartFailed(f"{name} exited before it was ready ({reason}). {_printed(worker)}")
    late = [worker for worker in workers if not _is_ready(worker)]
    if late:
        names = ", ".join(worker.handle.info.name for worker in late)
        raise WorkerStartFailed(
            f"not ready after {timeout_s:g} s: {names}; raise start_timeout_s (or timeout, for add_workers). "
            f"{_printed(late[0])}"
        )


def _printed(worker: LocalWorker) -> str:
    name, text = worker.handle.info.name, worker.output.kept()
    return f"{name} printed:\n{text}" if text else f"{name} printed nothing."
