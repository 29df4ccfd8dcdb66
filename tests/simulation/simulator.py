"""A backward pass over simulated workers: the real state machines, a made-up engine, a scheduler that is out for trouble.

Each worker drives a real `BackwardState`, which decides about commit and abort, too; all else is simulated, so that one
seed is one exact course of events. The scheduler delivers messages in any order and several times, lets engine runs and
forward calls overlap, ends workers at any moment, tells the others of it at different times (before or after the last
messages of the dead, some of which are lost), and lets nodes fail.

Out of scope: a message between two workers that both live is never lost. Messages travel over streams; a stream that
breaks is the loss of a worker. And the root's own death in the middle of its commit may leave gradients on some workers
only: they are right, but nobody is left who has been told that they are there.
"""

from __future__ import annotations

import enum
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass

from gradwire.autograd._backward_state import Mode, PassPhase, PassSnapshot, is_stalled
from simulation.messages import Lost, Message, Propagate
from simulation.programs import RandomProgram
from simulation.recording import Node, Recording, Steps
from simulation.workers import Violation, Worker

MAX_STEPS = 20_000
_PATIENCE = 0.05  # how often something that shall be late happens although other things could


class Outcome(enum.Enum):
    """How a pass ended."""

    COMMITTED = "committed"
    FAILED = "failed"
    STALLED = "stalled, and the probe says so"
    ROOT_LOST = "nobody is left who would want to know"


@dataclass(frozen=True, slots=True)
class Crash:
    """The end of a worker, after that many steps of the simulation and messages of its own; with 0, before the pass."""

    worker: int
    num_steps: int = 0
    num_messages: int = 0

    @classmethod
    def draw(cls, rng: random.Random, num_workers: int) -> Crash:
        """Often around something that the worker does."""
        num_steps = rng.choice((0, 0, rng.randint(1, 100)))
        return cls(rng.randrange(num_workers), num_steps, rng.choice((0, rng.randint(1, 8))))


@dataclass(frozen=True, slots=True)
class Trouble:
    """What goes wrong in a run.

    Attributes:
        repeats: Chance that a message arrives twice.
        crashes: Workers that end.
        survives: Chance that a message of a dead worker still arrives.
        node_fails: Whether the backward of some node raises.
    """

    repeats: float = 0.0
    crashes: tuple[Crash, ...] = ()
    survives: float = 1.0
    node_fails: bool = False

    @classmethod
    def draw(cls, rng: random.Random, num_workers: int) -> Trouble:
        """Something, often nothing."""
        crashes = tuple(Crash.draw(rng, num_workers) for _ in range(rng.choice((0, 0, 1, 1, 2))))
        return cls(rng.choice((0.0, 0.0, 0.3)), crashes, rng.choice((0.0, 0.5, 1.0)), rng.random() < 0.15)


@dataclass(frozen=True, slots=True)
class _Event:
    """Something that could happen next; `who` and `kind` let the scheduler put it off."""

    who: int
    kind: str
    happen: Callable[[], None]


@dataclass(eq=False, slots=True)
class _Envelope:
    sender: int
    to: int
    message: Message


