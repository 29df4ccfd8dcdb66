"""Workers on this machine, forked from a template process.

    driver ---- ForkWorker ----> template ---- fork ----> worker0, worker1, ...
       |                                                     |
       +---- lifeline, stdout, stderr, calls ----------------+

See `gradwire.cluster._forkserver` for why there is a template, and for who ends whom when one of these is killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gradwire.cluster._control import (
    FolderMade,
    ForgetFolder,
    ForkWorker,
    MakeFolder,
    SendSignal,
    Surroundings,
    WorkerStart,
    write_start,
)
from gradwire.cluster._forkserver import borrow_template, return_template
from gradwire.cluster._supervisor import LocalHandle, Supervisor, make_channels
from gradwire.cluster.launcher import OnLost, WorkerHandle, WorkerSpec, WorkerState
from gradwire.cluster.options import LocalOptions
from gradwire.errors import ConfigurationError, NotInitialized, WorkerStartFailed
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent, find_import, guard_hint, reserved_for, set_current_agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.types import WorkerAddress, WorkerInfo

_FORKS_AT_ONCE = 16  # descriptors on their way through a socket count against a limit
_TERM_TIMEOUT_S = 0.5
_KILL_TIMEOUT_S = 3.0
_STOP_TIMEOUT_S = 2.0
_MAX_BASE_CHARS = 40  # the path of a socket has 107 bytes, and names of workers need most of them

_tickets = itertools.count(1)  # unique in this process: a template outlives a launcher


class LocalLauncher:
    """Starts workers on this machine. A `gradwire.cluster.launcher.Launcher`.

    Attributes:
        folder: Where the workers listen. Private to this user; removed when the launcher is closed or the driver dies.
    """

    def __init__(self, timeout_s: float = 60.0) -> None:
        """Gets a template process ready.

        Args:
            timeout_s: How long the template may take to import torch.

        Raises:
            ConfigurationError: This platform cannot fork.
            WorkerStartFailed: The template could not be started.
        """
        self._template = borrow_template(timeout_s)
        self._owner_pid = os.getpid()
        self._lock = threading.Lock()  # guards _is_closed
        self._is_closed = False
        self._handles: list[LocalHandle] = []
        try:
            self.folder = self._make_folder()
        except BaseException as error:
            self._give_up_template(is_clean=isinstance(error, WorkerStartFailed))
            raise
        self._supervisor = Supervisor(self._template)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"template pid={self._template.pid}"
        return f"<LocalLauncher {state}, {sum(not handle.state.is_over for handle in self._handles)} workers>"

    def start(self, specs: Sequence[WorkerSpec], on_lost: OnLost, timeout_s: float) -> Sequence[LocalHandle]:
        """Forks one worker for each spec and waits until all of them listen.

        Args:
            specs: The workers.
            on_lost: Called in the supervisor's thread for each that was ready and ends without being asked to.
            timeout_s: Time for all of them together.

        Raises:
            WorkerStartFailed: One ended first, or `timeout_s` passed; the message carries what it printed. The
                launcher is then of no more use: close it.
        """
        deadline = time.monotonic() + timeout_s
        handles: list[LocalHandle] = []
        try:
            for spec in specs:
                handles.append(self._fork(spec, on_lost))
                self._wait(lambda: sum(_is_unborn(handle) for handle in handles) < _FORKS_AT_ONCE, deadline)
        except OSError as error:
            raise WorkerStartFailed(f"cannot start {spec.info.name}: {error}") from error
        self._wait(lambda: _are_settled(handles), deadline)
        _raise_if_not_running(handles, timeout_s)
        return handles

    def wait_exit(self, handle: WorkerHandle, timeout_s: float) -> bool:
        """Waits until that worker's process is gone; False if it is still there after `timeout_s`."""
        return self._supervisor.wait_until(lambda: handle.state.is_over, timeout_s)

    def terminate(self, handles: Sequence[WorkerHandle], grace_s: float) -> None:
        """Asks workers to leave, and ends by force those that are still there after `grace_s`.

        After the time of grace comes SIGTERM, then SIGKILL, then the end of the template, after which the kernel
        kills what is left; so it works, too, for a worker that holds the interpreter's lock or ignores signals.
        """
        wanted = {handle.info.name for handle in handles}
        mine = [handle for handle in self._handles if handle.info.name in wanted]
        self._supervisor.expect_end_of(mine, tell=grace_s > 0)
        if grace_s > 0:
            if self._wait_ended(mine, grace_s):
                return
            self._signal(mine, signal.SIGTERM)
            if self._wait_ended(mine, _TERM_TIMEOUT_S):
                return
        self._signal(mine, signal.SIGKILL)
        if not self._wait_ended(mine, _KILL_TIMEOUT_S):
            self._template.close(force=True)

    def close(self) -> None:
        """Ends every worker at once and removes the folder; keeps the template. May be called again."""
        with self._lock:
            is_copy = os.getpid() != self._owner_pid  # a process that the driver forked must not end its workers
            if self._is_closed or is_copy:
                return
            self._is_closed = True
        try:
            if self._template.is_alive:
                self.terminate(self._handles, grace_s=0)
            is_clean = self._supervisor.close(_STOP_TIMEOUT_S)
        except BaseException:
            self._template.close(force=True)
            raise
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the template is gone
            self._template.send(ForgetFolder(str(self.folder)))
        self._give_up_template(is_clean)

    def _give_up_template(self, is_clean: bool) -> None:
        """Keeps the template for the next launcher if it is as good as new."""
        if is_clean and self._template.is_alive:
            return_template(self._template)
        else:
            self._template.close(force=True)

    def _make_folder(self) -> Path:
        base = tempfile.gettempdir()
        answer = None
        with contextlib.suppress(OSError):  # the template has just ended
            self._template.send(MakeFolder(base if len(base) <= _MAX_BASE_CHARS else "/tmp"))
            answer = self._template.receive()
        if isinstance(answer, FolderMade) and answer.path:
            return Path(answer.path)
        reason = answer.error if isinstance(answer, FolderMade) else "the template process ended"
        raise WorkerStartFailed(f"cannot make a folder for the workers' sockets: {reason}")

    def _fork(self, spec: WorkerSpec, on_lost: OnLost) -> LocalHandle:
        channels, theirs = make_channels()
        handle = LocalHandle(spec.info, next(_tickets), channels, on_lost)
        with contextlib.ExitStack() as sent:
            for fd in theirs:
                sent.callback(os.close, fd)
            start_fd = write_start(self._start_of(spec))
            sent.callback(os.close, start_fd)
            self._handles.append(handle)
            self._supervisor.watch(handle)
            self._template.send(ForkWorker(handle.ticket), (start_fd, *theirs))
        return handle

    def _start_of(self, spec: WorkerSpec) -> WorkerStart:
        return WorkerStart(
            info=spec.info,
            config=spec.config,
            addresses=spec.addresses,
            num_threads=spec.num_threads,
            imports=spec.imports,
            socket_folder=str(self.folder),
            surroundings=Surroundings.capture(spec.environment),
        )

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        return self._supervisor.wait_until(condition, max(0.0, deadline - time.monotonic()))

    def _wait_ended(self, handles: Sequence[LocalHandle], timeout_s: float) -> bool:
        return self._supervisor.wait_until(lambda: all(handle.state.is_over for handle in handles), timeout_s)

    def _signal(self, handles: Sequence[LocalHandle], signum: int) -> None:
        for handle in handles:
            if not handle.state.is_over:
                with contextlib.suppress(OSError):  # the template is gone, and so are they
                    self._template.send(SendSignal(handle.ticket, signum))


