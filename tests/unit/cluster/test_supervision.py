"""The rules of restarts: when a worker is lost, when it is started again, and when not any more."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gradwire.cluster.supervision import (
    Action,
    Announce,
    AskAlive,
    EndProcess,
    Phase,
    Rebuild,
    StartProcess,
    Supervision,
    SupervisionOptions,
)
from gradwire.errors import ConfigurationError

_WINDOW_S = 60.0


def make(**options: object) -> tuple[Supervision, int]:
    """A cluster of one worker that has just joined, and the number of its life."""
    supervision = Supervision(SupervisionOptions(**{"restart": "on-loss", "lost_after_s": 0, **options}))  # type: ignore[arg-type]
    life = supervision.new_life()
    assert supervision.joined("w", life, 0.0) == [Announce("joined", "w", life)]
    return supervision, life


def test_a_lost_worker_stays_lost_by_default() -> None:
    supervision, life = make(restart="never")
    lost, end = supervision.lost("w", life, "killed by SIGKILL", 1.0)
    assert lost == Announce("lost", "w", life, "killed by SIGKILL")
    assert end == EndProcess("w", life)
    assert supervision.process_ended("w", life, 2.0) == []
    assert supervision.tick(1e9) == []
    assert supervision.phase("w") is Phase.LOST
    assert supervision.next_due() == float("inf")


def test_a_lost_worker_is_ended_started_rebuilt_and_serves() -> None:
    supervision, life = make()
    lost, end = supervision.lost("w", life, "killed by SIGKILL", 10.0)
    assert isinstance(lost, Announce)
    assert "killed by SIGKILL; it is being restarted" in (lost.reason or "")
    assert end == EndProcess("w", life)
    assert supervision.lost("w", life, "told again", 10.0) == []
    (start,) = supervision.process_ended("w", life, 10.0)
    assert start == StartProcess("w", life + 1)
    assert "being restarted" in (supervision.lost_text("w") or "")
    assert supervision.process_started("w", life + 1, 11.0) == [Rebuild("w", life + 1)]
    assert supervision.lost_text("w") is None, "it can be called in order to be rebuilt"
    assert supervision.phase("w") is Phase.REBUILDING
    assert supervision.rebuilt("w", life + 1) == [Announce("restarted", "w", life + 1)]
    assert supervision.phase("w") is Phase.SERVING
    assert supervision.num_restarts("w") == 1


def test_a_worker_that_cannot_be_rebuilt_is_lost_again() -> None:
    supervision, life = make()
    supervision.lost("w", life, "killed", 10.0)
    supervision.process_ended("w", life, 10.0)
    supervision.process_started("w", life + 1, 10.0)
    lost, end = supervision.lost("w", life + 1, "on_restart raised ValueError: no checkpoint", 10.1)
    assert isinstance(lost, Announce)
    assert "no checkpoint" in (lost.reason or "")
    assert end == EndProcess("w", life + 1)
    assert supervision.rebuilt("w", life + 1) == [], "too late"


def fail_at_once(supervision: Supervision, life: int, now: float) -> tuple[list[Action], float]:
    """Lose the worker the moment it serves, and wait until it would be started again; return what happens, and when."""
    supervision.lost("w", life, "killed", now)
    actions = supervision.process_ended("w", life, now)
    if not actions and supervision.next_due() < float("inf"):
        now = supervision.next_due()
        actions = supervision.tick(now)
    return actions, now


def test_the_pauses_between_restarts_grow_and_there_is_an_end() -> None:
    supervision, life = make(max_restarts=6)
    now, pauses = 0.0, []
    while True:
        actions, then = fail_at_once(supervision, life, now)
        if not actions:
            break
        pauses.append(then - now)
        now, life = then, life + 1
        assert actions == [StartProcess("w", life)]
        supervision.process_started("w", life, now)
        supervision.rebuilt("w", life)
    assert pauses == pytest.approx([0.0, 0.1, 0.2, 0.4, 0.8, 1.6])
    assert supervision.phase("w") is Phase.LOST
    assert supervision.lost_text("w") == "killed; it was restarted 6 times within 60 s and will not be restarted again"


def test_a_long_life_ends_the_pauses() -> None:
    supervision, life = make()
    now = 0.0
    for _ in range(5):
        _, now = fail_at_once(supervision, life, now)
        life += 1
        supervision.process_started("w", life, now)
        supervision.rebuilt("w", life)
    actions, then = fail_at_once(supervision, life, now + 100.0)
    assert actions == [StartProcess("w", life + 1)]
    assert then == now + 100.0


def test_a_start_that_fails_is_tried_again() -> None:
    supervision, life = make()
    supervision.lost("w", life, "killed", 10.0)
    supervision.process_ended("w", life, 10.0)
    (lost, start) = supervision.start_failed("w", life + 1, "no room", 11.0)
    assert isinstance(lost, Announce)
    assert "no room" in (lost.reason or "")
    assert start == StartProcess("w", life + 2)
    (lost,) = supervision.start_failed("w", life + 2, "no room", 11.0)
    assert supervision.tick(supervision.next_due()) == [StartProcess("w", life + 3)]


def test_removing_wins_over_a_restart() -> None:
    supervision, life = make()
    supervision.lost("w", life, "killed", 1.0)
    supervision.process_ended("w", life, 1.0)
    assert supervision.removed("w", "removed") == [Announce("left", "w", life + 1, "removed")]
    assert supervision.process_started("w", life + 1, 2.0) == [EndProcess("w", life + 1)]
    assert supervision.phase("w") is None
    assert supervision.tick(1e9) == []


def test_closing_wins_over_everything() -> None:
    supervision, life = make()
    supervision.lost("w", life, "killed", 1.0)
    supervision.closed()
    assert supervision.process_ended("w", life, 1.0) == []
    assert supervision.tick(1e9) == []
    assert supervision.process_started("w", life + 1, 2.0) == [EndProcess("w", life + 1)]
    assert supervision.joined("v", 99, 2.0) == [EndProcess("v", 99)]


# -- workers that do not answer ------------------------------------------------------------------------------------------


def run_ticks(supervision: Supervision, until: float, answers: bool) -> list[Action]:
    """Tick whenever it is due, and answer the questions; return the other actions."""
    found: list[Action] = []
    while (now := supervision.next_due()) <= until:
        for action in supervision.tick(now):
            if isinstance(action, AskAlive):
                if answers:
                    supervision.answered(action.name, action.life, now)
            else:
                found.append(action)
    return found


def test_a_worker_that_does_not_answer_is_lost() -> None:
    supervision, life = make(lost_after_s=10.0)
    assert run_ticks(supervision, 100.0, answers=True) == []
    lost, end = run_ticks(supervision, 112.0, answers=False)
    assert isinstance(lost, Announce)
    assert "has not responded for 10 s" in (lost.reason or "")
    assert end == EndProcess("w", life)


def test_a_driver_that_was_stopped_itself_blames_no_worker() -> None:
    supervision, _ = make(lost_after_s=10.0)
    run_ticks(supervision, 20.0, answers=True)
    assert all(isinstance(action, AskAlive) for action in supervision.tick(3600.0))
    assert supervision.phase("w") is Phase.SERVING
    assert run_ticks(supervision, 3605.0, answers=True) == []
    assert len(run_ticks(supervision, 3620.0, answers=False)) == 2, "the next silence counts"


def test_a_question_that_is_lost_is_asked_again() -> None:
    supervision, life = make(lost_after_s=10.0)
    assert supervision.tick(0.0) == [AskAlive("w", life)]
    assert supervision.tick(2.0) == []
    supervision.not_answered("w", life)
    assert supervision.tick(4.0) == [AskAlive("w", life)]


def test_nothing_is_asked_without_a_limit() -> None:
    supervision, _ = make(restart="never", lost_after_s=None)
    assert supervision.next_due() == float("inf")
    assert SupervisionOptions(restart="on-loss").silence_s == 30.0


@pytest.mark.parametrize(
    "options", [{"restart": "always"}, {"lost_after_s": -1.0}, {"lost_after_s": float("nan")}, {"max_restarts": -1}]
)
def test_wrong_options(options: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=r"must be"):
        SupervisionOptions(**options)  # type: ignore[arg-type]


# -- any order of events ------------------------------------------------------------------------------------------------


class World:
    """Processes that do what the actions say, some time; checks what must hold at every moment."""

    def __init__(self, max_restarts: int) -> None:
        self.now = 0.0
        self.max_restarts = max_restarts
        options = SupervisionOptions(restart="on-loss", lost_after_s=20.0, max_restarts=max_restarts)
        self.supervision = Supervision(options)
        self.members: dict[str, int] = {}  # the life of each member
        self.live: dict[str, set[int]] = defaultdict(set)  # processes that run and that no EndProcess was asked for
        self.open: list[Action] = []  # actions that have not ended
        self.starts: dict[str, list[float]] = defaultdict(list)
        self.silent: set[int] = set()
        self.is_closed = False
        for _ in range(2):
            self.add()

    def add(self) -> None:
        name, life = f"w{len(self.starts)}", self.supervision.new_life()
        self.starts[name] = []
        self.live[name].add(life)
        if not self.is_closed:
            self.members[name] = life
        self.take(self.supervision.joined(name, life, self.now))

    def take(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcess):
                assert not self.is_closed
                assert action.name in self.members
                assert not self.live[action.name], "two incarnations at once"
                self.starts[action.name].append(self.now)
                recent = [when for when in self.starts[action.name] if when > self.now - _WINDOW_S]
                assert len(recent) <= self.max_restarts
                self.members[action.name] = action.life
            elif isinstance(action, EndProcess):
                self.live[action.name].discard(action.life)
            elif self.is_closed:
                raise AssertionError(f"{action} after the end")
            if not isinstance(action, Announce):
                self.open.append(action)
        for name, lives in self.live.items():
            assert len(lives) <= 1, f"two incarnations of {name} at once"

    def finish(self, action: Action, is_good: bool) -> None:
        """Let an action end, well or not."""
        self.open.remove(action)
        supervision, name, life, now = self.supervision, action.name, getattr(action, "life", 0), self.now
        if isinstance(action, EndProcess):
            self.take(supervision.process_ended(name, life, now))
        elif isinstance(action, StartProcess):
            if is_good:
                self.live[name].add(life)
                self.take(supervision.process_started(name, life, now))
            else:
                self.take(supervision.start_failed(name, life, "no room", now))
        elif isinstance(action, Rebuild):
            self.take(supervision.rebuilt(name, life) if is_good else supervision.lost(name, life, "on_restart", now))
        elif is_good and life not in self.silent:
            supervision.answered(name, life, now)
        else:
            supervision.not_answered(name, life)

    def step(self, kind: int, choice: int, amount: float) -> None:
        names = sorted(self.members) or [""]
        name = names[choice % len(names)]
        if kind <= 2 and self.open:
            self.finish(self.open[choice % len(self.open)], is_good=kind != 0)
        elif kind == 3:
            self.take(self.supervision.lost(name, self.members.get(name, 0), "killed", self.now))
        elif kind == 4:  # told of a life that is long over, or was never there
            self.take(
                self.supervision.lost(name, choice, "killed", self.now) if choice not in self.members.values() else []
            )
            self.take(self.supervision.process_ended(name, -choice - 1, self.now))
        elif kind == 5:
            self.silent.add(self.members.get(name, 0))
        elif kind == 6 and choice % 4 == 0 and name:
            self.members.pop(name)
            self.live[name].clear()
            self.take(self.supervision.removed(name, "removed"))
        elif kind == 7 and choice % 4 == 0:
            self.add()
        elif kind == 8 and choice % 16 == 0:
            self.is_closed = True
            self.supervision.closed()
        else:
            self.now += amount
            self.take(self.supervision.tick(self.now))

    def settle(self) -> None:
        """Let everything end well; then each worker serves, or is lost for good."""
        self.silent.clear()
        for _ in itertools.repeat(None, 200):
            for action in tuple(self.open):
                self.finish(action, is_good=True)
            self.now += 3.0
            self.take(self.supervision.tick(self.now))
        phases = {self.supervision.phase(name) for name in self.members}
        assert self.is_closed or phases <= {Phase.SERVING, Phase.LOST}


@settings(max_examples=300)
@given(
    max_restarts=st.integers(0, 3),
    steps=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 31), st.floats(0.0, 30.0)), max_size=60),
)
@example(2, [(0, 0, 20.0), (0, 0, 0.0), (3, 0, 0.0)])  # a loss is told before the start has ended
def test_any_order_of_events(max_restarts: int, steps: list[tuple[int, int, float]]) -> None:
    world = World(max_restarts)
    for step in steps:
        world.step(*step)
    world.settle()
