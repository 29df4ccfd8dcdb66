"""Where the functions of these tests run: on workers, or all of them in this process, which is the oracle.

`call`, `submit` and `weight` work in both, so one function serves as the distributed program and as what its gradients
must be. In the oracle, a message is a copy: the callee may change what it got, as it may with what came over the wire,
and the same tensor twice in one message is one tensor there, too.
"""

from __future__ import annotations

import contextvars
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import gradwire as gw
from gradwire import rpc
from gradwire._torch import CppList
from gradwire.errors import UnknownContext

WORKERS = ("driver", "worker0", "worker1", "worker2")

Gradients = dict[str, torch.Tensor]
"""By ``worker/weight``; what has no gradient is not there."""

DEVICES = ["cpu"]
"""Of this process, for the places of programs; whoever has others adds them. Weights are spread over all of them."""

_weights: dict[str, torch.nn.Parameter] = {}  # of this worker; never taken by the oracle
# Refers to them from C++: without it, threads that use one of them at the same time can stop for ever (ADR 20).
_kept: list[Any] = []
_lock = threading.Lock()  # guards making weights
_oracle: contextvars.ContextVar[OneProcess | None] = contextvars.ContextVar("oracle", default=None)


class OneProcess:
    """All workers in this process, in this thread.

    with OneProcess("driver") as world:
        loss = graph(x)
    loss.backward()
    world.gradients()
    """

    def __init__(self, name: str, weights: dict[str, torch.nn.Parameter] | None = None) -> None:
        self.name = name
        self.weights = {} if weights is None else weights

    def __enter__(self) -> OneProcess:
        self._token = _oracle.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _oracle.reset(self._token)

    def call(self, to: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Runs a function as that worker."""
        with OneProcess(to, self.weights):
            value = function(*_copies(args, {}))
            return _copies(value.wait() if isinstance(value, _Done) else value, {})

    def gradients(self) -> Gradients:
        """What `torch.autograd` has gathered in the weights."""
        return {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}


class _Done:
    """A future of the oracle: completed when it is made."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value

    def then(self, callback: Callable[[_Done], Any]) -> _Done:
        return _Done(callback(self))


def here() -> str:
    """The name of the worker that the current function runs on."""
    world = _oracle.get()
    return rpc.get_worker_info().name if world is None else world.name


def call(to: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a worker."""
    world = _oracle.get()
    return rpc.rpc_sync(to, function, args=args) if world is None else world.call(to, function, args)


def call_by_reference(to: str, function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function on a worker, which keeps the result, and fetches that."""
    world = _oracle.get()
    return rpc.remote(to, function, args=args).to_here() if world is None else world.call(to, function, args)


def submit(to: str, function: Callable[..., Any], *args: Any) -> Any:
    """Starts a function on a worker; the oracle's futures are completed already."""
    world = _oracle.get()
    if world is None:
        return rpc.rpc_async(to, function, args=args)
    return _Done(world.call(to, function, args))


def is_oracle() -> bool:
    """Whether everything runs in this process."""
    return _oracle.get() is not None


def device_at(place: int) -> str:
    """The device of this worker for a place; in the oracle everything is on the CPU."""
    return "cpu" if is_oracle() else DEVICES[place]


def weight(key: str, *shape: int) -> torch.nn.Parameter:
    """This worker's parameter of that name, made when it is first asked for; names with ``hooked`` have a hook.

    Its values depend on the names of worker and parameter alone.
    """
    world = _oracle.get()
    weights, name = _weights if world is None else world.weights, f"{here()}/{key}"
    with _lock:
        if name not in weights:
            weights[name] = _make_weight(name, shape or (3,))
            if world is None:
                _kept.append(CppList([weights[name]]))
    return weights[name]


def _make_weight(name: str, shape: tuple[int, ...]) -> torch.nn.Parameter:
    place = zlib.crc32(name.encode()) % len(DEVICES)
    made = torch.nn.Parameter(make_values(name, *shape).to(device_at(place)))
    if "hooked" in name:
        made.register_hook(bend)
    return made


def make_values(name: str, *shape: int) -> torch.Tensor:
    """Numbers between -1 and 1 that depend on the name alone."""
    numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.rand(shape, generator=numbers, dtype=torch.float64) * 2 - 1


def bend(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A hook that is not linear: the sum of two halves is not what comes of the whole.

    Behind a result that turned out to be unused it may see None (docs/concepts/backward.md, "What to know").
    """
    return None if gradient is None else gradient + 0.1 * gradient.square()


def read_gradients(context_id: int) -> Gradients:
    """What a context holds for the weights of this worker."""
    found = gw.autograd.get_gradients(context_id)
    return {name: found[weight].detach().cpu() for name, weight in list(_weights.items()) if weight in found}


def gather_gradients(context_id: int, workers: Iterable[str] = WORKERS) -> Gradients:
    """What a context holds for the weights of all workers."""
    gathered: Gradients = {}
    for worker in workers:
        if worker == here():
            gathered.update(read_gradients(context_id))
        else:
            gathered.update(rpc.rpc_sync(worker, read_gradients_if_known, args=(context_id,)))
    return gathered


def read_gradients_if_known(context_id: int) -> Gradients:
    """As `read_gradients`; nothing where the context has never been."""
    try:
        return read_gradients(context_id)
    except UnknownContext:
        return {}


def make_inputs(*names: str) -> list[torch.Tensor]:
    """Leaves of three elements."""
    return [make_values(name, 3).requires_grad_() for name in names or ("x", "y")]


def gradients_here(graph: Callable[..., torch.Tensor], runner: str = "driver") -> Gradients:
    """The oracle: gradients of a graph with inputs ``x`` and ``y``, in one process."""
    x, y = make_inputs()
    with OneProcess(runner) as world:
        loss = graph(x, y)
    loss.backward()
    own = {name: item.grad for name, item in (("x", x), ("y", y)) if item.grad is not None}
    return {**own, **world.gradients()}


def gradients_there(graph: Callable[..., torch.Tensor], mode: str = "smart") -> Gradients:
    """The same with workers."""
    x, y = make_inputs()
    with gw.autograd.context() as ctx:
        ctx.backward(graph(x, y), mode=mode, timeout=30.0)
        return collect(ctx, x, y)


def collect(context_id: int, x: torch.Tensor, y: torch.Tensor) -> Gradients:
    """All gradients of a context."""
    found = gw.autograd.get_gradients(context_id)
    own = {name: found[item].detach() for name, item in (("x", x), ("y", y)) if item in found}
    return {**own, **gather_gradients(context_id)}


def difference(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> str:
    """What is wrong with gradients, in a few words; empty if nothing is."""
    problems = [f"{name} has a gradient and should not" for name in sorted(actual.keys() - expected.keys())]
    problems += [f"{name} has no gradient" for name in sorted(expected.keys() - actual.keys())]
    for name in sorted(actual.keys() & expected.keys()):
        got, want = actual[name].to_dense(), expected[name].to_dense()
        if got.shape != want.shape or got.dtype != want.dtype:
            problems.append(f"{name}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}")
        elif not torch.allclose(got, want, rtol=1e-9, atol=1e-12):
            problems.append(f"{name}: {got.flatten()[:3].tolist()} instead of {want.flatten()[:3].tolist()}")
    return "; ".join(problems)


def _copies(value: Any, memo: dict[int, torch.Tensor]) -> Any:
    """The value as a message would bring it; gradients flow through the copy."""
    if isinstance(value, torch.Tensor):
        return memo.setdefault(id(value), value.clone())
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_copies(item, memo) for item in value)
    if isinstance(value, dict):
        return {key: _copies(item, memo) for key, item in value.items()}
    return value


def count_contexts() -> int:
    """Contexts that are alive on this worker."""
    return int(gw.autograd._get_debug_info()["num_autograd_contexts"])


def num_contexts(workers: Iterable[Any]) -> int:
    """Contexts that are alive on these workers and here."""
    return count_contexts() + sum(worker.call(count_contexts) for worker in workers)