class Simulation:
    """One pass of one program, from one seed.

    Args:
        seed: Decides everything.
        mode: SMART or FAST.
        trouble: Drawn if not given.
        program: Drawn if not given.
    """

    def __init__(
        self, seed: int, mode: Mode = Mode.SMART, trouble: Trouble | None = None, program: Recording | None = None
    ) -> None:
        self.rng = rng = random.Random(seed)
        self.mode = mode
        self.program = program or RandomProgram(rng, rng.choice((1, 2, 2, 3, 3, 4, 4, 5)))
        num_workers = len(self.program.records)
        self._trouble = trouble or Trouble.draw(rng, num_workers)
        if self._trouble.node_fails and self.program.operations:
            rng.choice(self.program.operations).fails = True
        self._tasks = self.program.tasks
        self._under_way: list[_Envelope] = []
        self._num_messages = [0] * num_workers  # that each worker has sent
        self._num_steps = 0
        self._has_failed = False
        self.workers = [Worker(self, rank) for rank in range(num_workers)]
        self._root = self.workers[self.program.root]
        self._late = self._draw_late()
        self._probe = _Probe(self) if rng.random() < 0.5 else None

    def _draw_late(self) -> set[tuple[int, str]]:
        """Which kinds of events, on which workers, come late."""
        kinds = ("message", "lost", "engine", "forward", "probe")
        share = self.rng.choice((0.0, 0.2, 0.5))
        return {(rank, kind) for rank in range(len(self.workers)) for kind in kinds if self.rng.random() < share}

    # -- what workers do ---------------------------------------------------------------------------------------------

    def send(self, sender: int, to: int, message: Message) -> None:
        """Puts a message on its way, perhaps twice."""
        self._num_messages[sender] += 1
        for _ in range(2 if self.rng.random() < self._trouble.repeats else 1):
            if self.workers[to].is_alive:
                self._under_way.append(_Envelope(sender, to, message))

    def note_failure(self) -> None:
        """A node failed, so the pass may."""
        self._has_failed = True

    # -- the scheduler -----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Runs the pass until nothing moves any more, and judges how it ended.

        Raises:
            Violation: A rule was broken; the text says which.
        """
        self._crash_if_due()
        for _ in range(self.rng.choice((0, 0, 5))):  # it takes a while until everybody knows who is gone
            self._happen(self._events())
        if self._root.is_alive:
            self._root.join()
        while self._happen(self._events()):
            if self._num_steps > MAX_STEPS:
                raise Violation(f"no end after {MAX_STEPS} steps")
        return self._judge()

    def _events(self) -> list[_Event]:
        events = [_Event(item.to, _kind(item), functools.partial(self._deliver, item)) for item in self._under_way]
        for worker in self.workers:
            if worker.is_alive:
                events += [_Event(worker.rank, "engine", step) for step in worker.steps()]
        events += [_Event(0, "forward", functools.partial(self._advance, task)) for task in self._tasks]
        if events and self._probe is not None:
            events.append(_Event(0, "probe", self._probe.step))
        return events

    def _happen(self, events: list[_Event]) -> bool:
        """One of these happens; False if there is none."""
        if not events:
            return False
        self._num_steps += 1
        prompt = [event for event in events if (event.who, event.kind) not in self._late]
        chosen = self.rng.choice(prompt if prompt and self.rng.random() > _PATIENCE else events)
        chosen.happen()
        self._crash_if_due()
        return True

    def _deliver(self, envelope: _Envelope) -> None:
        self._under_way.remove(envelope)
        self.workers[envelope.to].handle(envelope.sender, envelope.message)

    def _advance(self, task: Steps) -> None:
        try:
            next(task)
        except StopIteration:
            self._tasks.remove(task)

    def _crash_if_due(self) -> None:
        for crash in self._trouble.crashes:
            is_due = crash.num_steps <= self._num_steps and crash.num_messages <= self._num_messages[crash.worker]
            if is_due and self.workers[crash.worker].is_alive:
                self._crash(crash.worker)

    def _crash(self, rank: int) -> None:
        self.workers[rank].is_alive = False
        self._under_way = [item for item in self._under_way if item.to != rank and self._survives(item, rank)]
        self._under_way += [_Envelope(rank, item.rank, Lost()) for item in self.workers if item.is_alive]

    def _survives(self, item: _Envelope, dead: int) -> bool:
        is_of_the_dead = item.sender == dead and not isinstance(item.message, Lost)
        return not is_of_the_dead or self.rng.random() < self._trouble.survives

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of the pass can move any more."""
        is_working = any(worker.is_alive and worker.steps() for worker in self.workers)
        return not is_working and not any(self._is_news(item) for item in self._under_way)

    def _is_news(self, item: _Envelope) -> bool:
        message = item.message
        return isinstance(message, Propagate) and not self.workers[item.to].has_handled(item.sender, message)

    # -- the judge ---------------------------------------------------------------------------------------------------

    def _judge(self) -> Outcome:
        alive = [worker for worker in self.workers if worker.is_alive]
        unfinished = [worker.rank for worker in alive if worker.is_running]
        if unfinished:
            return self._judge_stall(unfinished)
        expected = self.program.gradients_in_one_process()
        for worker in alive:
            self._judge_worker(worker, worker.visible, expected[worker.rank])
        if not self._root.is_alive:
            return Outcome.ROOT_LOST
        if self._root.phase is PassPhase.COMMITTED:
            return Outcome.COMMITTED
        if not (self._has_failed or len(alive) < len(self.workers)):
            raise Violation("the pass failed for no reason")
        return Outcome.FAILED

    def _judge_worker(self, worker: Worker, found: dict[Node, int], expected: dict[Node, int]) -> None:
        """All or nothing: the right gradients where the root has committed, none where it has not."""
        has_gradients = worker.phase is PassPhase.COMMITTED
        if has_gradients and found != expected:
            raise Violation(f"worker {worker.rank} has {found}, not {expected}")
        takes_part = worker.phase is not None or bool(expected)
        if self._root.is_alive and takes_part and has_gradients != (self._root.phase is PassPhase.COMMITTED):
            raise Violation(f"the pass is {self._root.phase} at its root, {worker.phase} on {worker.rank}")
        for leaf, gradients in worker.gradients.items():
            if leaf.has_hooks and len(gradients) > 1:
                raise Violation(f"hooks of {leaf} were shown {gradients}, not the sum")

    def _judge_stall(self, unfinished: list[int]) -> Outcome:
        probe = _Probe(self)
        for _ in range(2 * len(self.workers) + 2):
            probe.step()
        if self.mode is Mode.SMART or not probe.has_found_stall:
            raise Violation(f"the pass never ends on workers {unfinished}")
        return Outcome.STALLED


class _Probe:
    """The stall probe: asks one worker after the other, twice, while things go on."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._before: dict[int, PassSnapshot] = {}
        self._now: dict[int, PassSnapshot] = {}
        self.has_found_stall = False

    def step(self) -> None:
        """Asks one more worker; after the last, what was heard must not be called a stall unless it is one."""
        workers = self._simulation.workers
        known = {peer for item in self._now.values() for peer in item.peers} | {self._simulation.program.root}
        todo = [rank for rank in sorted(known - self._now.keys()) if workers[rank].is_alive]
        if todo:
            self._now[todo[0]] = workers[todo[0]].snapshot()
            return
        self.has_found_stall = is_stalled(self._before, self._now)
        is_sure = self._simulation.mode is Mode.SMART or all(
            item.is_alive for item in workers
        )  # else a loss may free it
        if self.has_found_stall and is_sure and not self._simulation.is_quiet:
            raise Violation(f"called a stall while things move: {self._now}")
        self._before, self._now = self._now, {}


def _kind(envelope: _Envelope) -> str:
    return "lost" if isinstance(envelope.message, Lost) else "message"
