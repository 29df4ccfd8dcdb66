"""Random programs as plain data.

A program is a tree of bodies: a body is a list of statements over numbered values, and a call holds the body that the
callee runs. `make_program` draws one from a seed. What `autograd.running` makes of it, on workers or in one process, must
have the same gradients.

The generator keeps to what one process allows: it knows which values autograd has saved (those are not changed in place),
which are leaves, and which need a gradient (a root must).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from autograd.worlds import WORKERS

NUM_INPUTS = 2
_KEYS = ("a", "b", "hooked")
_MAX_DEPTH = 3
_MAX_CALLS = 12

Way = Literal["sync", "async", "then", "relay", "no_grad", "fail", "cancel", "remote"]
Plan = Literal["once", "twice", "at once", "grad", "second order"]

_BINARY = ("add", "mul", "mix")
_SAVES_INPUT = frozenset(("mul", "sin", "affine"))
_SAVES_OUTPUT = frozenset(("tanh",))


@dataclass(frozen=True, slots=True)
class Compute:
    """A new value from others, on this worker; `affine` takes a weight."""

    kind: str
    inputs: tuple[int, ...]
    key: str = ""


@dataclass(frozen=True, slots=True)
class Take:
    """A weight of this worker as a value: to be sent, or to be returned."""

    key: str


@dataclass(frozen=True, slots=True)
class Detach:
    """A new value without history."""

    source: int


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of a value in another place: see `autograd.worlds.device_at`."""

    source: int
    place: int


@dataclass(frozen=True, slots=True)
class Change:
    """Changes a value in place."""

    kind: str
    target: int
    source: int = -1


@dataclass(frozen=True, slots=True)
class Hook:
    """Puts a hook on a value."""

    target: int


