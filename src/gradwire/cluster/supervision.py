"""The rules for restarting lost workers, without threads, processes or a clock.

    serving --lost--> ending --process_ended--> waiting --tick--> starting --process_started--> rebuilding
       ^                 |                         ^                 |                             |
       |                 v                         +--start_failed---+                             |
       |               lost, for good                                                              |
       +-------------------------------------------- rebuilt --------------------------------------+

Every process that is started is a *life* with a number of its own. Events name the life that they are about, so that what is
told too late of an earlier one changes nothing. `gradwire.cluster.monitor` carries out the actions.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from gradwire.errors import ConfigurationError

Restart = Literal["never", "on-loss"]
"""What to do with a lost worker."""

MembershipChange = Literal["joined", "lost", "restarted", "left"]
"""Kinds of membership events."""

_DEFAULT_LOST_AFTER_S = 30.0
_WINDOW_S = 60.0  # in which restarts are counted
_SHORT_LIFE_S = 5.0  # a worker that is lost sooner than that waits longer for its next start
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0
_QUESTIONS = 5  # in the time after which a worker counts as lost
_LONGEST_INTERVAL_S = 5.0
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisionOptions:
    """Supervision options of a cluster; see `gradwire.Cluster.local`.

    Attributes:
        restart: Whether a lost worker is restarted.
        lost_after_s: Seconds without a response after which a worker counts as lost; 0 for never, None for the default: 30
            if workers are restarted, and never otherwise.
        max_restarts: Restarts of one worker within a minute.
    """

    restart: Restart = "never"
    lost_after_s: float | None = None
    max_restarts: int = 10

    def __post_init__(self) -> None:
        if self.restart not in ("never", "on-loss"):
            raise ConfigurationError(f'restart must be "never" or "on-loss", not {self.restart!r}')
        if self.lost_after_s is not None and not 0 <= self.lost_after_s < _NEVER:
            raise ConfigurationError(f"lost_after must be a number of seconds, 0 or more, not {self.lost_after_s!r}")
        if self.max_restarts < 0:
            raise ConfigurationError(f"max_restarts must be an integer of at least 0, not {self.max_restarts!r}")

    @property
    def silence_s(self) -> float:
        """Seconds without an answer after which a worker counts as lost."""
        if self.lost_after_s is None:
            return _DEFAULT_LOST_AFTER_S if self.restart == "on-loss" else _NEVER
        return self.lost_after_s or _NEVER

    @property
    def interval_s(self) -> float:
        """Seconds between two questions whether a worker is alive."""
        return min(self.silence_s / _QUESTIONS, _LONGEST_INTERVAL_S) if self.silence_s < _NEVER else _NEVER


class Phase(enum.Enum):
    """Phase of a member's lifecycle."""

    SERVING = "serving"
    ENDING = "ending"  # it is lost, and its process is being ended
    WAITING = "waiting"  # for the time of the next start
    STARTING = "starting"
    REBUILDING = "rebuilding"  # the new process serves calls, and `on_restart` runs
    LOST = "lost"  # for good

    @property
    def has_process(self) -> bool:
        """Whether a process of the member counts as alive."""
        return self in (Phase.SERVING, Phase.REBUILDING)

    @property
    def is_restart(self) -> bool:
        return self not in (Phase.SERVING, Phase.LOST)


@dataclass(frozen=True, slots=True)
class EndProcess:
    """Kill the process of that life; `process_ended` must follow, whether that was possible or not."""

    name: str
    life: int


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process under that name; `process_started` or `start_failed` must follow."""

    name: str
    life: int


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Announce the new process and let the program rebuild its state; `rebuilt` or `lost` must follow."""

    name: str
    life: int


@dataclass(frozen=True, slots=True)
class AskAlive:
    """Check whether the process responds; `answered` or `not_answered` must follow."""

    name: str
    life: int


@dataclass(frozen=True, slots=True)
class Announce:
    """Notify the program and the other workers of a membership event."""

    change: MembershipChange
    name: str
    life: int
    reason: str | None = None


Action = EndProcess | StartProcess | Rebuild | AskAlive | Announce


