"""Workers in processes that a scheduler starts: Ray, Slurm, torchrun; on this machine or on others.

    launch -> who are you? -> name and certificate -> listen -> driver connects -> do all machines reach each other?

`gradwire.cluster.enrolment` defines the messages until a worker listens; they go over the scheduler's channel. From then on,
the driver's own connections carry everything, and their end reveals the end of a worker. The scheduler provides the reason
(``killed by SIGKILL``) and stops processes that do not exit by themselves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gradwire import _interrupts
from gradwire._progress_bar import REFRESH_S, DelayedBar
from gradwire.cluster import enrolment
from gradwire.cluster._control import text_path
from gradwire.cluster._output_relay import OutputPrinter
from gradwire.cluster.driver import ClusterOptions, check_no_other
from gradwire.cluster.enrolment import Assign, Failed, Introduce, Introduction, Ready, WorkerSettings
from gradwire.cluster.launcher import Launcher, OnLost, WorkerHandle, WorkerSpec, WorkerState, start_bar
from gradwire.cluster.monitor import Monitor
from gradwire.cluster.network_address import address_of_interface
from gradwire.cluster.remote_worker import DIAL, LEAVE, transports_of
from gradwire.cluster.scheduler import RemoteProcess, Scheduler
from gradwire.cluster.supervision import SupervisionOptions
from gradwire.cluster.worker import Worker
from gradwire.config import WorkerConfig
from gradwire.errors import AuthenticationFailed, DecodeError, GradwireError, RpcError, WorkerStartFailed
from gradwire.observe.log import get_logger
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import set_current_agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.transports.tls import uri_of_worker
from gradwire.types import WorkerAddress
from gradwire.versions import find_conflict, own_versions
from gradwire.wire.exceptions import clean
from gradwire.wire.messages import encode_address

if TYPE_CHECKING:
    from gradwire.transports.certificates import Authority

_EXCHANGES_AT_ONCE = 64
_LOOK_S = 0.1  # between two looks at what the scheduler knows about its processes
_REASON_S = 1.0  # how long the end of a connection waits for the scheduler's word on the process
_RETURN_S = 3.0  # how long a worker whose process has not ended, as far as is known, may be without a connection
_LEAVE_S = 1.0  # for the answers to the request to leave
_KILL_S = 5.0
_STOP_S = 2.0
_MAX_ERROR_BYTES = 2048

_log = get_logger(__name__)
_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions(ClusterOptions):
    """The options of clusters whose processes a scheduler starts.

    Attributes:
        interface: Network interface that every machine listens on (``ib0``); None for the one that leads to the driver.
        bind_host: Address that the driver listens on; None for the scheduler's choice, or that of `interface`.
    """

    start_timeout_s: float = 300.0
    interface: str | None = None
    bind_host: str | None = None

    def driver_host(self, scheduler: Scheduler) -> str:
        """Return the address that the driver listens on."""
        if self.bind_host is not None:
            return self.bind_host
        return scheduler.bind_host() if self.interface is None else address_of_interface(self.interface)


def start_remote(
    scheduler: Scheduler,
    options: RemoteOptions,
    supervision: SupervisionOptions = SupervisionOptions(),  # noqa: B008  (frozen)
    on_restart: Callable[[Worker], object] | None = None,
) -> tuple[Monitor, contextlib.ExitStack]:
    """Start everything, or nothing; closing the stack ends all of it at once, the scheduler's part included.

    Raises:
        ConfigurationError: This process cannot be a driver, or an address cannot be used.
        WorkerStartFailed: A worker did not become ready; the message includes its place and, if known, its output.
    """
    deadline = time.monotonic() + options.start_timeout_s
    with _interrupts.installed(), contextlib.ExitStack() as resources:
        resources.callback(scheduler.close)
        check_no_other()
        last = resources.enter_context(contextlib.ExitStack())  # what ends after everything else
        # Imports the cryptography library, which is slow.
        from gradwire.transports.certificates import Authority, ProcessKey

        *infos, driver = options.infos()
        authority, key = Authority(), ProcessKey()
        config = dataclasses.replace(options.config, token=options.token, tls=None)
        directory = StaticDirectory()
        with key.files(authority.sign(key.request(), uri_of_worker(driver.name)), authority.certificate) as keys:
            host = options.driver_host(scheduler)
            own = dataclasses.replace(config, transports=transports_of(config), bind_host=host, tls=keys)
            agent = start_worker(driver, own, directory)
        resources.callback(set_current_agent, None)
        resources.callback(agent.shutdown, graceful=False)
        directory.complete()
        set_current_agent(agent)
        launcher = RemoteLauncher(scheduler, agent, authority, interface=options.interface)
        resources.callback(launcher.close)
        monitor = Monitor(agent, launcher, supervision, on_restart, options.start_timeout_s)
        last.callback(monitor.close)
        resources.callback(monitor.stop)
        specs = [options.spec(info, config, (agent.address,)) for info in infos]
        monitor.start(specs, max(0.0, deadline - time.monotonic()))
        return monitor, resources.pop_all()


class _Member:
    """A worker, its process, and how they ended."""

    def __init__(self, spec: WorkerSpec, process: RemoteProcess, introduction: Introduction, on_lost: OnLost) -> None:
        self.spec = spec
        self.process = process
        self.introduction = introduction
        self.on_lost = on_lost
        self.handle = WorkerHandle(spec.info)
        self.handle.on_process_made(introduction.pid)
        self.handle.host, self.handle.place = introduction.host, process.place
        self.cut_at: float | None = None  # when its connection ended
        self.cut_reason = ""

    def __str__(self) -> str:
        return f"{self.spec.info.name} ({self.process.place})"

    @property
    def address(self) -> WorkerAddress:
        assert self.handle.address is not None
        return self.handle.address


class RemoteLauncher(Launcher):
    """Starts workers through a scheduler, and watches them.

    Args:
        scheduler: Starts the processes. It is closed with the launcher.
        agent: The driver's.
        authority: Signs the workers' certificates.
        interface: Network interface that the workers listen on.
    """

    def __init__(
        self, scheduler: Scheduler, agent: Agent, authority: Authority, *, interface: str | None = None
    ) -> None:
        self._scheduler = scheduler
        self._agent = agent
        self._authority = authority
        self._interface = interface
        self._printer = OutputPrinter(agent)
        self._changed = threading.Condition()  # guards what follows, and the state of every member
        self._members: dict[str, _Member] = {}  # by name: of each worker the one that was started last
        self._is_closed = False
        agent.on_worker_lost(self._on_connection_lost)
        agent.on_worker_connected(self._on_connected)
        self._watcher = threading.Thread(target=self._watch, name="gradwire-driver-watcher", daemon=True)
        self._watcher.start()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{sum(not item.state.is_over for item in self.handles())} workers"
        return f"<RemoteLauncher {state}>"

    def handles(self) -> list[WorkerHandle]:
        """Return the workers in the order of their ranks, each as it was started last."""
        with self._changed:
            return sorted((item.handle for item in self._members.values()), key=lambda handle: handle.info.id)

    # Starting

    def start(self, specs: Sequence[WorkerSpec], on_lost: OnLost, timeout_s: float) -> Sequence[WorkerHandle]:
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo, start_bar(len(specs)) as bar:
            members = self._enrol(specs, on_lost, deadline, timeout_s, undo, bar)
            self._each(members, deadline, partial(self._assign, deadline=deadline, timeout_s=timeout_s), bar)
            self._take_in(members, undo)
            try:
                self._each(members, deadline, partial(self._connect, deadline=deadline))
                self._check_reach(members, deadline)
            except GradwireError as error:
                self._explain(members, error)
                raise
            with self._changed:
                for member in members:
                    member.handle.on_listening(member.address)
                self._changed.notify_all()
            self._raise_if_ended(members)
            undo.pop_all()
        return [member.handle for member in members]

    def _enrol(
        self,
        specs: Sequence[WorkerSpec],
        on_lost: OnLost,
        deadline: float,
        timeout_s: float,
        undo: contextlib.ExitStack,
        bar: DelayedBar,
    ) -> list[_Member]:
        """Start processes, collect their introductions, and assign a worker to each."""
        with self._changed:
            earlier = {spec.info.name: self._members.get(spec.info.name) for spec in specs}
        again = [spec for spec in specs if earlier[spec.info.name] is not None]
        new = [spec for spec in specs if earlier[spec.info.name] is None]
        processes: list[RemoteProcess] = []
        for spec in again:
            old = earlier[spec.info.name]
            assert old is not None
            processes += self._launch(1, deadline, old.process, undo)
        if new:
            processes += self._launch(len(new), deadline, None, undo)
        ask = partial(self._ask_introduction, deadline=deadline, timeout_s=timeout_s)
        bar.update(0, len(specs))
        introductions = self._each(processes, deadline, ask)
        self._check_versions(processes, introductions, specs[0].config)
        kept = list(range(len(again)))
        order = kept + [len(again) + index for index in enrolment.order_of(introductions[len(again) :])]
        made = {
            spec.info.name: _Member(spec, processes[index], introductions[index], on_lost)
            for spec, index in zip([*again, *new], order, strict=True)
        }
        return [made[spec.info.name] for spec in specs]

    def _launch(
        self, count: int, deadline: float, replaces: RemoteProcess | None, undo: contextlib.ExitStack
    ) -> list[RemoteProcess]:
        processes = list(self._scheduler.launch(count, deadline, replaces))
        for process in processes:
            undo.callback(_kill, process)
        with self._changed:
            if self._is_closed:
                raise WorkerStartFailed("no worker was started: the cluster is closed")
        if len(processes) != count:
            raise WorkerStartFailed(f"the scheduler started {len(processes)} processes, expected {count}")
        return processes

    def _ask_introduction(self, process: RemoteProcess, deadline: float, timeout_s: float) -> Introduction:
        message = enrolment.encode(Introduce(_host_of(self._agent.address), self._interface))
        return _exchange(process, process.place, message, Introduction, self._agent.config, deadline, timeout_s)

    def _check_versions(
        self, processes: Sequence[RemoteProcess], introductions: Sequence[Introduction], config: WorkerConfig
    ) -> None:
        here, trust = own_versions(), config.trust or "data"
        for process, introduction in zip(processes, introductions, strict=True):
            there = f"at {process.place} on {introduction.host}"
            conflict = find_conflict(self._agent.info.name, here, there, introduction.versions, trust)
            if conflict is not None:
                raise WorkerStartFailed(conflict)

    def _assign(self, member: _Member, deadline: float, timeout_s: float) -> None:
        spec, request = member.spec, member.introduction.certificate_request
        from gradwire.transports.certificates import seal

        settings = WorkerSettings(
            config=spec.config,
            num_threads=spec.num_threads,
            environment=spec.environment,
            imports=spec.imports,
            path=tuple(text_path()),
            start_timeout_s=timeout_s,
        )
        name = spec.info.name
        try:
            certificate = self._authority.sign(request, uri_of_worker(name))
            sealed = seal(enrolment.encode(settings), request, name.encode())
        except AuthenticationFailed as error:
            raise WorkerStartFailed(f"cannot issue a certificate to {member}: {error}") from error
        message = enrolment.encode(
            Assign(
                name=name,
                rank=spec.info.id,
                certificate=certificate,
                authority=self._authority.certificate,
                driver=self._agent.address,
                sealed_settings=sealed,
                after=spec.after,
            )
        )
        answer = _exchange(member.process, str(member), message, Ready, self._agent.config, deadline, timeout_s)
        if answer.address.info != spec.info:
            raise WorkerStartFailed(
                f"{member} replied as {answer.address.info}: its process is running another program"
            )
        member.handle.address = answer.address

    def _take_in(self, members: Sequence[_Member], undo: contextlib.ExitStack) -> None:
        """Let the driver connect to the new workers, and watch them."""
        with self._changed:
            for member in members:
                name = member.spec.info.name
                before = self._members.get(name)
                undo.callback(self._turn_away, member, before)
                self._members[name] = member
        for member in members:
            self._agent.welcome(member.address)
            self._printer.add(member.spec.info)

    def _turn_away(self, member: _Member, before: _Member | None) -> None:
        """Forget a worker whose start has failed."""
        name = member.spec.info.name
        with self._changed:
            self._members.pop(name, None)
            if before is not None:
                self._members[name] = before
            member.handle.on_exited("its start failed")
        reason = "its start failed"
        self._agent.dismiss(name, member.address.incarnation, reason, is_final=before is None)

    def _connect(self, member: _Member, deadline: float) -> None:
        try:
            self._agent.peers.peer(member.spec.info.name).lane("control", deadline)
        except AuthenticationFailed as error:  # it was reached, and the error already says what to do
            raise WorkerStartFailed(f"{member} cannot join: {error}") from error
        except (GradwireError, OSError) as error:
            raise WorkerStartFailed(
                f"{_where(self._agent.address)} cannot reach {member} at {_uris(member.address)}: {error}; "
                f"{_REACH_HINT}"
            ) from error

    def _check_reach(self, members: Sequence[_Member], deadline: float) -> None:
        """Check that one worker of each machine can connect to one of each other machine, in both directions."""
        workers = {item.address.host: item for item in (*reversed(self._running()), *reversed(members))}
        hosts = {host: item.address for host, item in workers.items()}
        hosts[self._agent.address.host] = self._agent.address  # the driver stands for its machine
        new = {member.address.host for member in members}
        left = max(0.01, deadline - time.monotonic())
        asked = {}
        for host, item in sorted(workers.items(), key=lambda pair: pair[1].spec.info.id):
            to = [address for other, address in hosts.items() if other != host and new & {host, other}]
            if to:
                args = ([encode_address(address) for address in to], left)
                future = self._agent.ask(item.spec.info.name, DIAL, args, left + _LEAVE_S, dict[str, str])
                asked[item] = future
        for item, future in asked.items():
            try:
                failures = future.wait()
            except RpcError as error:
                raise WorkerStartFailed(
                    f"{_where(item.address)} on {item.introduction.host} did not report whether it can reach the "
                    "other machines: "
                    f"{error}; {_REACH_HINT}"
                ) from error
            for name, reason in failures.items():
                to_address = next(address for address in hosts.values() if address.info.name == name)
                raise WorkerStartFailed(
                    f"{_where(item.address)} on {item.introduction.host} cannot reach {name} at {_tcp_uri(to_address)}: "
                    f"{clean(reason, _MAX_ERROR_BYTES)}; {_REACH_HINT}"
                )

    def _explain(self, members: Sequence[_Member], error: GradwireError) -> None:
        """Raise the scheduler's reason if a process has exited, which is more precise than a lost connection."""
        for member in members:
            reason = member.process.end_reason()
            if reason is not None:
                raise WorkerStartFailed(f"{member} exited before it was ready: {reason}") from error

    def _raise_if_ended(self, members: Sequence[_Member]) -> None:
        for member in members:
            if member.handle.state.is_over:
                raise WorkerStartFailed(f"{member} exited before it was ready: {member.handle.exit_reason}")

    def _each(
        self, items: Sequence[_T], deadline: float, function: Callable[[_T], _R], bar: DelayedBar | None = None
    ) -> list[_R]:
        """Call a function for each item in parallel; return the results in order, or raise the first error at once.

        The function keeps the deadline. After an error the other calls end there, or when their process is killed.
        """
        results: dict[int, _R] = {}
        errors: list[Exception] = []
        waiting = list(enumerate(items))[::-1]
        done = threading.Condition()  # guards the three above

        def run() -> None:
            while True:
                with done:
                    if not waiting or errors:
                        return
                    index, item = waiting.pop()
                try:
                    result = function(item)
                except Exception as error:
                    with done:
                        errors.append(error)
                        done.notify_all()
                    return
                with done:
                    results[index] = result
                    done.notify_all()

        for _ in range(min(len(items), _EXCHANGES_AT_ONCE)):
            threading.Thread(target=run, name="gradwire-driver-enrolment", daemon=True).start()
        until = max(deadline, time.monotonic()) + _STOP_S
        while not (errors or len(results) == len(items)) and (left_s := until - time.monotonic()) > 0:
            with done:
                _interrupts.wait_for(done, lambda: bool(errors) or len(results) == len(items), min(left_s, REFRESH_S))
            if bar is not None:
                bar.update(len(results), len(items))
        if errors:
            raise errors[0]
        if len(results) < len(items):
            late = ", ".join(getattr(item, "place", str(item)) for i, item in enumerate(items) if i not in results)
            raise WorkerStartFailed(f"the scheduler did not respond in time for {late}; check its logs")
        return [results[index] for index in range(len(items))]

    # Watching

    def _running(self) -> list[_Member]:
        with self._changed:
            found = [item for item in self._members.values() if item.handle.state is WorkerState.RUNNING]
        return sorted(found, key=lambda item: item.spec.info.id)

    def _on_connection_lost(self, address: WorkerAddress, reason: str) -> None:
        """Record that a worker's connection ended, as reported by the driver's agent."""
        with self._changed:
            member = self._members.get(address.info.name)
            known = member.handle.address if member is not None else None
            if (
                member is None
                or known is None
                or known.incarnation > address.incarnation
                or member.handle.state.is_over
            ):
                return
            member.cut_at, member.cut_reason = time.monotonic(), reason
            self._changed.notify_all()
            if member.handle.state is WorkerState.RUNNING and not self._is_closed:
                reach = partial(self._reach_again, member, member.cut_at + _RETURN_S)
                threading.Thread(target=reach, name="gradwire-driver-reconnect", daemon=True).start()

    def _on_connected(self, address: WorkerAddress) -> None:
        with self._changed:
            member = self._members.get(address.info.name)
            known = member.handle.address if member is not None else None
            if member is not None and known is not None and known.incarnation == address.incarnation:
                member.cut_at = None

    def _reach_again(self, member: _Member, deadline: float) -> None:
        """Try to reconnect to a worker; `_on_connected` is called on success."""
        while member.cut_at is not None and time.monotonic() < deadline and not member.handle.state.is_over:
            with contextlib.suppress(GradwireError, OSError):
                self._agent.peers.peer(member.spec.info.name).lane("control", deadline)
            with self._changed:
                self._changed.wait(_LOOK_S)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                _interrupts.wait(self._changed, _LOOK_S)
                members = [item for item in self._members.values() if not item.handle.state.is_over]
            ended = [(item, reason) for item in members if (reason := self._end_of(item)) is not None]
            lost = []
            with self._changed:
                for member, reason in ended:
                    if member.handle.state is WorkerState.RUNNING:
                        lost.append(member)
                    member.handle.on_exited(reason)
                self._changed.notify_all()
            for member, _ in ended:
                self._printer.finish(member.spec.info.name)
            for member in lost:
                try:
                    member.on_lost(member.handle)
                except Exception:
                    _log.exception("the loss of %s could not be handled", member)

    def _end_of(self, member: _Member) -> str | None:
        """Return how a worker ended; None if it has not."""
        reason = member.process.end_reason()
        if reason is not None:
            return reason
        cut_at = member.cut_at
        patience_s = _RETURN_S if member.handle.state is WorkerState.RUNNING else _REASON_S
        if cut_at is None or time.monotonic() < cut_at + patience_s:
            return None
        _kill(member.process)  # without a connection it is of no use, and the next under its name must be alone
        return "it left" if member.handle.state is WorkerState.LEAVING else member.cut_reason

    def wait_exit(self, handle: WorkerHandle, timeout_s: float) -> bool:
        with self._changed:
            return _interrupts.wait_for(self._changed, lambda: handle.state.is_over, timeout_s)

    def describe(self) -> str:
        return f"{self._scheduler.describe()}\nthe driver listens at {_uris(self._agent.address)}, with keys in memory"

    # Ending

    def terminate(self, handles: Sequence[WorkerHandle], grace_s: float) -> bool:
        """Ask workers to shut down, and have the scheduler kill those that are still running after `grace_s`."""
        with self._changed:
            members = [item for item in self._members.values() if item.handle in handles]
            for member in members:
                member.handle.on_end_expected()
            names = [item.spec.info.name for item in members if not item.handle.state.is_over]

        def are_over() -> bool:
            return all(item.handle.state.is_over for item in members)

        if grace_s > 0 and names:
            deadline = time.monotonic() + grace_s
            self._agent.ask_all(names, LEAVE, (), min(grace_s, _LEAVE_S), None)
            with self._changed:
                _interrupts.wait_for(self._changed, are_over, max(0.0, deadline - time.monotonic()))
        for member in members:  # also those that have left: a scheduler may keep the process of a worker that has
            _kill(member.process)
        with self._changed:
            is_over = _interrupts.wait_for(self._changed, are_over, _KILL_S)
            for member in members:
                member.handle.on_exited("the scheduler has not confirmed that its process was killed")
            self._changed.notify_all()
        return is_over

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            handles = [item.handle for item in self._members.values()]
        try:
            self.terminate(handles, 0.0)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()
            try:
                self._scheduler.close()
            finally:
                self._watcher.join(_STOP_S)
                self._printer.close(_STOP_S)