@dataclass(frozen=True, slots=True)
class Body:
    """What one call does; its arguments are the first values."""

    statements: tuple[Statement, ...]
    results: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Runs a body on a worker.

    Attributes:
        way: ``sync``, ``remote`` (through a reference), ``relay`` (through `via`, with async_execution) and ``no_grad`` add
            the results to the values;
            ``async`` and ``then`` add nothing before `Wait`; ``fail`` and ``cancel`` never do.
    """

    to: str
    way: Way
    args: tuple[int, ...]
    body: Body
    via: str = ""


@dataclass(frozen=True, slots=True)
class Wait:
    """Adds the results of a call that was started to the values; by its place among those."""

    number: int


Statement = Compute | Take | Detach | Move | Change | Hook | Call | Wait


@dataclass(frozen=True, slots=True)
class Setting:
    """Where programs run.

    Attributes:
        workers: Those that run bodies.
        runners: Those that make the context, drawn from.
        num_places: Devices of each worker, the CPU included; with several, values move between them, and some calls go
            through references.
    """

    workers: tuple[str, ...]
    runners: tuple[str, ...]
    num_places: int = 1


ON_CPU = Setting(WORKERS, ("driver", "driver", *WORKERS))


@dataclass(frozen=True, slots=True)
class Program:
    """A program, and what is done with it.

    Attributes:
        runner: The worker that makes the context and calls backward.
        size: Elements of every value; large ones travel through shared memory.
        roots: For each root, the values that are summed up to it.
        plan: One pass over all roots; a pass for each root, one after the other or at once; gradients of the inputs
            and of values in between, which the context does not keep; or the gradients of the inputs' gradients.
        targets: Values that ``grad`` asks for, beside the inputs.
        waits: Whether results that nobody took are waited for before the context ends.
        places: Where the inputs are.
    """

    setting: Setting
    seed: int
    runner: str
    size: int
    body: Body
    roots: tuple[tuple[int, ...], ...]
    plan: Plan
    targets: tuple[int, ...]
    waits: bool
    places: tuple[int, ...]


@dataclass(eq=False, slots=True)
class _Value:
    """What the generator knows about a value; one object for each tensor, however many numbers it has."""

    needs_grad: bool
    is_saved: bool = False  # in a graph, or shares its memory with such: must not change any more
    is_leaf: bool = False
    is_weight: bool = False
    is_hooked: bool = False

    @property
    def may_change(self) -> bool:
        return not (self.is_saved or self.is_weight or (self.is_leaf and self.needs_grad))


@dataclass(slots=True)
class _Drawing:
    """A body that is being drawn."""

    worker: str
    values: list[_Value]
    depth: int
    records: bool = True  # grad mode
    statements: list[Statement] = field(default_factory=list)
    started: list[list[_Value]] = field(default_factory=list)  # results of calls under way
    not_waited: list[int] = field(default_factory=list)


class _Generator:
    def __init__(self, seed: int, setting: Setting) -> None:
        self._dice = random.Random(seed)
        self._setting = setting
        self._has_devices = setting.num_places > 1
        self._num_calls = 0

    def body(self, drawing: _Drawing, num_statements: int) -> None:
        for _ in range(num_statements):
            draw = self._dice.choices(
                (self._compute, self._call, self._wait, self._change, self._detach, self._hook, self._take, self._move),
                (30, 34, 10, 10, 6, 5, 5, 25 * self._has_devices),
            )[0]
            draw(drawing)

    def _pick(self, drawing: _Drawing) -> int:
        """Recent values more often: programs become deep rather than wide."""
        last = len(drawing.values) - 1
        return max(0, last - int(self._dice.expovariate(0.5)))

    # -- statements ----------------------------------------------------------------------------------------------

    def _compute(self, drawing: _Drawing) -> None:
        kind = self._dice.choice(("affine", "affine", "tanh", "sin", "scale", *_BINARY))
        inputs = tuple(self._pick(drawing) for _ in range(2 if kind in _BINARY else 1))
        operands = [drawing.values[number] for number in inputs]
        for operand in operands:
            operand.is_saved |= kind in _SAVES_INPUT
        needs_grad = drawing.records and (kind == "affine" or any(operand.needs_grad for operand in operands))
        drawing.values.append(_Value(needs_grad, is_saved=kind in _SAVES_OUTPUT))
        drawing.statements.append(Compute(kind, inputs, self._dice.choice(_KEYS) if kind == "affine" else ""))

    def _take(self, drawing: _Drawing) -> None:
        drawing.values.append(_Value(drawing.records, is_leaf=True, is_weight=True))
        drawing.statements.append(Take(self._dice.choice(_KEYS)))

    def _detach(self, drawing: _Drawing) -> None:
        source = self._pick(drawing)
        drawing.values[source].is_saved = True  # both share their memory
        drawing.values.append(_Value(False, is_saved=True))
        drawing.statements.append(Detach(source))

    def _move(self, drawing: _Drawing) -> None:
        source = self._pick(drawing)
        drawing.values.append(_Value(drawing.records and drawing.values[source].needs_grad))
        drawing.statements.append(Move(source, self._place()))

    def _place(self) -> int:
        return self._dice.randrange(self._setting.num_places)

    def _change(self, drawing: _Drawing) -> None:
        kind = self._dice.choice(("scale", "add", "mul", "tanh"))
        target, source = self._pick(drawing), self._pick(drawing)
        changed, other = drawing.values[target], drawing.values[source]
        if not changed.may_change or changed is other or not drawing.records:  # without grad mode leaves arrive
            return
        if kind in ("scale", "tanh"):
            source = -1
            changed.is_saved |= kind == "tanh"
        else:
            changed.needs_grad |= drawing.records and other.needs_grad
            other.is_saved |= kind == "mul"
        drawing.statements.append(Change(kind, target, source))

    def _hook(self, drawing: _Drawing) -> None:
        target = self._pick(drawing)
        value = drawing.values[target]
        if value.needs_grad and not value.is_weight and drawing.records:
            value.is_hooked = True
            drawing.statements.append(Hook(target))

    def _wait(self, drawing: _Drawing) -> None:
        if drawing.not_waited:
            number = drawing.not_waited.pop(self._dice.randrange(len(drawing.not_waited)))
            drawing.values += drawing.started[number]
            drawing.statements.append(Wait(number))

    def _call(self, drawing: _Drawing) -> None:
        if drawing.depth == _MAX_DEPTH or self._num_calls >= _MAX_CALLS:
            return self._compute(drawing)
        self._num_calls += 1
        ways: tuple[Way, ...] = ("sync", "async", "then", "relay", "no_grad", "fail", "cancel", "remote")
        way = self._dice.choices(ways, (45, 20, 8, 8, 5, 5, 3, 10 * self._has_devices))[0]
        to, via = self._dice.choice(self._setting.workers), self._dice.choice(self._setting.workers)
        if way == "remote" and to == drawing.worker:  # what it fetches from itself is not a copy
            way = "sync"
        args = tuple(self._pick(drawing) for _ in range(self._dice.choice((1, 1, 2, 3))))
        records = drawing.records and way != "no_grad"
        inner = _Drawing(to, _received(drawing.values, args, records), drawing.depth + 1, records)
        self.body(inner, self._dice.choice((0, 1, 1, 2, 3, 4)))
        results = tuple(self._pick(inner) for _ in range(self._dice.choice((1, 1, 1, 2, 3))))
        body = Body(tuple(inner.statements), results)
        drawing.statements.append(Call(to, way, args, body, via if way == "relay" else ""))
        came = _received(inner.values, results, records)
        for value in came:  # what goes through tanh, and what may arrive as a leaf that requires grad, is not changed
            value.is_saved = way in ("then", "no_grad")
        if way in ("async", "then"):
            drawing.not_waited.append(len(drawing.started))
            drawing.started.append(came)
        elif way in ("sync", "relay", "no_grad", "remote"):
            drawing.values += came
        return None

    # -- the whole -----------------------------------------------------------------------------------------------

    def program(self, seed: int) -> Program:
        runner = self._dice.choice(self._setting.runners)
        drawing = _Drawing(runner, [_Value(True, is_leaf=True) for _ in range(NUM_INPUTS)], depth=0)
        self.body(drawing, self._dice.randint(6, 16))
        for _ in drawing.not_waited[1:]:  # most results are taken, some never
            self._wait(drawing)
        plans: tuple[Plan, ...] = ("once", "twice", "at once", "grad", "second order")
        plan = self._dice.choices(plans, (50, 15, 10, 10, 15))[0]
        num_roots = 2 if plan in ("twice", "at once") else self._dice.choice((1, 1, 2))
        return Program(
            setting=self._setting,
            seed=seed,
            runner=runner,
            size=self._dice.choice((3, 3, 3, 3, 3, 3, 3, 10_000)),
            body=Body(tuple(drawing.statements), ()),
            roots=tuple(self._root(drawing) for _ in range(num_roots)),
            plan=plan,
            targets=self._targets(drawing),
            waits=self._dice.random() < 0.5,
            places=tuple(self._place() for _ in range(NUM_INPUTS)) if self._has_devices else (0,) * NUM_INPUTS,
        )

    def _root(self, drawing: _Drawing) -> tuple[int, ...]:
        fit = [number for number, value in enumerate(drawing.values) if value.needs_grad]
        late = fit[-6:]
        return tuple(self._dice.choice(late) for _ in range(self._dice.choice((1, 2, 3, 4))))

    def _targets(self, drawing: _Drawing) -> tuple[int, ...]:
        """No values with hooks: torch returns them before or after the hook, by what else is asked for."""
        fit = [number for number, value in enumerate(drawing.values) if value.needs_grad and not value.is_hooked]
        return tuple(self._dice.sample(fit[-6:], min(2, len(fit))))


def _received(values: Sequence[_Value], numbers: Sequence[int], records: bool) -> list[_Value]:
    """What arrives of these values: the same tensor twice is one tensor there, too."""
    memo: dict[int, _Value] = {}
    for number in numbers:
        memo.setdefault(id(values[number]), _Value(values[number].needs_grad and records))
    return [memo[id(values[number])] for number in numbers]


def make_program(seed: int, setting: Setting = ON_CPU) -> Program:
    """The program of that seed."""
    return _Generator(seed, setting).program(seed)
