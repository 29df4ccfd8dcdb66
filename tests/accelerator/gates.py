"""Programs whose backward pass waits in the middle: a tensor goes to another worker and comes back.

They run on the first worker, and compare there with the same function in that process. An assertion that fails there is the
`AssertionError` of the call, so it fails the test in the driver.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from accelerator import device
from gradwire.autograd.api import _retrieve_context
from gradwire.errors import BackwardFailed, UnsettledSend
from gradwire.testing import wait_until

Tensor = torch.Tensor
ZERO, ONE = f"{device.NAME}:0", f"{device.NAME}:1"
TIMEOUT_S = 20.0
_LONG_S = 60.0  # of passes that must fail long before: the machine may be busy


def _input() -> Tensor:
    return torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()


def call(worker: int, function: Callable[..., Tensor], *args: Any) -> Any:
    """Call one of the two workers that are not the root."""
    return gw.rpc.rpc_sync(f"worker{worker + 1}", function, args=args)


def _here(_: int, function: Callable[..., Tensor], *args: Any) -> Any:
    return function(*args)


def _layer(x: Tensor) -> Tensor:
    return torch.tanh(x * 2)


def _to_cpu(x: Tensor) -> Tensor:
    """Take a tensor on a device and return one on the CPU."""
    return torch.sin(x.cpu()) * 3


def _bend(gradient: Tensor) -> Tensor:
    return gradient + 0.1 * gradient.square()


# -- split models with a skip connection -----------------------------------------------------------------------------------


def _skip(call: Any, x: Tensor, first: str, second: str) -> Tensor:
    """The gradient of what was sent depends on a recv on the CPU, which the run reaches by way of a device."""
    hidden = call(0, _layer, x).to(first) * 2
    back = call(1, _to_cpu, hidden)
    return (back.to(second) * hidden.to(second)).sum().cpu()


def _skip_twice(call: Any, x: Tensor, first: str, second: str) -> Tensor:
    """Two gates, one behind the other, and hooks on both sides."""
    hidden = call(0, _layer, x).to(first).sin()
    hidden.register_hook(_bend)  # type: ignore[no-untyped-call]
    back = call(1, _to_cpu, hidden)
    back.register_hook(_bend)
    middle = (back.to(second) * hidden.to(second)).cpu() * 0.5
    again = call(0, _to_cpu, middle.to(first))
    return (again.to(second) * middle.to(second) + hidden.to(second)).sum().cpu()


def _to_and_fro(call: Any, x: Tensor, first: str, second: str) -> Tensor:
    """Between the loss and the recv, every other node is one of the CPU."""
    hidden = call(0, _layer, x).to(first) * 2
    value = call(1, _to_cpu, hidden)
    for number in range(10):
        value = value.to(second if number % 2 else first).mul(0.9).cpu().sin()
    return (value.to(second) * hidden.to(second)).sum().cpu()


LOSSES = {"skip": _skip, "skip twice": _skip_twice, "to and fro": _to_and_fro}


def differentiate(name: str, first: str, second: str) -> None:
    """Compare the gradients of a loss with those of one process."""
    alone = _input()
    LOSSES[name](_here, alone, first, second).backward()  # type: ignore[no-untyped-call]
    x = _input()
    with gw.autograd.context() as ctx:
        ctx.backward(LOSSES[name](call, x, first, second), timeout=TIMEOUT_S)
        found = ctx.gradients()[x]
    assert alone.grad is not None
    assert torch.allclose(found, alone.grad, rtol=1e-12)


class _Block(torch.nn.Module):
    """Half a model: two layers, and what comes in is added to what goes out."""

    def __init__(self, number: int, on: str) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))).to(on)
        self._on = on

    def forward(self, x: Tensor) -> Tensor:
        there = x.to(self._on)
        return (torch.tanh(self.layers(there)) + there).to(x.device)


def train_split_model(first: str, second: str) -> None:
    """Train a model over two workers, with a skip connection around the second; compare its weights with one process."""
    alone = [_Block(1, first), _Block(2, second)]
    sgd = torch.optim.SGD([param for block in alone for param in block.parameters()], lr=0.1)
    parts = [
        gw.nn.RemoteModule(f"worker{number}/{on}", _Block, (number, on)) for number, on in ((1, first), (2, second))
    ]
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, parts, lr=0.1)

    def loss_of(blocks: Any) -> Tensor:
        hidden = blocks[0](_input()).to(first).sin()
        return (blocks[1](hidden.cpu()).to(second) * hidden.to(second)).square().sum().cpu()

    for _ in range(3):
        with gw.autograd.context() as ctx:
            ctx.backward(loss_of(parts), timeout=TIMEOUT_S)
            optimizer.step(ctx)
        sgd.zero_grad()
        loss_of(alone).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    for remote, local in zip(parts, alone, strict=True):
        for name, value in remote.state_dict().items():
            assert torch.allclose(value.cpu(), local.state_dict()[name].cpu(), rtol=1e-12), name


# -- while a gate waits ----------------------------------------------------------------------------------------------------

_open = threading.Event()


class _Held(torch.autograd.Function):
    """Its backward waits until the event is set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert _open.wait(TIMEOUT_S)
        return gradient