def _is_unborn(handle: LocalHandle) -> bool:
    return handle.pid is None and not handle.state.is_over


def _are_settled(handles: Sequence[LocalHandle]) -> bool:
    """Whether there is nothing to wait for: all are ready, or one has failed."""
    states = {handle.state for handle in handles}
    return states <= {WorkerState.RUNNING} or any(state.is_over for state in states)


def _raise_if_not_running(handles: Sequence[LocalHandle], timeout_s: float) -> None:
    for handle in handles:
        if handle.state.is_over:
            reason = f"ended before it was ready ({handle.exit_reason})"
            raise WorkerStartFailed(f"{handle.info.name} {reason}. {_printed(handle)}")
    late = [handle for handle in handles if handle.state is WorkerState.STARTING]
    if late:
        names = ", ".join(handle.info.name for handle in late)
        raise WorkerStartFailed(f"not ready after {timeout_s:g} s: {names}; raise start_timeout. {_printed(late[0])}")


def _printed(handle: LocalHandle) -> str:
    text = handle.output.kept()
    return f"{handle.info.name} printed:\n{text}" if text else f"{handle.info.name} printed nothing."


_HOST = "local"
_ANY_INCARNATION = 0
CLUSTER = "cluster"  # where the driver's agent keeps the cluster that it belongs to


