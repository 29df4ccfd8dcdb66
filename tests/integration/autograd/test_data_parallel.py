"""`DistributedDataParallel` inside contexts: replicas on trainers, with a module that they share on another worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.cluster.api import Cluster, Worker
from gradwire.errors import BackwardFailed

Tensor = torch.Tensor
State = dict[str, Tensor]

NUM_TRAINERS = 2
NUM_STEPS = 3
LR = 0.1
ROWS, WIDTH = 4, 3


def _make_dense() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def _make_shared() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(WIDTH, WIDTH).double()


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def _loss(dense: nn.Module, shared: Any, batch: Tensor) -> Tensor:
    loss: Tensor = dense(torch.sin(shared(batch))).square().mean()
    return loss


def _join(rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=NUM_TRAINERS)


def _leave() -> None:
    dist.destroy_process_group()


def _train(rank: int, shared: gw.nn.RemoteModule, options: dict[str, Any]) -> tuple[State, list[State], bool]:
    """Trains a replica; returns its weights, its gradients step by step, and whether ``.grad`` was left alone."""
    dense = _make_dense()
    replica = DistributedDataParallel(dense, **options)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [dense, shared], lr=LR)
    before = None if "gradient_as_bucket_view" in options else torch.tensor(7.0, dtype=torch.float64)
    grads = {param: None if before is None else before.expand_as(param).clone() for param in dense.parameters()}
    for param, grad in grads.items():
        param.grad = grad
    gradients = []
    for step in range(NUM_STEPS):
        with gw.autograd.context() as ctx:
            ctx.backward(_loss(replica, shared, _batch(rank, step)))
            found = ctx.gradients()
            gradients.append({name: found[param] for name, param in dense.named_parameters()})
            dist.barrier()  # type: ignore[no-untyped-call]  # both have seen the same shared weights
            optimizer.step(ctx)
        dist.barrier()  # type: ignore[no-untyped-call]
    is_untouched = all(
        param.grad is grad and (grad is None or bool((grad == 7).all())) for param, grad in grads.items()
    )
    return dict(dense.state_dict()), gradients, is_untouched


def _train_in_one_process() -> tuple[State, State, list[State]]:
    """The same with one replica: its gradients are the mean of the trainers', those of what they share the sum."""
    dense, shared = _make_dense(), _make_shared()
    gradients = []
    for step in range(NUM_STEPS):
        losses = torch.stack([_loss(dense, shared, _batch(rank, step)) for rank in range(NUM_TRAINERS)])
        mean = torch.autograd.grad(losses.mean(), list(dense.parameters()), retain_graph=True)
        total = torch.autograd.grad(losses.sum(), list(shared.parameters()))
        gradients.append(dict(zip(dict(dense.named_parameters()), mean, strict=True)))
        with torch.no_grad():
            for param, gradient in zip([*dense.parameters(), *shared.parameters()], [*mean, *total], strict=True):
                param -= LR * gradient
    return dict(dense.state_dict()), dict(shared.state_dict()), gradients


def _are_close(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(torch.allclose(found[name], expected[name]) for name in found)


@pytest.fixture
def trainers(cluster: Cluster, tmp_path: Path) -> Iterator[list[Worker]]:
    """The first two workers, in one process group."""
    chosen = cluster.workers[:NUM_TRAINERS]
    futures = [trainer.submit(_join, rank, str(tmp_path / "meeting")) for rank, trainer in enumerate(chosen)]
    for future in futures:
        future.wait()
    yield chosen
    for trainer in chosen:
        trainer.call(_leave)


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}],
    ids=str,
)
def test_replicas_stay_equal_and_are_trained_as_in_one_process(
    cluster: Cluster, trainers: list[Worker], options: dict[str, Any]
) -> None:
    shared = cluster.workers[NUM_TRAINERS].module(_make_shared)
    futures = [trainer.submit(_train, rank, shared, options) for rank, trainer in enumerate(trainers)]
    results = [future.wait() for future in futures]
    dense, expected_shared, gradients = _train_in_one_process()
    for state, found, is_untouched in results:
        assert all(_are_close(one, other) for one, other in zip(found, gradients, strict=True))
        assert _are_close(state, dense)
        assert is_untouched
    assert all(torch.equal(results[0][0][name], results[1][0][name]) for name in dense)
    assert _are_close(shared.state_dict(), expected_shared)


def _accumulate(rank: int) -> State:
    """Two passes in one context, and the ranks meet in the second alone."""
    dense = _make_dense()
    replica = DistributedDataParallel(dense)
    with gw.autograd.context() as ctx:
        with replica.no_sync():
            ctx.backward(replica(_batch(rank, 0)).square().mean())
        ctx.backward(replica(_batch(rank, 1)).square().mean())
        found = ctx.gradients()
    return {name: found[param] for name, param in dense.named_parameters()}


def test_gradients_that_were_gathered_without_sync_are_averaged_with_the_next(trainers: list[Worker]) -> None:
    futures = [trainer.submit(_accumulate, rank) for rank, trainer in enumerate(trainers)]
    one, other = [future.wait() for future in futures]
    dense = _make_dense()
    losses = [dense(_batch(rank, step)).square().mean() for rank in range(NUM_TRAINERS) for step in range(2)]
    expected = torch.autograd.grad(torch.stack(losses).sum() / NUM_TRAINERS, list(dense.parameters()))
    assert _are_close(one, dict(zip(dict(dense.named_parameters()), expected, strict=True)))
    assert all(torch.equal(one[name], other[name]) for name in one)


def _train_unevenly(rank: int) -> State:
    """The second trainer has one batch less: with `Join`, it takes part in what the other still has to do."""
    dense = _make_dense()
    replica = DistributedDataParallel(dense)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [dense], lr=LR)
    with Join([replica]):
        for step in range(NUM_STEPS - rank):
            with gw.autograd.context() as ctx:
                ctx.backward(replica(_batch(rank, step)).square().mean())
                optimizer.step(ctx)
    return dict(dense.state_dict())


def test_replicas_with_uneven_inputs_end_equal(trainers: list[Worker]) -> None:
    futures = [trainer.submit(_train_unevenly, rank) for rank, trainer in enumerate(trainers)]
    one, other = [future.wait() for future in futures]
    assert all(torch.equal(one[name], other[name]) for name in one)


def _use_static_graph() -> str:
    replica = DistributedDataParallel(_make_dense(), static_graph=True)
    with gw.autograd.context() as ctx, pytest.raises(BackwardFailed) as caught:
        ctx.backward(replica(_batch(0, 0)).sum())
    return str(caught.value)


def test_static_graph_is_an_error(trainers: list[Worker]) -> None:
    """It would average nothing in its first pass: that is waited for before there are gradients to average."""
    futures = [trainer.submit(_use_static_graph) for trainer in trainers]
    for future in futures:
        assert "static_graph=True) is not supported inside a context" in future.wait()