def _held(x: Tensor) -> Tensor:
    return _Held.apply(x.cpu()) * 3  # type: ignore[no-any-return]


def _set_open() -> None:
    _open.set()


def _stands_at_gate(context_id: int) -> bool:
    return any(current._gates for current in list(_retrieve_context(context_id).passes.values()))


def count_passes_beside_a_gate(num_passes: int) -> int:
    """Return how many passes through the same devices end while the gate of another one waits."""
    call(1, _clear)
    x, found = _input(), []

    def wait_at_gate() -> None:
        with gw.autograd.context() as ctx:
            hidden = x.to(ZERO) * 2
            loss = (call(1, _held, hidden).to(ONE) * hidden.to(ONE)).sum().cpu()
            contexts.append(ctx)
            ctx.backward(loss, timeout=TIMEOUT_S)
            found.append(ctx.gradients()[x])

    contexts: list[int] = []
    thread = threading.Thread(target=wait_at_gate)
    thread.start()
    num_ended = 0
    try:
        wait_until(
            lambda: bool(contexts) and _stands_at_gate(contexts[0]), TIMEOUT_S, "that the pass stands at its gate"
        )
        for number in range(num_passes):
            first, second = (ZERO, ONE) if number % 2 else (ONE, ZERO)
            differentiate("skip", first, second)
            num_ended += _stands_at_gate(contexts[0])
    finally:
        call(1, _set_open)
        thread.join(TIMEOUT_S)
    alone = _input()
    hidden = alone.to(ZERO) * 2
    (hidden.to(ONE).mul(3) * hidden.to(ONE)).sum().backward()  # type: ignore[no-untyped-call]
    assert alone.grad is not None
    assert torch.allclose(found[0], alone.grad, rtol=1e-12)
    return num_ended


def _clear() -> None:
    _open.clear()


def run_gated_pass_in_hook(on: str, inner: str) -> None:
    """A hook runs a pass that needs the device whose thread the hook is in, and that has to wait in the middle."""
    found: list[Tensor] = []
    y = _input()

    def loss_of(call: Any, y: Tensor) -> Tensor:
        hidden = call(0, _layer, y.to(inner) * 0.5) * 2
        return (call(1, _to_cpu, hidden).to(inner) * hidden).sum().cpu()

    def run_another(_: Tensor) -> None:
        with torch.enable_grad(), gw.autograd.context() as other:
            other.backward(loss_of(call, y), timeout=TIMEOUT_S)
            found.append(other.gradients()[y])

    x = _input()
    with gw.autograd.context() as ctx:
        hidden = call(0, _layer, x).to(on) * 2
        back = call(1, _to_cpu, hidden).to(on)
        back.register_hook(run_another)
        ctx.backward((back * hidden).sum().cpu(), timeout=TIMEOUT_S)
    alone = _input()
    loss_of(_here, alone).backward()  # type: ignore[no-untyped-call]
    assert alone.grad is not None
    assert torch.allclose(found[0], alone.grad, rtol=1e-12)


