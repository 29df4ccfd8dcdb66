"""Several trainers on one module: each has exact gradients for the weights that it saw, whoever steps meanwhile."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed
from gradwire.nn import RemoteModule
from gradwire.params import rwlock, snapshots
from gradwire.testing import wait_until
from nn.models import Net, Seen, gradients_of, make_input, step, weights_of

NUM_TRAINERS = 8
NUM_STEPS = 200


def gradients_here(weights: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The oracle: gradients for those weights, in one process."""
    net = Net(4, 2)
    net.load_state_dict(weights, strict=False)
    net(x).square().sum().backward()
    return {name: param.grad for name, param in net.named_parameters() if param.grad is not None}


def assert_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name


def address_on_owner(module_rref: Any) -> list[int]:
    return [param.data_ptr() for param in module_rref.local_value().parameters()]


def address_of(module: RemoteModule) -> list[int]:
    """Where the weights are in the owner's memory."""
    return rpc.rpc_sync(module.module_rref.owner(), address_on_owner, args=(module.module_rref,))


def test_a_step_in_between_changes_no_gradient(cluster: Cluster) -> None:
    remote, x, y = cluster.workers[0].module(Net, 4, 2), make_input(1), make_input(2)
    before = weights_of(remote)
    with gw.autograd.context() as first:
        loss = remote(x).square().sum()
        with gw.autograd.context() as second:
            second.backward(remote(y).square().sum())
            assert_equal(step(remote, second), gradients_here(before, y))
        after = weights_of(remote)
        assert not torch.equal(after["first.weight"], before["first.weight"])
        first.backward(loss)
        assert_equal(step(remote, first), gradients_here(before, x))  # those of the weights it saw
    gradients = gradients_here(before, x)
    expected = {name: value.sub(gradients[name], alpha=0.1) for name, value in after.items()}
    assert_equal(weights_of(remote), expected)  # added to what the second made of them


def test_a_context_that_forwards_again_sees_the_new_weights(cluster: Cluster) -> None:
    remote, x, y = cluster.workers[0].module(Net, 4, 2), make_input(1), make_input(2)
    before = weights_of(remote)
    with gw.autograd.context() as first:
        loss = remote(x).square().sum()
        with gw.autograd.context() as second:
            second.backward(remote(y).square().sum())
            step(remote, second)
        after = weights_of(remote)
        first.backward(loss + remote(y).square().sum())
        old, new = gradients_here(before, x), gradients_here(after, y)
        found = gradients_of(remote, first)
        assert all(torch.allclose(found[name], old[name] + new[name], rtol=1e-12) for name in old)


def test_steps_of_three_contexts_in_any_order(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 2)
    inputs = [make_input(seed) for seed in range(3)]
    seen = []
    with gw.autograd.context() as a:
        losses = [remote(inputs[0]).square().sum()]
        seen.append(weights_of(remote))
        with gw.autograd.context() as b:
            losses.append(remote(inputs[1]).square().sum())
            seen.append(weights_of(remote))
            b.backward(losses[1])
            step(remote, b)
            with gw.autograd.context() as c:
                losses.append(remote(inputs[2]).square().sum())
                seen.append(weights_of(remote))
                c.backward(losses[2])
                step(remote, c)
        a.backward(losses[0])
        assert_equal(gradients_of(remote, a), gradients_here(seen[0], inputs[0]))
        step(remote, a)


