"""Functions that the tests run on workers, and the faults that they have in their backward."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import context as container
from gradwire.autograd.api import current_engine
from gradwire.testing import wait_until

weight = torch.nn.Parameter(torch.tensor([0.5, -0.25, 0.125], dtype=torch.float64))
"""Every process has one of its own, all with the same numbers."""


class OnPurpose(Exception):
    """What user code raises here."""


# -- forward -----------------------------------------------------------------------------------------------------------


def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * weight)


def through(x: torch.Tensor, way: list[str], fault: str = "", *args: Any) -> torch.Tensor:
    """A layer here, then one on each worker of the way, nested; the last one has a fault in its backward."""
    if way:
        result: torch.Tensor = rpc.rpc_sync(way[0], through, args=(layer(x), way[1:], fault, *args))
        return result
    return layer(FAULTS[fault].apply(layer(x), *args)) if fault else layer(x)


def beside(x: torch.Tensor, name: str, fault: str = "", *args: Any) -> torch.Tensor:
    """A layer here, and one of another worker beside it; no gradient comes back from there to here."""
    other: torch.Tensor = rpc.rpc_sync(name, through, args=(x.detach(), [], fault, *args))
    return layer(x) + other


def expected(num_layers: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of input and weight in one process."""
    leaf, own = x.detach().requires_grad_(), weight.detach().clone().requires_grad_()
    value = leaf
    for _ in range(num_layers):
        value = torch.tanh(value * own)
    of_input, of_weight = torch.autograd.grad(value.sum(), (leaf, own))
    return of_input, of_weight


def hooked(x: torch.Tensor, kind: str) -> torch.Tensor:
    """A layer with a hook that raises: on a value in between, on the weight, or after the gradient was added up."""
    own = torch.nn.Parameter(weight.detach().clone())
    value = x * own
    if kind == "value":
        value.register_hook(fail)  # type: ignore[no-untyped-call]
    elif kind == "weight":
        own.register_hook(fail)  # type: ignore[no-untyped-call]
    else:
        own.register_post_accumulate_grad_hook(fail)  # type: ignore[no-untyped-call]
    return torch.tanh(value)


def fail(_: Any = None) -> None:
    raise OnPurpose("in a hook")


def fail_forward(x: torch.Tensor, way: list[str]) -> torch.Tensor:
    """Raises when other workers have had to do with the context already."""
    through(x, way)
    raise OnPurpose("in forward")


def die(_: torch.Tensor | None = None, way: list[str] | None = None) -> None:
    """Ends this process without a word, once others have had to do with the context, if a way is given."""
    if way:
        rpc.rpc_sync(way[0], through, args=(torch.ones(3, dtype=torch.float64, requires_grad=True), way[1:]))
    os.kill(os.getpid(), signal.SIGKILL)


def hold(folder: str) -> str:
    """Says that it has begun, and waits until it may go on."""
    Path(folder, "entered").touch()
    wait_until(Path(folder, "go").exists, 60.0, "that the test goes on")
    return "went on"


def hold_and_call(x: torch.Tensor, folder: str, way: list[str]) -> torch.Tensor:
    hold(folder)
    return through(x, way)


# -- backward ----------------------------------------------------------------------------------------------------------


class _Fault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, folder: str = "") -> torch.Tensor:
        ctx.folder = folder
        return x.clone()


class Raises(_Fault):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise OnPurpose("in backward")


class Dies(_Fault):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Holds(_Fault):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        hold(ctx.folder)
        return gradients[0], None


class Computes(_Fault):
    """Holds the interpreter's lock all the time."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        Path(ctx.folder, "entered").touch()
        while not Path(ctx.folder, "go").exists():
            sum(range(20_000))
        return gradients[0], None


class NotANumber(_Fault):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * float("nan"), None


FAULTS: dict[str, Any] = {
    "raises": Raises,
    "dies": Dies,
    "holds": Holds,
    "computes": Computes,
    "not a number": NotANumber,
}


# -- what a worker has -------------------------------------------------------------------------------------------------


def counts() -> tuple[int, int, int, int]:
    """Contexts, passes under way, sends and recvs on this worker."""
    numbers = current_engine().statistics()
    return numbers.num_contexts, numbers.num_passes_under_way, numbers.num_sends, numbers.num_recvs


def left() -> str:
    """What this worker has not freed, in words: for errors."""
    here = current_engine()
    contexts = [
        f"{context!r} of rank {container.creator_of(context.context_id)}, known to {sorted(context.known_workers)}, "
        f"with {list(context.passes.values())!r}"
        for context in here.container
    ]
    return f"on {here.worker}, where {sorted(here.engine.lost)} count as lost: {'; '.join(contexts) or 'nothing'}"


def phases(context_id: int) -> list[str]:
    """Where the passes of a context are on this worker; empty if it does not have the context."""
    context = current_engine().container.find(context_id)
    return [item.phase.name for item in list(context.passes.values())] if context is not None else []


def num_gradients(context_id: int) -> int:
    """Leaves that have a gradient in a context here, without waiting for a pass that is not decided."""
    context = current_engine().container.find(context_id)
    return len(context.gradients) if context is not None else 0


def weight_gradient(context_id: int) -> torch.Tensor | None:
    """What a context holds for the weight of this worker."""
    return gw.autograd.get_gradients(context_id).get(weight)


def where_released(context_id: int) -> str | None:
    return current_engine().container.where_released(context_id)


def run_pass(context_id: int, x: torch.Tensor, way: list[str], folder: str) -> None:
    """Runs a backward pass of the caller's context from here."""
    value = through(x.requires_grad_(), way, "holds", folder)
    gw.autograd.backward(context_id, value.sum())


def only_context() -> int:
    """The id of the one context on this worker."""
    (context,) = current_engine().container
    return context.context_id
