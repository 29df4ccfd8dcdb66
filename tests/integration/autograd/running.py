"""Runs random programs (`autograd.programs`): on workers, or in one process, and compares."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import gradwire as gw
from autograd import worlds
from autograd.listing import describe
from autograd.programs import (
    ON_CPU,
    Body,
    Call,
    Change,
    Compute,
    Detach,
    Hook,
    Move,
    Program,
    Setting,
    Take,
    Wait,
    make_program,
)
from gradwire import rpc
from gradwire.errors import RpcError, UnsettledSend

Tensors = list[torch.Tensor]
BACKWARD_TIMEOUT_S = 15.0


class OnPurpose(Exception):
    """What calls that are meant to fail raise."""


def serve(body: Body, *args: torch.Tensor) -> Tensors:
    """What a call runs."""
    return Frame(args).run(body)


def serve_and_fail(body: Body, *args: torch.Tensor) -> None:
    """As `serve`, but no result comes back."""
    Frame(args).run(body)
    raise OnPurpose


@rpc.functions.async_execution
def serve_elsewhere(to: str, body: Body, *args: torch.Tensor) -> Any:
    """Lets a third worker run the body."""
    return worlds.submit(to, serve, body, *args)


class Frame:
    """The values of one body while it runs."""

    def __init__(self, args: Sequence[torch.Tensor]) -> None:
        self.values = list(args)
        self.started: list[Any] = []

    def run(self, body: Body) -> Tensors:
        """Carries out all statements."""
        for item in body.statements:
            _STEPS[type(item)](self, item)
        return [self.values[number] for number in body.results]

    def wait_started(self) -> None:
        """Waits for calls whose result nobody took."""
        for future in self.started:
            with contextlib.suppress(OnPurpose, RpcError):  # cancelled ones among them
                future.wait()

    def compute(self, item: Compute) -> None:
        operands = [self.values[number] for number in item.inputs]
        self.values.append(_COMPUTE[item.kind](*operands, *([worlds.weight(item.key)] if item.key else [])))

    def take(self, item: Take) -> None:
        self.values.append(worlds.weight(item.key))

    def detach(self, item: Detach) -> None:
        self.values.append(self.values[item.source].detach())

    def move(self, item: Move) -> None:
        self.values.append(self.values[item.source].to(worlds.device_at(item.place), copy=True))

    def change(self, item: Change) -> None:
        target = self.values[item.target]
        _CHANGE[item.kind](target, *([_fit(self.values[item.source], target)] if item.source >= 0 else []))

    def hook(self, item: Hook) -> None:
        self.values[item.target].register_hook(worlds.bend)

    def wait(self, item: Wait) -> None:
        self.values += self.started[item.number].wait()

    def call(self, item: Call) -> None:
        args = [self.values[number] for number in item.args]
        if item.way == "sync":
            self.values += worlds.call(item.to, serve, item.body, *args)
        elif item.way == "remote":
            self.values += worlds.call_by_reference(item.to, serve, item.body, *args)
        elif item.way == "relay":
            self.values += worlds.call(item.via, serve_elsewhere, item.to, item.body, *args)
        elif item.way == "no_grad":
            with torch.no_grad():
                self.values += worlds.call(item.to, serve, item.body, *args)
        elif item.way == "fail":
            with contextlib.suppress(OnPurpose):
                worlds.call(item.to, serve_and_fail, item.body, *args)
        elif item.way == "cancel":
            if not worlds.is_oracle():
                worlds.submit(item.to, serve, item.body, *args).cancel()
        else:
            future = worlds.submit(item.to, serve, item.body, *args)
            self.started.append(future.then(_bend_results) if item.way == "then" else future)


def _bend_results(done: Any) -> Tensors:
    """Local work in a callback; the same tensor twice stays so."""
    memo: dict[int, torch.Tensor] = {}
    values: Tensors = done.wait()
    for value in values:
        if id(value) not in memo:
            memo[id(value)] = torch.tanh(value)
    return [memo[id(value)] for value in values]


def _fit(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Weights have three elements, whatever the size of a program's values."""
    value = value.to(other.device)
    return value if value.shape == other.shape or value.dim() == 0 else value.mean()