def run_local_backward_in_hook(on: str, inner: str) -> None:
    """A hook calls torch's own backward, over devices, in a run that has to wait in the middle."""

    def loss_of(call: Any, x: Tensor) -> Tensor:
        hidden = call(0, _layer, x).to(on) * 2
        back = call(1, _to_cpu, hidden).to(on)
        back.register_hook(bend)
        return (back * hidden).sum().cpu()

    def bend(gradient: Tensor) -> Tensor:
        y = _input().detach().requires_grad_()
        with torch.enable_grad():
            (y.to(inner).sin() * gradient.detach().to(inner)).cpu().sum().backward()  # type: ignore[no-untyped-call]
            (again,) = torch.autograd.grad(y.to(inner).cos().sum(), [y])
        assert y.grad is not None
        return y.grad.to(on) + again.to(on)

    alone, x = _input(), _input()
    loss_of(_here, alone).backward()  # type: ignore[no-untyped-call]
    with gw.autograd.context() as ctx:
        ctx.backward(loss_of(call, x), timeout=TIMEOUT_S)
        found = ctx.gradients()[x]
    assert alone.grad is not None
    assert torch.allclose(found, alone.grad, rtol=1e-12)


def _layer_on(x: Tensor, on: str) -> Tensor:
    return _layer(x.to(on)).cpu()


def _differentiate_through(worker: str, on: str) -> Tensor:
    x = _input()
    with gw.autograd.context() as ctx:
        ctx.backward(gw.rpc.rpc_sync(worker, _layer_on, args=(x, on)).sum(), timeout=TIMEOUT_S)
        return ctx.gradients()[x]


def wait_in_hook_for_another_pass(on: str) -> None:
    """A hook calls a worker, which runs a pass through the device of this worker that the hook is on."""
    found: list[Tensor] = []
    x = _input()
    with gw.autograd.context() as ctx:
        hidden = call(0, _layer, x).to(on) * 2
        hidden.register_hook(lambda _: found.append(call(1, _differentiate_through, "worker0", on)))
        with _at_once():
            ctx.backward(hidden.sum().cpu(), timeout=TIMEOUT_S)
    alone = _input()
    _layer_on(alone, on).sum().backward()  # type: ignore[no-untyped-call]
    assert alone.grad is not None
    assert torch.allclose(found[0], alone.grad, rtol=1e-12)


# -- passes that fail ------------------------------------------------------------------------------------------------------


class _Broken(torch.autograd.Function):
    """Fails in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError(f"broken on {gradient.device}")


def _break_beside_gate(x: Tensor, on: str) -> Tensor:
    """The node that fails is on the way to a recv, and what was sent waits for the answer of that."""
    hidden = x.to(on) * 2
    back = call(1, _to_cpu, hidden)
    return (_Broken.apply(back.to(on)) * hidden).sum().cpu()  # type: ignore[no-any-return]


def _wait_failed(context_id: int) -> bool:
    """Return whether the pass of a context has failed on this worker, or has never begun."""
    context = _retrieve_context(context_id)
    wait_until(lambda: not context.passes, TIMEOUT_S, "that the pass has ended")
    return not any(context.ended_passes.values())


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Fail if the block takes half as long as the timeout of its pass."""
    begun = time.monotonic()
    yield
    assert time.monotonic() - begun < _LONG_S / 2


def fail_beside_a_gate(on: str, where: str) -> None:
    """A node fails while, or before, its run waits at a gate; on the root, or on another worker."""
    with gw.autograd.context() as ctx:
        hidden = call(0, _layer, _input())
        loss = _break_beside_gate(hidden, on) if where == "worker0" else call(0, _break_beside_gate, hidden, on)
        with _at_once(), pytest.raises(BackwardFailed, match=f"broken on {on} .*failed on worker {where}"):
            ctx.backward(loss, timeout=_LONG_S)
        assert [call(number, _wait_failed, ctx) for number in range(2)] == [True, True]


def leave_a_result_unused(on: str) -> None:
    """In FAST mode, the gradient that a gate waits for never comes."""
    with gw.autograd.context() as ctx:
        hidden = _input().to(on) * 2
        call(1, _to_cpu, hidden)
        with _at_once(), pytest.raises(UnsettledSend, match="no gradient will arrive"):
            ctx.backward(call(0, _layer, hidden).to(on).mul(hidden).sum().cpu(), mode="fast", timeout=_LONG_S)
