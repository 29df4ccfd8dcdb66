"""A table over all workers, with sparse gradients, trained by workers that were sent the sharded tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import gradwire as gw
from gradwire.rpc import RRef
from gradwire.shard import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardMetadata
from shard.worlds import Worlds

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad, in one process, too

ROWS, COLUMNS, BATCH = 40, 6, 12
TRAINERS = ("worker1", "worker2")
CLASSES: list[tuple[type[Any], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SparseAdam, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.5, "lr_decay": 0.1}),
]


def make_table() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def specs() -> list[Any]:
    """Rows over all four workers, of which two train; uneven blocks."""
    blocks = [
        ShardMetadata([0, 0], [9, COLUMNS], "worker3/cpu"),
        ShardMetadata([9, 0], [ROWS - 9, 2], "worker1/cpu"),
        ShardMetadata([9, 2], [ROWS - 9, COLUMNS - 2], "worker0/cpu"),
    ]
    return [ChunkShardingSpec(0, [f"worker{number}/cpu" for number in range(4)]), EnumerableShardingSpec(blocks)]


def make_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids, not of all workers in every batch, and a number for each pair.

    No id is there more than twice: torch adds up the gradients of more in an order that depends on all the others.
    """
    random = torch.Generator().manual_seed(seed)
    first = int(torch.randint(0, ROWS - 16, (1,), generator=random))
    ids = first + torch.stack([torch.randperm(16, generator=random)[:BATCH] for _ in range(2)], dim=1)
    return ids, torch.sin(ids.sum(1).float())


def loss_of(table: torch.Tensor, seed: int) -> torch.Tensor:
    ids, wanted = make_batch(seed)
    rows = F.embedding(ids, table, sparse=True)
    return (rows.prod(1).sum(1) - wanted).square().mean()


class Trainer:
    """On a worker: a sharded table that came with a call, and an optimizer of its own."""

    def __init__(self, table: Any, optimizer_class: type[Any], options: dict[str, Any]) -> None:
        self.table = table
        self.optimizer: Any = (
            gw.optim.DistributedOptimizer(optimizer_class, [("table", table)], **options)
            if isinstance(table, ShardedTensor)
            else optimizer_class([table], **options)
        )

    def step(self, seed: int) -> float:
        if isinstance(self.table, ShardedTensor):
            with gw.autograd.context() as ctx:
                loss = loss_of(self.table, seed)
                ctx.backward(loss)
                self.optimizer.step(ctx)
        else:
            self.optimizer.zero_grad()
            loss = loss_of(self.table, seed)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
        return float(loss.detach())


def train(table: ShardedTensor, optimizer_class: type[Any], options: dict[str, Any], seeds: list[int]) -> list[float]:
    trainer = Trainer(table, optimizer_class, options)
    return [trainer.step(seed) for seed in seeds]


def count_rows(table: ShardedTensor, ids: list[list[int]], rate: float) -> None:
    """Every step subtracts the rate from the rows of its ids, whatever the values are."""
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [table], lr=rate)
    for chosen in ids:
        with gw.autograd.context() as ctx:
            ctx.backward(F.embedding(torch.tensor(chosen), table, sparse=True).sum(), optimizer=optimizer)


def whole(table: ShardedTensor) -> torch.Tensor:
    with torch.no_grad():
        return table.full_tensor()


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES)
def test_one_trainer_is_one_process_bit_for_bit(
    worlds: Worlds, optimizer_class: type[Any], options: dict[str, Any]
) -> None:
    for spec in specs():
        table = spec.shard(make_table()).requires_grad_()
        assert max(shard.box.num_elements for shard in table.metadata().shards_metadata) < ROWS * COLUMNS
        losses = gw.rpc.rpc_sync(TRAINERS[0], train, (table, optimizer_class, options, list(range(8))))
        plain = make_table().requires_grad_()
        alone = Trainer(plain, optimizer_class, options)
        assert losses == [alone.step(seed) for seed in range(8)]
        assert torch.equal(whole(table), plain.detach())


@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES[:2])
def test_trainers_in_turn_are_one_process_bit_for_bit(
    worlds: Worlds, optimizer_class: type[Any], options: dict[str, Any]
) -> None:
    """Each has an optimizer of its own, with its own state; so has the replay."""
    table, plain = specs()[0].shard(make_table()).requires_grad_(), make_table().requires_grad_()
    trainers: list[RRef[Trainer]] = [
        gw.rpc.remote(name, Trainer, (table, optimizer_class, options)) for name in TRAINERS
    ]
    replay = [Trainer(plain, optimizer_class, options) for _ in TRAINERS]
    for seed in range(8):
        turn = seed % len(TRAINERS) if seed < 6 else 0
        assert trainers[turn].rpc_sync().step(seed) == replay[turn].step(seed)
    assert torch.equal(whole(table), plain.detach())


def test_trainers_at_once_lose_no_update(worlds: Worlds) -> None:
    rate, random = 2.0**-6, torch.Generator().manual_seed(5)
    table = specs()[1].shard(torch.zeros(ROWS, COLUMNS)).requires_grad_()
    chosen = [torch.randint(0, ROWS, (10, BATCH), generator=random) for _ in TRAINERS]
    jobs = [
        gw.rpc.rpc_async(name, count_rows, (table, ids.tolist(), rate))
        for name, ids in zip(TRAINERS, chosen, strict=True)
    ]
    for job in jobs:
        job.wait()
    counts = torch.bincount(torch.cat(chosen).flatten(), minlength=ROWS)
    assert torch.equal(whole(table), -rate * counts[:, None].expand(ROWS, COLUMNS))


def test_losses_fall_with_several_trainers_at_once(worlds: Worlds) -> None:
    table = specs()[0].shard(make_table()).requires_grad_()

    def mean_loss() -> float:
        with torch.no_grad():
            found = whole(table)
            return sum(float(loss_of(found, seed)) for seed in range(20)) / 20

    before = mean_loss()
    jobs = [
        gw.rpc.rpc_async(name, train, (table, torch.optim.Adagrad, {"lr": 0.3}, list(range(number, 60, 2))))
        for number, name in enumerate(TRAINERS)
    ]
    for job in jobs:
        assert all(loss == loss for loss in job.wait())  # no nan
    assert mean_loss() < before / 4