def _affine(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    weight = weight.to(value.device)
    return value * weight[0] + weight[1:].sum() * 0.5


def _pair(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda one, other: function(one, _fit(other, one))


_COMPUTE: dict[str, Callable[..., torch.Tensor]] = {
    "affine": _affine,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "scale": lambda value: value * 0.7,
    "add": _pair(lambda one, other: (one + other) * 0.6),
    "mul": _pair(lambda one, other: one * other),
    "mix": _pair(lambda one, other: one * 0.5 - other),
}
_CHANGE: dict[str, Callable[..., torch.Tensor]] = {
    "scale": lambda target: target.mul_(0.9),
    "add": lambda target, other: target.add_(other),
    "mul": lambda target, other: target.mul_(other),
    "tanh": lambda target: target.tanh_(),
}
_STEPS: dict[type, Callable[[Frame, Any], None]] = {
    Compute: Frame.compute,
    Take: Frame.take,
    Detach: Frame.detach,
    Move: Frame.move,
    Change: Frame.change,
    Hook: Frame.hook,
    Wait: Frame.wait,
    Call: Frame.call,
}


# -- whole programs ------------------------------------------------------------------------------------------------


def _make_inputs(program: Program) -> Tensors:
    return [
        worlds.make_values(f"{program.seed}/{number}", program.size).to(worlds.device_at(place)).requires_grad_()
        for number, place in enumerate(program.places)
    ]


def _make_roots(program: Program, values: Tensors) -> tuple[Tensors, Tensors]:
    """The roots, and the gradient of each: some are no scalars."""
    roots = [
        values[root[0]] * 2
        if len(root) == 1
        else torch.stack([values[number].mean().cpu() * (place + 3) for place, number in enumerate(root)]).sum()
        for root in program.roots
    ]
    seeds = [worlds.make_values(f"root {number}", *root.shape).to(root.device) for number, root in enumerate(roots)]
    return roots, seeds


class _Differentiator:
    """What a plan needs: torch's functions, with everything in this process."""

    def backward(self, roots: Tensors, gradients: Tensors, retain_graph: bool = False) -> None:
        torch.autograd.backward(roots, gradients, retain_graph=retain_graph)

    def grad(self, roots: Tensors, gradients: Tensors, targets: Tensors, create_graph: bool) -> Sequence[Any]:
        return torch.autograd.grad(roots, targets, gradients, create_graph=create_graph, allow_unused=True)

    def at_once(self, steps: list[Callable[[], None]]) -> None:
        for step in steps:
            step()


class _Distributed(_Differentiator):
    """The same through workers."""

    def __init__(self, context_id: int, mode: str) -> None:
        self._context_id = context_id
        self._options: dict[str, Any] = {"mode": mode, "timeout": BACKWARD_TIMEOUT_S}

    def backward(self, roots: Tensors, gradients: Tensors, retain_graph: bool = False) -> None:
        gw.autograd.backward(self._context_id, roots, retain_graph, gradients=gradients, **self._options)

    def grad(self, roots: Tensors, gradients: Tensors, targets: Tensors, create_graph: bool) -> Sequence[Any]:
        return gw.autograd.grad(
            self._context_id, roots, targets, gradients, create_graph=create_graph, allow_unused=True, **self._options
        )

    def at_once(self, steps: list[Callable[[], None]]) -> None:
        with ThreadPoolExecutor(len(steps)) as pool:
            list(pool.map(lambda step: step(), steps))


def _carry_out(program: Program, inputs: Tensors, values: Tensors, by: _Differentiator) -> worlds.Gradients:
    """Does what the program's plan says.

    Returns:
        The roots' values, and gradients that are not kept with their tensors, by name.
    """
    roots, seeds = _make_roots(program, values)
    found = {f"root {number}": root.detach().clone() for number, root in enumerate(roots)}
    if program.plan == "once":
        by.backward(roots, seeds)
    elif program.plan == "twice":
        by.backward(roots[:1], seeds[:1], retain_graph=True)
        by.backward(roots[1:], seeds[1:])
    elif program.plan == "at once":
        pairs = zip(roots, seeds, strict=True)
        by.at_once([functools.partial(by.backward, [root], [seed], retain_graph=True) for root, seed in pairs])
    else:
        targets = inputs + [values[number] for number in program.targets if program.plan == "grad"]
        results = by.grad(roots, seeds, targets, program.plan == "second order")
        found.update({f"target {number}": item for number, item in enumerate(results) if item is not None})
        terms = [item.square().mean().cpu() for item in results if item is not None and item.requires_grad]
        if terms and program.plan == "second order":
            by.backward([torch.stack(terms).sum()], [torch.ones((), dtype=torch.float64)])
    return {name: item.detach().cpu() for name, item in found.items()}


def run_in_one_process(program: Program) -> worlds.Gradients:
    """The oracle: torch's own gradients, by name, and the roots' values."""
    with worlds.OneProcess(program.runner) as world:
        inputs = _make_inputs(program)
        frame = Frame(inputs)
        frame.run(program.body)
    found = _carry_out(program, inputs, frame.values, _Differentiator())
    own = {f"input {number}": item.grad for number, item in enumerate(inputs) if item.grad is not None}
    return {**found, **own, **world.gradients()}


def run_distributed(program: Program, mode: str) -> worlds.Gradients:
    """The same with workers; to be called on the program's runner."""
    inputs = _make_inputs(program)
    with gw.autograd.context() as ctx:
        frame = Frame(inputs)
        frame.run(program.body)
        found = _carry_out(program, inputs, frame.values, _Distributed(ctx, mode))
        kept = ctx.gradients()
        own = {f"input {number}": kept[item].detach().cpu() for number, item in enumerate(inputs) if item in kept}
        gathered = worlds.gather_gradients(ctx, program.setting.workers)
        if program.waits:
            frame.wait_started()
    return {**found, **own, **gathered}


def check_program(seed: int, mode: str = "smart", setting: Setting = ON_CPU) -> str:
    """Runs a program both ways.

    Args:
        seed: Of the program.
        setting: Where it runs.
        mode: With ``fast``, the pass may also end in `UnsettledSend`: some result may be unused.

    Returns:
        What is wrong, or nothing.
    """
    program = make_program(seed, setting)
    try:
        actual = rpc.rpc_sync(program.runner, run_distributed, args=(program, mode))
        problem = worlds.difference(actual, run_in_one_process(program))
    except UnsettledSend as error:
        problem = "" if mode == "fast" and error.sends else traceback.format_exc()
    except Exception:
        problem = traceback.format_exc()
    if not problem:
        return ""
    soak = "autograd.soak" if setting == ON_CPU else "accelerator.soak"
    again = f"PYTHONPATH=tests:tests/integration .venv/bin/python -m {soak} --only {seed} --mode {mode}"
    return f"seed {seed}, mode {mode}: {problem}\nagain: {again}\n{describe(program)}\n"