_REACH_HINT = (
    "open the firewall between the machines, or choose another network (interface=) or other ports (port_range=)"
)


def _exchange(
    process: RemoteProcess,
    who: str,
    message: bytes,
    kind: type[_R],
    config: WorkerConfig,
    deadline: float,
    timeout_s: float,
) -> _R:
    """Send a message over the scheduler's channel and return the reply; errors name the process."""
    try:
        answer = enrolment.decode_answer(process.exchange(message, deadline), kind, config)
    except WorkerStartFailed as error:
        raise WorkerStartFailed(f"{who} exited before it was ready: {error}") from error
    except TimeoutError as error:
        detail = f" {error}" if str(error) else ""
        raise WorkerStartFailed(
            f"{who} was not ready after {timeout_s:.1f} s; raise start_timeout_s (or timeout, for add_workers), or check "
            f"what its process is doing.{detail}"
        ) from error
    except DecodeError as error:
        raise WorkerStartFailed(
            f"cannot read the reply of {who}: {error}; install the same version of gradwire on all machines"
        ) from error
    except GradwireError as error:
        raise WorkerStartFailed(f"cannot exchange messages with {who}: {error}") from error
    except Exception as error:
        raise WorkerStartFailed(
            f"the scheduler cannot deliver messages to {who}: {type(error).__name__}: {error}"
        ) from error
    if isinstance(answer, Failed):
        raise WorkerStartFailed(f"{who} could not start:\n{answer.text}")
    return answer


def _kill(process: RemoteProcess) -> None:
    try:
        process.kill()
    except Exception:
        _log.exception("the process of %s could not be stopped", process.place)


def _tcp_uri(address: WorkerAddress) -> str:
    return next((uri for uri in address.uris if uri.startswith("tcp://")), "no address")


def _host_of(address: WorkerAddress) -> str:
    """Return the address that a worker is reached at over a network."""
    return _tcp_uri(address).removeprefix("tcp://").rpartition(":")[0].strip("[]")


def _uris(address: WorkerAddress) -> str:
    return ", ".join(address.uris)


def _where(address: WorkerAddress) -> str:
    return f"{address.info.name} ({_host_of(address)})"