def test_a_lone_trainer_copies_nothing(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(Net, 4, 2), make_input(1)
    where = address_of(remote)
    for _ in range(3):
        with gw.autograd.context() as ctx:
            ctx.backward(remote(x).square().sum())
            step(remote, ctx)
            assert address_of(remote) == where


def test_only_what_others_have_used_is_copied(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(Net, 4, 2), make_input(1).requires_grad_()
    where = address_of(remote)
    with gw.autograd.context() as first:
        loss = remote.first_only(x).square().sum()
        with gw.autograd.context() as second:
            second.backward(remote(x).square().sum())
            step(remote, second)
        now = address_of(remote)
        first.backward(loss)
    assert now[0] != where[0]
    assert now[1:] == where[1:]  # no gradient needs a bias, and the first context has not used the second layer


def test_a_step_by_hand_is_an_error_as_ever(cluster: Cluster) -> None:
    """Nobody can know who changed it: torch's check is kept."""
    remote, x = cluster.workers[0].module(Net, 4, 2), make_input(1).requires_grad_()
    with gw.autograd.context() as ctx:
        loss = remote(x).square().sum()
        rpc.rpc_sync("worker0", change_by_hand, args=(remote.module_rref,))
        with pytest.raises(BackwardFailed, match="modified by an inplace operation"):
            ctx.backward(loss)


def change_by_hand(module_rref: Any) -> None:
    with torch.no_grad():
        for param in module_rref.local_value().parameters():
            param.add_(1.0)


def test_backward_after_the_own_step_is_an_error_as_ever(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(Net, 4, 2), make_input(1).requires_grad_()
    with gw.autograd.context() as ctx:
        loss = remote(x).square().sum()
        ctx.backward(loss, retain_graph=True)
        step(remote, ctx)
        with pytest.raises(BackwardFailed, match="modified by an inplace operation"):
            ctx.backward(loss)


class Bends(nn.Module):
    """Changes an intermediate result that its gradient needs: an error with and without hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor, is_wrong: bool) -> torch.Tensor:
        hidden = torch.exp(x * self.weight)
        result = hidden * hidden
        if is_wrong:
            hidden.detach().add_(1.0)
        return result


def test_other_tensors_are_checked_as_ever(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(Bends), make_input(1)
    for is_wrong in (False, True):
        with gw.autograd.context() as ctx:
            loss = remote(x, is_wrong).sum()
            if not is_wrong:
                ctx.backward(loss)
                assert gradients_of(remote, ctx)["weight"].shape == (4,)
            else:
                with pytest.raises(BackwardFailed, match="modified by an inplace operation"):
                    ctx.backward(loss)


def second_order(net: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """In one process: the gradient of the squared gradient."""
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return slope, slope.square().sum()


def test_gradients_of_gradients_while_another_steps(cluster: Cluster) -> None:
    remote, x, y = cluster.workers[0].module(Net, 4, 2), make_input(1).requires_grad_(), make_input(2)
    before = weights_of(remote)
    local = Net(4, 2)
    slope_here, total_here = second_order(local, x)
    total_here.backward()

    def step_of_another() -> None:
        with gw.autograd.context() as other:
            other.backward(remote(y).square().sum())
            step(remote, other)

    with gw.autograd.context() as ctx:
        loss = remote(x).square().sum()
        step_of_another()
        (slope,) = gw.autograd.grad(ctx, loss, x, create_graph=True)
        assert torch.allclose(slope, slope_here, rtol=1e-12)
        step_of_another()
        ctx.backward(slope.square().sum())
        found = gradients_of(remote, ctx)
    assert not torch.equal(weights_of(remote)["first.weight"], before["first.weight"])
    for name, param in local.named_parameters():
        if param.grad is not None and param.grad.any():
            assert torch.allclose(found[name], param.grad, rtol=1e-10), name


def test_gradients_of_gradients_where_the_step_comes_between_the_passes(cluster: Cluster) -> None:
    remote, x, y = cluster.workers[0].module(Net, 4, 2), make_input(1).requires_grad_(), make_input(2)
    local = Net(4, 2)
    _, total_here = second_order(local, x)
    total_here.backward()
    with gw.autograd.context() as ctx:
        (slope,) = gw.autograd.grad(ctx, remote(x).square().sum(), x, create_graph=True)
        with gw.autograd.context() as other:
            other.backward(remote(y).square().sum())
            step(remote, other)
        ctx.backward(slope.square().sum())
        found = gradients_of(remote, ctx)
    for name in ("first.weight", "second.weight"):
        assert torch.allclose(found[name], local.get_parameter(name).grad, rtol=1e-10), name


_weight = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))


def use_weight(x: torch.Tensor) -> torch.Tensor:
    """A plain function over a parameter of its worker, a view of it, and what is detached from it."""
    rows = _weight.view(2, 2)
    return (torch.tanh(x * _weight) * _weight.detach()).sum() + (rows @ rows.t()).sum()


def guard_weight(mode: str) -> None:
    with torch.no_grad():
        _weight.copy_(torch.linspace(-1, 1, 4, dtype=torch.float64))
    snapshots.guard([_weight], mode)  # type: ignore[arg-type]


def step_weight(context_id: int) -> torch.Tensor:
    gradient = gw.autograd.get_gradients(context_id)[_weight]
    with snapshots.stepping([_weight], [context_id]), torch.no_grad():
        _weight.sub_(gradient, alpha=0.1)
    return gradient


def test_plain_functions_are_protected_too(cluster: Cluster) -> None:
    rpc.rpc_sync("worker1", guard_weight, args=("snapshot",))
    x, y = make_input(1, 4, 1).flatten(), make_input(2, 4, 1).flatten()
    use_weight(x).backward()
    with gw.autograd.context() as first:
        loss = rpc.rpc_sync("worker1", use_weight, args=(x,))
        for _ in range(2):
            with gw.autograd.context() as second:
                second.backward(rpc.rpc_sync("worker1", use_weight, args=(y,)))
                rpc.rpc_sync("worker1", step_weight, args=(int(second),))
        first.backward(loss)
        assert torch.equal(rpc.rpc_sync("worker1", step_weight, args=(int(first),)), _weight.grad)


def use_and_show(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What it makes of the weight, and which weight that was."""
    return use_weight(x), _weight.detach().clone()


def train_plainly(trainer: int, num_steps: int) -> int:
    """As `train_and_check`, with plain functions."""
    num_wrong = 0
    for number in range(num_steps):
        x = make_input(1000 * trainer + number, 4, 1).flatten()
        with gw.autograd.context() as ctx:
            loss, seen = rpc.rpc_sync("worker1", use_and_show, args=(x,))
            ctx.backward(loss)
            found = rpc.rpc_sync("worker1", step_weight, args=(int(ctx),))
        weight = seen.detach().clone().requires_grad_()
        rows = weight.view(2, 2)
        ((torch.tanh(x * weight) * weight.detach()).sum() + (rows @ rows.t()).sum()).backward()
        num_wrong += not torch.allclose(found, weight.grad, rtol=1e-12)
    return num_wrong


def test_trainers_with_plain_functions(cluster: Cluster) -> None:
    rpc.rpc_sync("worker1", guard_weight, args=("snapshot",))
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(train_plainly, number, 50) for number in range(4)]
        assert [job.result(timeout=60) for job in jobs] == [0] * 4


def train_and_check(remote: RemoteModule, trainer: int, num_steps: int) -> int:
    """One trainer; counts gradients that are not those of the weights it saw."""
    num_wrong = 0
    for number in range(num_steps):
        x = make_input(1000 * trainer + number)
        with gw.autograd.context() as ctx:
            result, seen = remote(x)
            ctx.backward(result.square().sum())
            found = step(remote, ctx, rate=0.01)["weight"]
        weight = seen.detach().clone().requires_grad_()
        torch.tanh(x @ weight).square().sum().backward()
        num_wrong += not torch.equal(found, weight.grad)
    return num_wrong


@pytest.mark.slow
def test_eight_trainers(cluster: Cluster) -> None:
    """Threads of the driver, and of the other worker."""
    remote = cluster.workers[0].module(Seen)
    with ThreadPoolExecutor(NUM_TRAINERS) as pool:
        jobs = [pool.submit(train_and_check, remote, number, NUM_STEPS) for number in range(NUM_TRAINERS // 2)]
        jobs += [
            pool.submit(rpc.rpc_sync, "worker1", train_and_check, (remote, number, NUM_STEPS), None, 0)
            for number in range(NUM_TRAINERS // 2, NUM_TRAINERS)
        ]
        assert [job.result(timeout=100) for job in jobs] == [0] * NUM_TRAINERS


def test_hogwild_neither_copies_nor_fails(cluster: Cluster) -> None:
    remote, x, y = RemoteModule("worker0", Net, (4, 2), concurrency="hogwild"), make_input(1), make_input(2)
    where = address_of(remote)
    with gw.autograd.context() as first:
        loss = remote(x).square().sum()
        with gw.autograd.context() as second:
            second.backward(remote(y).square().sum())
            step(remote, second)
        assert address_of(remote) == where
        first.backward(loss)
        assert len(step(remote, first)) == 4


def hammer_carelessly(remote: RemoteModule, trainer: int, num_steps: int) -> int:
    for number in range(num_steps):
        with gw.autograd.context() as ctx:
            ctx.backward(remote(make_input(1000 * trainer + number)).square().sum())
            step(remote, ctx, rate=0.01)
    return num_steps


def test_hogwild_trainers(cluster: Cluster) -> None:
    remote = RemoteModule("worker0", Net, (4, 2), concurrency="hogwild")
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(hammer_carelessly, remote, number, 25) for number in range(4)]
        assert [job.result(timeout=60) for job in jobs] == [25] * 4
    assert all(value.isfinite().all() for value in weights_of(remote).values())


def count_guarded() -> int:
    gc.collect()
    snapshots.guard([], "snapshot")
    return len(rwlock.guarded_params) + len(rwlock._by_memory)


@pytest.fixture
def _nothing_stays(cluster: Cluster) -> Iterator[None]:
    before = cluster.workers[0].call(count_guarded)
    yield
    gc.collect()
    wait_until(lambda: cluster.workers[0].call(count_guarded) == before, 20.0, "that parameters are forgotten")


@pytest.mark.usefixtures("_nothing_stays")
def test_nothing_is_kept_of_modules_that_are_gone(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 2)
    with gw.autograd.context() as ctx:
        ctx.backward(remote(make_input(1)).sum())
        step(remote, ctx)
    assert cluster.workers[0].call(count_guarded) >= 8


_nodes: list[weakref.ref[Any]] = []


class Mark:
    """Lives as long as a node of the graph."""


class Exponential(nn.Module):
    """Its node saves its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = torch.exp(x * self.weight)
        mark = Mark()
        _nodes.append(weakref.ref(mark))
        result.grad_fn.metadata["mark"] = mark  # type: ignore[union-attr]
        return result


def num_nodes() -> int:
    return sum(node() is not None for node in _nodes)


def test_what_is_saved_is_freed(cluster: Cluster) -> None:
    """A result that its node kept as itself would never be."""
    remote, x = cluster.workers[0].module(Exponential), make_input(1)
    for is_done in (False, True):
        with gw.autograd.context() as ctx:
            loss = remote(x).sum()
            assert cluster.workers[0].call(num_nodes) == 1
            if is_done:
                ctx.backward(loss)
        wait_until(lambda: not cluster.workers[0].call(num_nodes), 20.0, "that the graph is freed")
    assert cluster.workers[0].call(num_nodes) == 0