C = TypeVar("C")
MakeCluster = Callable[[LocalLauncher, Agent, list[WorkerHandle]], C]


def start_local(options: LocalOptions, make: MakeCluster[C]) -> C:
    """Start everything, or nothing.

    Args:
        options: What to start.
        make: Makes the cluster of what was started. If it fails, or Ctrl-C cuts it off, everything is ended.

    Raises:
        ConfigurationError: This process has a worker already, or this platform cannot fork.
        WorkerStartFailed: A worker, or the template process, did not get ready.
    """
    _check_no_other()
    deadline = time.monotonic() + options.start_timeout_s
    launcher = LocalLauncher(options.start_timeout_s)
    agent: Agent | None = None
    try:
        members = [_address_of(info, launcher) for info in (*options.infos(), options.driver_info())]
        directory = StaticDirectory(members)
        directory.complete()
        agent = start_worker(options.driver_info(), options.worker_config(), directory, folder=launcher.folder)
        set_current_agent(agent)
        forget = agent.forget
        handles = launcher.start(
            [_spec_of(info, options, members) for info in options.infos()],
            on_lost=lambda handle: forget(handle.info.name, handle.exit_reason or "it ended"),
            timeout_s=max(0.0, deadline - time.monotonic()),
        )
        return make(launcher, agent, list(handles))
    except BaseException:  # Ctrl-C as well
        if agent is not None:
            agent.shutdown(graceful=False)
            set_current_agent(None)
        launcher.close()
        raise


def _check_no_other() -> None:
    hint = guard_hint("with gradwire.Cluster.local(...) as cluster:\n            ...")
    if (name := reserved_for()) is not None:
        raise ConfigurationError(f"{name} is a worker of a cluster: only the driver can start one{hint}")
    if _imports_the_script():
        raise ConfigurationError(f"the program's script was imported, and would start a second cluster{hint}")
    with contextlib.suppress(NotInitialized):
        agent = current_agent()
        if CLUSTER in agent.extensions:
            raise ConfigurationError(
                "a cluster is open in this process already. Use it (Cluster.current()), close it (Cluster.current().close() "
                f"or gradwire.rpc.shutdown()), or have the new one take its place: Cluster.local(..., replace=True){hint}"
            )
        raise ConfigurationError(
            f"this process is worker {agent.info.name} of a cluster already, by init_rpc; leave that one first, with "
            f"gradwire.rpc.shutdown(){hint}"
        )


def _imports_the_script() -> bool:
    """Whether this runs because the program's own script is imported: by itself, or where multiprocessing spawns."""
    importing = find_import()
    if importing is None:
        return False
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return importing.f_globals.get("__name__") == "__mp_main__" or (
        script is not None and os.path.realpath(script) == os.path.realpath(importing.f_code.co_filename)
    )


def _address_of(info: WorkerInfo, launcher: LocalLauncher) -> WorkerAddress:
    return WorkerAddress(info, _ANY_INCARNATION, _HOST, (f"unix://{launcher.folder / info.name}.sock",))


def _spec_of(info: WorkerInfo, options: LocalOptions, members: list[WorkerAddress]) -> WorkerSpec:
    return WorkerSpec(
        info=info,
        config=options.worker_config(),
        addresses=tuple(members),
        num_threads=options.threads_per_worker,
        environment=dict(options.environment or {}),
        imports=tuple(options.imports),
    )
