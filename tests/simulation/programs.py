"""Random forward programs over several workers.

Functions are generators that stop between any two steps, so calls overlap, and some are still under way when the backward
pass begins. What happens in them: work on arguments, parameters and what earlier calls left on the worker; calls to other
workers and to the own one, waited for or not, with results used or not; calls that fail before they arrive or in the
function; replies that come when nobody takes them any more.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

from simulation.recording import Kind, Node, Record, Recording, Steps, Value

_WEIGHTS = (-2, -1, 1, 2, 3)
_DEPTH = 3  # of calls in calls


@dataclass(eq=False, slots=True)
class _Call:
    results: list[Value] = field(default_factory=list)
    is_over: bool = False


class RandomProgram(Recording):
    """A program made up while it runs, until its loss is there; some calls may still be under way then."""

    def __init__(self, rng: random.Random, num_workers: int) -> None:
        super().__init__(rng.randrange(num_workers), [Record(_make_leaves(rng, rank)) for rank in range(num_workers)])
        self._rng = rng
        self._calls_left = rng.randint(1, 12)
        self._trouble = rng.choice((0.0, 0.0, 0.05, 0.25))  # how often a call goes wrong somewhere
        self._is_tidy = rng.random() < 0.3  # nothing is left unused or under way
        main = self._main()
        while not self.roots:
            next(rng.choice([main, *self.tasks]), None)
        self.tasks = [task for task in self.tasks if inspect.getgeneratorstate(task) != inspect.GEN_CLOSED]

    # -- what functions do -----------------------------------------------------------------------------------------

    def _main(self) -> Steps:
        rng = self._rng
        values = yield from self._body(self.root, [], _DEPTH)
        values += self._operate(self.root, [value for value in values if self._is_used()] or values[:1])
        candidates = [value for value in values[-2:] if value.node.kind is not Kind.LEAF]
        chosen = rng.sample(candidates, rng.choice((1, 1, min(2, len(candidates)))))
        self.roots = [(value, rng.choice(_WEIGHTS)) for value in chosen]

    def _body(self, worker: int, arguments: Iterable[Value], depth: int) -> Generator[None, None, list[Value]]:
        """A function: does something with its arguments, and returns all that it has."""
        rng, record = self._rng, self.records[worker]
        values = [*arguments, Value(rng.choice(record.leaves))]
        started: list[_Call] = []
        for _ in range(rng.randint(2, 4) + 2 * (depth == _DEPTH)):
            yield
            dice = rng.random()
            if dice < 0.3:
                values += self._operate(worker, self._some_of(values, (1, 1, 2, 3)))
            elif dice < 0.38:
                record.kept.append(rng.choice(values))
            elif dice < 0.5 and record.kept:
                values.append(rng.choice(record.kept))
            elif depth and self._calls_left:
                started.append(self._start_call(worker, values, depth))
            values += yield from self._take_results(started, rng.random() < 0.4 or self._is_tidy)
        values += yield from self._take_results(started, rng.random() < 0.7 or self._is_tidy)
        return values

    def _take_results(self, started: list[_Call], waits: bool) -> Generator[None, None, list[Value]]:
        """What calls returned that are over, or of all if they are waited for; some of it is left unused."""
        while waits and not all(call.is_over for call in started):
            yield
        found = [result for call in started for result in call.results if self._is_used()]
        for call in started:
            call.results = []
        return found

    def _some_of(self, values: Sequence[Value], numbers: Sequence[int]) -> list[Value]:
        """A few values, perhaps one twice, the latest more often than others."""
        rng = self._rng
        return [rng.choice(values[-3:] if rng.random() < 0.7 else values) for _ in range(rng.choice(numbers))]

    def _operate(self, worker: int, inputs: Sequence[Value]) -> list[Value]:
        rng = self._rng
        if rng.random() < 0.5:
            inputs = [*inputs, Value(rng.choice(self.records[worker].leaves))]
        num_outputs = rng.choice((1, 1, 1, 2))
        return self.operate(worker, inputs, [tuple(rng.choices(_WEIGHTS, k=num_outputs)) for _ in inputs])

    # -- calls -----------------------------------------------------------------------------------------------------

    def _start_call(self, caller: int, values: Sequence[Value], depth: int) -> _Call:
        rng = self._rng
        self._calls_left -= 1
        others = [rank for rank in range(len(self.records)) if rank != caller or rng.random() < 0.3]
        callee = rng.choice(others or [caller])
        call = _Call()
        message_id = self.record_send(caller, callee, self._some_of(values, (0, 1, 1, 2, 3)))
        self.tasks.append(self._serve(call, caller, callee, message_id, depth))
        return call

    def _serve(self, call: _Call, caller: int, callee: int, message_id: int, depth: int) -> Steps:
        """The way there, the function, and the way back."""
        yield
        if not self._goes_wrong():
            arguments = self.record_recv(callee, caller, message_id)
            results = yield from self._body(callee, arguments, depth - 1)
            if not self._goes_wrong():
                reply_id = self.record_send(callee, caller, self._some_of(results, (0, 1, 1, 2, 3)))
                yield
                if not self._goes_wrong():
                    call.results = self.record_recv(caller, callee, reply_id)
        call.is_over = True

    def _is_used(self) -> bool:
        return self._is_tidy or self._rng.random() < 0.8

    def _goes_wrong(self) -> bool:
        return self._rng.random() < self._trouble


def _make_leaves(rng: random.Random, rank: int) -> list[Node]:
    return [Node(Kind.LEAF, rank, has_hooks=rng.random() < 0.3) for _ in range(rng.randint(1, 3))]