@dataclass(slots=True)
class _Member:
    life: int
    began: float  # when this life began to serve
    last_answer: float  # when it last answered, or began
    phase: Phase = Phase.SERVING
    reason: str | None = None  # why the last life was lost
    due: float = _NEVER  # when to start the next one
    num_restarts: int = 0
    num_short: int = 0  # lives that ended soon after their start, in a row
    restarts: deque[float] = field(default_factory=deque)  # when the last ones were
    is_asked: bool = False


class Supervision:
    """The members of one cluster. `now` is the time of a clock that never goes back; it may stand still."""

    def __init__(self, options: SupervisionOptions) -> None:
        self._options = options
        self._members: dict[str, _Member] = {}
        self._last_life = 0
        self._last_tick: float | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        states = ", ".join(f"{name}: {member.phase.value}" for name, member in self._members.items())
        return f"<Supervision {'closed' if self._is_closed else states or 'of no worker'}>"

    # -- what is known ---------------------------------------------------------------------------------------------------

    def new_life(self) -> int:
        """Return the number of the next life."""
        self._last_life += 1
        return self._last_life

    def phase(self, name: str) -> Phase | None:
        """Return the phase of a member; None if there is none of that name."""
        member = self._members.get(name)
        return None if member is None else member.phase

    def num_restarts(self, name: str) -> int:
        """Return the number of restarts of a member."""
        member = self._members.get(name)
        return 0 if member is None else member.num_restarts

    def reason(self, name: str) -> str | None:
        """Return why the last process of a member was lost; None if it serves."""
        member = self._members.get(name)
        return None if member is None else member.reason

    def lost_text(self, name: str) -> str | None:
        """Return why a member cannot be called now, and whether it is being restarted; None if it can."""
        member = self._members.get(name)
        if member is None or member.phase.has_process:
            return None
        restart = "; it is being restarted, and Cluster.wait_for_workers() waits for it"
        return f"{member.reason}{'' if member.phase is Phase.LOST else restart}"

    def num_in(self, *phases: Phase) -> int:
        """Return how many members are in one of these phases."""
        return sum(member.phase in phases for member in self._members.values())

    def next_due(self) -> float:
        """Return when `tick` must be called at the latest."""
        waiting = (member.due for member in self._members.values() if member.phase is Phase.WAITING)
        due = min(waiting, default=_NEVER)
        if self._last_tick is None and self._options.interval_s < _NEVER:
            return 0.0
        is_asking = any(member.phase.has_process for member in self._members.values())
        return min(due, (self._last_tick or 0.0) + self._options.interval_s if is_asking else _NEVER)

    # -- events ----------------------------------------------------------------------------------------------------------

    def joined(self, name: str, life: int, now: float) -> list[Action]:
        """Handle that a worker serves after its first start."""
        if self._is_closed:
            return [EndProcess(name, life)]
        self._members[name] = _Member(life, began=now, last_answer=now)
        return [Announce("joined", name, life)]

    def lost(self, name: str, life: int, reason: str, now: float) -> list[Action]:
        """Handle that the process of a worker ended, does not respond, or could not be rebuilt.

        Ignored while the process is being started: `process_started` or `start_failed` comes first, so that the process is
        known and can be ended before the next one is started.
        """
        member = self._find(name, life)
        if member is None or not member.phase.has_process:
            return []
        is_short = now - member.began < _SHORT_LIFE_S
        member.num_short = member.num_short + 1 if is_short else 0
        self._lose(member, reason, now)
        if member.phase is Phase.WAITING:
            member.phase = Phase.ENDING
        return [Announce("lost", name, life, self.lost_text(name)), EndProcess(name, life)]

    def process_ended(self, name: str, life: int, now: float) -> list[Action]:
        """Handle that the process of a lost worker has ended, or is permanently out of reach."""
        member = self._find(name, life)
        if member is not None and member.phase is Phase.ENDING:
            member.phase = Phase.WAITING
            return self.tick(now)
        return []

    def process_started(self, name: str, life: int, now: float) -> list[Action]:
        """Handle that the new process of a worker can be called."""
        member = self._find(name, life)
        if member is None or self._is_closed:
            return [EndProcess(name, life)]  # removed in the meantime
        assert member.phase is Phase.STARTING
        member.phase, member.began, member.last_answer, member.is_asked = Phase.REBUILDING, now, now, False
        return [Rebuild(name, life)]

    def start_failed(self, name: str, life: int, reason: str, now: float) -> list[Action]:
        """Handle that no new process could be started, or that it ended before it could be called."""
        member = self._find(name, life)
        if member is None or member.phase is not Phase.STARTING:
            return []
        member.num_short += 1
        self._lose(member, reason, now)
        return [Announce("lost", name, life, self.lost_text(name)), *self.tick(now)]

    def rebuilt(self, name: str, life: int) -> list[Action]:
        """Handle that `on_restart` has rebuilt the state of the new process."""
        member = self._find(name, life)
        if member is None or member.phase is not Phase.REBUILDING:
            return []
        member.phase, member.reason = Phase.SERVING, None
        return [Announce("restarted", name, life)]

    def answered(self, name: str, life: int, now: float) -> None:
        """Handle the answer to a liveness check."""
        member = self._find(name, life)
        if member is not None:
            member.last_answer, member.is_asked = now, False

    def not_answered(self, name: str, life: int) -> None:
        """Handle that a liveness check was lost, so that it can be repeated."""
        member = self._find(name, life)
        if member is not None:
            member.is_asked = False

    def removed(self, name: str, reason: str) -> list[Action]:
        """Handle that the program removed a worker; the caller stops its process."""
        member = self._members.pop(name, None)
        return [] if member is None or self._is_closed else [Announce("left", name, member.life, reason)]

    def closed(self) -> None:
        """Handle that the cluster is closing: no process is started from now on."""
        self._is_closed = True

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due at `now`."""
        if self._is_closed:
            return []
        actions: list[Action] = []
        for name, member in self._members.items():
            if member.phase is Phase.WAITING and member.due <= now:
                member.phase, member.due, member.life = Phase.STARTING, _NEVER, self.new_life()
                member.num_restarts += 1
                member.restarts.append(now)
                actions.append(StartProcess(name, member.life))
        return [*actions, *self._look_for_silence(now)]

    # -- rules -----------------------------------------------------------------------------------------------------------

    def _find(self, name: str, life: int) -> _Member | None:
        member = self._members.get(name)
        return None if member is None or member.life != life or self._is_closed else member

    def _lose(self, member: _Member, reason: str, now: float) -> None:
        """Decide whether a worker gets another life, and when."""
        member.reason, member.is_asked = reason, False
        while member.restarts and member.restarts[0] <= now - _WINDOW_S:
            member.restarts.popleft()
        limit = self._options.max_restarts
        if self._options.restart == "never":
            member.phase = Phase.LOST
        elif len(member.restarts) >= limit:
            member.phase = Phase.LOST
            member.reason = (
                f"{reason}; it was restarted {limit} times within {_WINDOW_S:g} s and will not be restarted again"
            )
        else:
            is_first = member.num_short <= 1
            delay_s = 0.0 if is_first else min(_FIRST_DELAY_S * 2.0 ** (member.num_short - 2), _LONGEST_DELAY_S)
            member.phase, member.due = Phase.WAITING, now + delay_s

    def _look_for_silence(self, now: float) -> list[Action]:
        interval_s, silence_s = self._options.interval_s, self._options.silence_s
        if interval_s == _NEVER or (self._last_tick is not None and now < self._last_tick + interval_s):
            return []
        # A time in which this process did not run, because it was stopped itself, is not a silence of the others.
        missed_s = 0.0 if self._last_tick is None else max(0.0, now - self._last_tick - 2 * interval_s)
        self._last_tick = now
        actions: list[Action] = []
        for name, member in self._members.items():
            if not member.phase.has_process:
                continue
            member.last_answer = min(now, member.last_answer + missed_s)
            if now - member.last_answer >= silence_s:
                silent_s = now - member.last_answer
                text = f"it has not responded for {silent_s:.0f} s (stopped, or a function is holding the GIL)"
                actions += self.lost(name, member.life, text, now)
            elif not member.is_asked:
                member.is_asked = True
                actions.append(AskAlive(name, member.life))
        return actions
