"""Start, watch and restart the workers of a cluster, and announce its membership to all of them.

    launcher --on_lost-->  |         | --start, terminate-->  launcher
    heartbeat ---------->  | Monitor | --cluster.members--->  every worker
    Cluster ------------>  |         | --MembershipEvent--->  the program

`gradwire.cluster.supervision` decides; this module acts. Slow operations run in a separate thread per worker, so that a
worker that cannot be stopped or started does not block the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradwire import _interrupts
from gradwire.cluster.launcher import Launcher, WorkerHandle, WorkerSpec, WorkerState
from gradwire.cluster.membership import ALIVE, MAX_REASON_CHARS, Departure, tell_members
from gradwire.cluster.supervision import (
    Action,
    Announce,
    AskAlive,
    EndProcess,
    MembershipChange,
    Phase,
    Rebuild,
    StartProcess,
    Supervision,
    SupervisionOptions,
)
from gradwire.cluster.worker import Worker
from gradwire.errors import ConfigurationError, NotInitialized, RpcError, RpcTimeout, UnknownWorker, WorkerLost
from gradwire.observe.log import get_logger
from gradwire.rpc.agent import Agent
from gradwire.rpc.pending_calls import PendingCall
from gradwire.types import WorkerAddress, WorkerInfo

_log = get_logger(__name__)
_EVENTS_THREAD = "gradwire-driver-events"
_TELL_S = 1.0  # how long a restart waits until the other workers have confirmed that the old process has ended
_CONFIRM_S = 5.0  # likewise, when the program adds or removes workers
_TELL_AGAIN_S = 1.0
_ANSWER_S = 1.0
_LEAVE_S = 1.0
_LOOK_S = 0.01
_JOIN_S = 5.0
_LONGEST_WAIT_S = 3600.0
_NEVER = float("inf")
_REACHABLE = (None, Phase.SERVING, Phase.REBUILDING)  # None: it is about to become a member
_REMOVED = "it was removed from the cluster"


class Member:
    """One worker of a cluster, across restarts.

    Attributes:
        spec: How to start it.
        handle: Its latest process.
        life: The number of that process in `Supervision`.
        told: The number of the latest membership state that the process has confirmed.
        rebuilding: Held while the program rebuilds the state of the process.
        worker: The handle that the program uses.
    """

    def __init__(self, monitor: Monitor, spec: WorkerSpec, handle: WorkerHandle, life: int) -> None:
        self.spec = spec
        self.handle = handle
        self.life = life
        self.told = 0
        self.rebuilding = threading.Lock()  # held while `on_restart` runs for it
        self.worker = Worker(monitor, self)

    def __repr__(self) -> str:
        return f"<Member {self.name} life {self.life}, {self.handle!r}>"

    @property
    def name(self) -> str:
        return self.spec.info.name

    @property
    def incarnation(self) -> int:
        return 0 if self.handle.address is None else self.handle.address.incarnation


@dataclass(frozen=True, slots=True)
class MembershipEvent:
    """A change in the membership of a cluster.

    Attributes:
        kind: ``joined``, ``lost``, ``restarted`` or ``left``.
        worker: The worker.
        reason: The reason, for ``lost`` and ``left``.
    """

    kind: MembershipChange
    worker: Worker
    reason: str | None = None


class Monitor:
    """Starts, watches and restarts the workers of a cluster, in the driver.

    Args:
        agent: The driver's agent.
        launcher: Starts and stops processes.
        options: When a worker counts as lost, and whether it is restarted.
        on_restart: Called with a restarted worker, in its own thread, before it counts as restarted.
        start_timeout_s: Seconds within which a restarted worker must be ready.

    Raises:
        ConfigurationError: The options contradict each other.
    """

    def __init__(
        self,
        agent: Agent,
        launcher: Launcher,
        options: SupervisionOptions = SupervisionOptions(),  # noqa: B008  (frozen)
        on_restart: Callable[[Worker], object] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        if on_restart is not None and options.restart == "never":
            raise ConfigurationError('on_restart is never called with restart="never"; pass restart="on-loss" as well')
        self.agent = agent
        self.launcher = launcher
        self.options = options
        self._on_restart = on_restart
        self._start_timeout_s = start_timeout_s
        self._changed = threading.Condition()  # guards what follows; notified when a member's phase has changed
        self._supervision = Supervision(options)
        self._members: dict[str, Member] = {}
        self._template: WorkerSpec | None = None  # how more workers are started
        self._departures: dict[str, Departure] = {}
        self._version = 0  # of the two above, as other workers are told of them
        self._tell_at = _NEVER  # when to tell those again that have not confirmed the last version
        self._last_rank = agent.info.id
        self._reserved: set[str] = set()  # names of workers that are being added
        self._handles: dict[int, WorkerHandle] = {}  # by life, of processes that `Supervision` may want to have ended
        self._callbacks: list[Callable[[MembershipEvent], object]] = []
        self._events: queue.SimpleQueue[MembershipEvent | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None  # wakes when something is due
        self._threads: set[threading.Thread] = set()  # all that this monitor has started
        self._is_stopped = False
        self._owner_pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Monitor of {len(self._members)} workers, {self._supervision!r}>"

    # -- state -----------------------------------------------------------------------------------------------------------

    def members(self) -> list[Member]:
        """Return the members in the order of their ranks."""
        with self._changed:
            return sorted(self._members.values(), key=lambda member: member.spec.info.id)

    def phase_of(self, member: Member) -> Phase | None:
        """Return the phase of a worker; None if it was removed or the cluster is closed."""
        with self._changed:
            is_member = self._members.get(member.name) is member and not self._is_stopped
            return self._supervision.phase(member.name) if is_member else None

    def is_alive(self, member: Member) -> bool:
        """Return whether the process of a worker is there and belongs to the cluster."""
        phase = self.phase_of(member)
        return not member.handle.state.is_over and (phase is None or phase.has_process)

    def state_of(self, member: Member) -> str:
        """Return the state of a worker, as `Cluster.status` shows it."""
        phase = self.phase_of(member)
        if phase in (None, Phase.SERVING):
            return member.handle.state.value
        return "lost" if phase is Phase.LOST else "restarting"

    def lost_reason(self, member: Member) -> str | None:
        """Return why the last process of a worker was lost, or how it ended; None while it serves."""
        with self._changed:
            return self._supervision.reason(member.name) or member.handle.exit_reason

    def num_restarts(self, member: Member) -> int:
        with self._changed:
            return self._supervision.num_restarts(member.name)

    # -- called by the program -------------------------------------------------------------------------------------------

    def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[Member]:
        """Start workers for the first time and make them members.

        Raises:
            WorkerStartFailed: One did not become ready; none of them is left running.
        """
        handles = self.launcher.start(specs, self._on_lost, timeout_s)
        with self._changed:
            is_first = not self._members
            added = []
            self._template = self._template or specs[0]
            for spec, handle in zip(specs, handles, strict=True):
                member = self._members[spec.info.name] = Member(self, spec, handle, self._supervision.new_life())
                self._handles[member.life] = handle
                self._departures.pop(member.name, None)
                self._last_rank = max(self._last_rank, spec.info.id)
                added.append(member)
            self._bump()
            known = {address.info.name for spec in specs for address in spec.addresses}
            if is_first and known.issuperset(self._members):  # each was told of all the others before it started
                for member in added:
                    member.told = self._version
        for member in added:
            self._welcome(member)
        self._tell(_CONFIRM_S)
        for member in added:
            self._feed(partial(self._supervision.joined, member.name, member.life))
            if member.handle.state is WorkerState.LOST:  # so early that `_on_lost` did not know it
                self._on_lost(member.handle)
        return added

    def add(self, count: int, names: Sequence[str] | None, role: str, timeout_s: float) -> list[Member]:
        """Start more workers, like the first ones."""
        self._check_owner()
        with self._changed:
            self._check_open()
            template = self._template
            assert template is not None, "the cluster has not finished starting its first workers"
            taken = {*self._members, *self._reserved, *self._departures, self.agent.info.name}
            chosen = list(names) if names is not None else _unused_names(role, count, taken)
            if both := {*self._members, *self._reserved}.intersection(chosen):
                raise ConfigurationError(f"this cluster already has a worker named {min(both)}; choose another name")
            first = self._last_rank + 1
            self._last_rank += count
            self._reserved.update(chosen)
            addresses = (self.agent.address, *self._addresses())
            after = {name: self._last_incarnation(name) for name in chosen}
        try:
            specs = [
                dataclasses.replace(
                    template, info=WorkerInfo(name, rank), role=role, addresses=addresses, after=after[name]
                )
                for rank, name in enumerate(chosen, first)
            ]
            return self.start(specs, timeout_s)
        finally:
            with self._changed:
                self._reserved.difference_update(chosen)

    def remove(self, member: Member, grace_s: float) -> None:
        """Stop a worker for good and remove it from the cluster; it is not restarted."""
        self._check_owner()
        with self._changed:
            self._check_open()
            if self._members.get(member.name) is not member:
                raise UnknownWorker(f"{member.name} is no longer a worker of this cluster")
            del self._members[member.name]
            actions = self._supervision.removed(member.name, _REMOVED)
            self._changed.notify_all()
        is_ended = False
        try:
            deadline = time.monotonic() + grace_s
            peer = self.agent.peers.by_name.get(member.name)
            lane = peer.lanes.get("calls") if peer is not None else None
            while lane is not None and lane.calls and time.monotonic() < deadline:
                _interrupts.sleep(_LOOK_S)
            self.launcher.terminate([member.handle], max(_LEAVE_S, deadline - time.monotonic()) if grace_s else 0.0)
            is_ended = True
        finally:
            if not is_ended:  # Ctrl-C has interrupted the wait: it is no longer a member and must not keep running
                self.launcher.terminate([member.handle], 0.0)
            with self._changed:
                self._depart(member, _REMOVED, is_final=True)
                self._record(actions, member)
                self._handles.pop(member.life, None)
            self.agent.dismiss(member.name, member.incarnation, _REMOVED, is_final=True)
            self._tell(_CONFIRM_S)

    def wait_for(self, count: int | None, timeout_s: float) -> list[Member]:
        """Wait until `count` workers, or all of them, serve calls; return those that do."""
        self._check_owner()
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                _interrupts.wait_for(
                    self._changed, partial(self._is_settled, count), max(0.0, deadline - time.monotonic())
                )
                self._check_open()
                wanted = len(self._members) if count is None else count
                serving = self._members_in(Phase.SERVING)
                is_hopeless = self._is_hopeless(wanted)
            # The loss of a worker may be known to a call that failed before it is known here. So each is asked.
            left_s = deadline - time.monotonic()
            asked = [] if len(serving) < wanted else [member.name for member in serving]
            answers = self.agent.ask_all(asked, ALIVE, (), max(_LOOK_S, min(left_s, _ANSWER_S)), None)
            found = [member for member in serving if member.name in answers] if asked else serving
            if len(found) >= wanted:
                return found
            if is_hopeless or left_s <= 0:
                raise self._not_enough(found, wanted, None if is_hopeless else timeout_s)
            with self._changed:
                _interrupts.wait(self._changed, _LOOK_S)

    def _members_in(self, phase: Phase) -> list[Member]:
        """Return the members in a phase, in the order of their ranks; the caller holds the lock."""
        found = [member for member in self._members.values() if self._supervision.phase(member.name) is phase]
        return sorted(found, key=lambda member: member.spec.info.id)

    def _is_settled(self, count: int | None) -> bool:
        wanted = len(self._members) if count is None else count
        return self._is_stopped or self._is_hopeless(wanted) or self._supervision.num_in(Phase.SERVING) >= wanted

    def _is_hopeless(self, wanted: int) -> bool:
        """Return whether too many of the members are lost for good; more than there are may still be added."""
        return len(self._members) - self._supervision.num_in(Phase.LOST) < wanted <= len(self._members)

    def _not_enough(self, found: list[Member], wanted: int, timeout_s: float | None) -> RpcError:
        with self._changed:
            others = [name for name, member in self._members.items() if member not in found]
            text = "".join(
                f"; {name}: {self._supervision.lost_text(name) or 'it is not responding'}" for name in others
            )
        if timeout_s is None:
            advice = (
                "wait for fewer (wait_for_workers(n)), or remove the lost ones with Cluster.remove() and add others"
            )
            return WorkerLost(
                f"only {len(found)} of {wanted} workers are ready, and too many others are lost for good{text}; {advice}",
                others[0],
            )
        return RpcTimeout(
            f"only {len(found)} of {wanted} workers were ready after {timeout_s:g} s{text or '; there are no others'}; "
            "pass a larger timeout, or see Cluster.status()",
            ", ".join(others),
            "run",
        )

    def on_membership(self, callback: Callable[[MembershipEvent], object]) -> Callable[[], None]:
        """Register a callback for membership events; return a function that removes it."""
        self._check_owner()
        with self._changed:
            self._check_open()
            is_first = not any(thread.name == _EVENTS_THREAD for thread in self._threads)
            self._callbacks.append(callback)
            if is_first:
                self._start_thread(_EVENTS_THREAD, self._call_back)

        def unregister() -> None:
            with self._changed, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return unregister

    def stop(self) -> None:
        """Stop starting and stopping workers, because the cluster is about to close. Idempotent."""
        with self._changed:
            self._supervision.closed()
            self._is_stopped = True
            self._changed.notify_all()
            self._events.put(None)

    def close(self) -> None:
        """Wait for the threads of this monitor, which end after the launcher and the agent. Idempotent."""
        self.stop()
        deadline = time.monotonic() + _JOIN_S
        for thread in tuple(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _check_owner(self) -> None:
        """Refuse to act in a process that the driver has forked; without the lock, which a thread may have held then."""
        if os.getpid() != self._owner_pid:
            raise NotInitialized(
                f"this cluster belongs to process {self._owner_pid}, and this process is a fork of it; start "
                "another cluster here"
            )

    def _check_open(self) -> None:
        if self._is_stopped:
            raise NotInitialized("this cluster is closed; start another one")

    # -- events in, actions out ------------------------------------------------------------------------------------------

    def _feed(self, event: Callable[[float], list[Action]]) -> None:
        """Handle an event and run the resulting actions. Never waits for anything outside this process."""
        with self._changed:
            actions = event(time.monotonic())
            for action in actions:
                member = self._members.get(action.name)
                if member is not None:
                    self._record([action], member)
            self._changed.notify_all()
            self._ensure_watched()
        for action in actions:
            self._perform(action)

    def _record(self, actions: Iterable[Action], member: Member) -> None:
        """Queue the notifications for the program and the workers; the caller holds the lock."""
        for action in actions:
            if isinstance(action, Announce):
                if action.change == "lost":
                    self._depart(member, action.reason or "it ended", is_final=False)
                if self._callbacks:
                    self._events.put(MembershipEvent(action.change, member.worker, action.reason))

    def _depart(self, member: Member, reason: str, *, is_final: bool) -> None:
        text = reason[:MAX_REASON_CHARS]
        self._departures[member.name] = Departure(member.name, member.incarnation, text, is_final)
        self._bump()

    def _bump(self) -> None:
        self._version += 1
        self._tell_at = time.monotonic() + _TELL_AGAIN_S

    def _perform(self, action: Action) -> None:
        name = action.name
        if isinstance(action, Announce):
            if action.change == "lost":
                level = logging.INFO if self.options.restart == "never" else logging.WARNING
                _log.log(level, "worker %s is lost: %s", name, action.reason)
                with self._changed:
                    departure = self._departures.get(name)
                if departure is not None:
                    self.agent.dismiss(name, departure.incarnation, departure.reason)
        elif isinstance(action, AskAlive):
            self.agent.reactor.run_soon(partial(self._ask_alive, action))
        elif isinstance(action, EndProcess):
            self._run(action, self._end_process)
        elif isinstance(action, StartProcess):
            self._run(action, self._start_process)
        else:
            self._run(action, self._rebuild)

    def _run(self, action: Any, target: Callable[[Any], None]) -> None:
        with self._changed:
            self._start_thread(f"gradwire-driver-restart-{action.name}", target, action)

    def _start_thread(self, name: str, target: Callable[..., None], *args: object) -> threading.Thread:
        self._threads = {thread for thread in self._threads if thread.is_alive()}
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()
        return thread

    def _on_lost(self, handle: WorkerHandle) -> None:
        """Handle a loss reported by the launcher, in its thread."""
        with self._changed:
            member = self._members.get(handle.info.name)
            if member is None or member.handle is not handle:
                return
            name, life = member.name, member.life
        self._feed(partial(self._supervision.lost, name, life, handle.exit_reason or "it ended"))

    # -- slow operations, each in its own thread -------------------------------------------------------------------------

    def _end_process(self, action: EndProcess) -> None:
        with self._changed:
            handle = self._handles.pop(action.life, None)
        self._tell(_TELL_S)  # before there can be another process of that name
        if handle is not None:
            try:
                if not self.launcher.terminate([handle], 0.0):
                    _log.warning(
                        "the process of %s cannot be stopped; its connections are refused from now on", action.name
                    )
            except Exception:
                _log.exception("stopping the process of %s failed", action.name)
        self._feed(partial(self._supervision.process_ended, action.name, action.life))

    def _start_process(self, action: StartProcess) -> None:
        name, life = action.name, action.life
        with self._changed:
            member = self._members.get(name)
            if member is None:
                return
            addresses = (self.agent.address, *(item for item in self._addresses() if item.info.name != name))
            after = self._last_incarnation(name)
        try:
            spec = dataclasses.replace(member.spec, addresses=addresses, after=after)
            (handle,) = self.launcher.start([spec], self._on_lost, self._start_timeout_s)
        except Exception as error:  # most of all WorkerStartFailed
            _log.warning("worker %s could not be restarted: %s", name, error)
            reason = f"it could not be restarted: {error}"
            self._feed(partial(self._supervision.start_failed, name, life, reason))
            return
        with self._changed:
            self._handles[life] = handle
            if self._members.get(name) is member:
                member.handle, member.life, member.told = handle, life, 0
                self._bump()
        self._feed(partial(self._supervision.process_started, name, life))
        if handle.state is WorkerState.LOST:  # so early that `_on_lost` did not know it
            self._on_lost(handle)

    def _rebuild(self, action: Rebuild) -> None:
        with self._changed:
            member = self._members.get(action.name)
        if member is None:
            return
        self._welcome(member)
        self._tell(_TELL_S)
        try:
            if self._on_restart is not None:
                with member.rebuilding:  # one that runs for an earlier life ends first: both use the same `Worker`
                    if member.life == action.life:
                        self._on_restart(member.worker)
        except Exception as error:
            _log.exception("on_restart(%s) failed", action.name)
            reason = f"on_restart raised {type(error).__name__}: {error}"
            self._feed(partial(self._supervision.lost, action.name, action.life, reason))
        else:
            self._feed(lambda _: self._supervision.rebuilt(action.name, action.life))

    def _welcome(self, member: Member) -> None:
        if member.handle.address is not None:
            self.agent.welcome(member.handle.address)

    def _addresses(self) -> list[WorkerAddress]:
        """Return where the members are; the caller holds the lock."""
        return [member.handle.address for member in self._members.values() if member.handle.address is not None]

    def _last_incarnation(self, name: str) -> int:
        """Return the newest incarnation that was ever started under a name; the caller holds the lock."""
        departure, member = self._departures.get(name), self._members.get(name)
        return max(departure.incarnation if departure else 0, member.incarnation if member else 0)

    def _tell(self, timeout_s: float) -> None:
        """Announce the membership to workers that have not confirmed it, and wait briefly for them."""
        with self._changed:
            version, addresses, departures = self._version, self._addresses(), list(self._departures.values())
            lives = {
                member.name: member.life
                for member in self._members.values()
                if member.told < version and self._supervision.phase(member.name) in _REACHABLE
            }
        confirmed = tell_members(self.agent, lives, addresses, timeout_s, departures) if lives else set()
        with self._changed:
            for name in confirmed:
                member = self._members.get(name)
                if member is not None and member.life == lives[name]:
                    member.told = max(member.told, version)
            if version == self._version:
                self._tell_at = time.monotonic() + _TELL_AGAIN_S if len(confirmed) < len(lives) else _NEVER

    def _ask_alive(self, action: AskAlive) -> None:
        name, life = action.name, action.life

        def on_done(call: PendingCall) -> None:
            with self._changed:
                if call.error is None:
                    self._supervision.answered(name, life, time.monotonic())
                else:
                    self._supervision.not_answered(name, life)

        try:
            self.agent.control(name, ALIVE, (), self.options.silence_s, on_done, None)
        except Exception:  # it does not answer, or has just ended
            with self._changed:
                self._supervision.not_answered(name, life)

    # -- threads ---------------------------------------------------------------------------------------------------------

    def _ensure_watched(self) -> None:
        """Start the thread that wakes when something is due, unless there is one; the caller holds the lock."""
        if self._watcher is None and not self._is_stopped and min(self._supervision.next_due(), self._tell_at) < _NEVER:
            self._watcher = self._start_thread("gradwire-driver-monitor", self._watch)

    def _watch(self) -> None:
        while True:
            with self._changed:
                if self._is_stopped:
                    return
                now = time.monotonic()
                due = min(self._supervision.next_due(), self._tell_at)
                if due > now:
                    self._changed.wait(min(due - now, _LONGEST_WAIT_S))
                    continue
                must_tell = self._tell_at <= now
            self._feed(self._supervision.tick)
            if must_tell:
                self._tell(_TELL_S)

    def _call_back(self) -> None:
        """Call the program's functions with the events, one after the other."""
        while (event := self._events.get()) is not None:  # no deadline: `stop` ends it
            with self._changed:
                callbacks = tuple(self._callbacks)
            for callback in callbacks:
                try:
                    callback(event)
                except Exception:
                    _log.exception("an on_membership callback raised %r", event)


def _unused_names(role: str, count: int, taken: Container[str]) -> list[str]:
    """Return the next names of a role that were never used."""
    names = (f"{role}{number}" for number in itertools.count())
    return list(itertools.islice((name for name in names if name not in taken), count))
