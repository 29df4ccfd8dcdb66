"""An embedding table that no worker has room for, trained by several trainers with sparse gradients.

    python examples/embedding_table.py --steps 40

Three workers have a third of the table each; two others train it at the same time. They learn which words make a review a
good one, from reviews of which they know the words and whether people liked the film.

    trainer0, trainer1                  table0            table1            table2
    ids of the words of a batch  -->    words 0-16,666    words 16,667-...  the rest
    one vector for each review   <--    each adds up the rows that it has
    backward: their gradients    -->    a sparse gradient: the rows of those words only
    step                         -->    an optimizer for its part of the table

A trainer is sent the table like any other value, and uses it like any other tensor. In the end the program trains a small
table once on the workers, and once in one process, and compares them.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn import functional as F

import gradwire as gw
from gradwire.nn import RemoteModule
from gradwire.shard import ChunkShardingSpec, ShardedTensor

HOLDERS = ("table0", "table1", "table2")
TRAINERS = ("trainer0", "trainer1")
NUM_WORDS, WIDTH = 50_000, 32
NUM_REVIEWS, REVIEW_LENGTH = 512, 20  # in a batch; words in a review


def make_batch(seed: int, num_words: int = NUM_WORDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of some reviews, and who liked the film. Some words are much more common than others, as in life."""
    merits = torch.randn(num_words, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    words = (num_words ** torch.rand(NUM_REVIEWS, REVIEW_LENGTH, generator=random)).long() - 1
    sums = merits[words].sum(1)
    return words, (sums > sums.median()).float()


def loss_of(table: torch.Tensor, head: torch.nn.Module, seed: int) -> torch.Tensor:
    """Says of each review whether it is a good one, and how wrong that is. The table may be sharded, or not."""
    words, liked = make_batch(seed, table.size(0))
    return F.binary_cross_entropy_with_logits(scores_of(table, head, words), liked)


def scores_of(table: torch.Tensor, head: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    """The sum of the rows of all words of a review, as one number."""
    scores: torch.Tensor = head(F.embedding_bag(words, table, mode="sum", sparse=True))
    return scores.squeeze(1)


def train(table: ShardedTensor, head: RemoteModule, trainer: int, num_steps: int) -> list[float]:
    """Runs on a trainer; returns its losses."""
    for_table = gw.optim.DistributedOptimizer(torch.optim.SparseAdam, [("table", table)], lr=0.05)
    for_head = gw.optim.DistributedOptimizer(torch.optim.Adam, [head], lr=0.02)
    losses = []
    for number in range(num_steps):
        with gw.autograd.context() as ctx:
            loss = loss_of(table, head, seed=1_000_000 * (trainer + 1) + number)
            ctx.backward(loss)
            for_table.step(ctx)
            for_head.step(ctx)
        losses.append(float(loss.detach()))
    return losses


def share_right(table: ShardedTensor, head: RemoteModule) -> float:
    """How many new reviews are told right."""
    with torch.no_grad():
        words, liked = make_batch(seed=1)
        return float(((scores_of(table, head, words) > 0) == (liked > 0)).float().mean())


def difference_from_one_process() -> float:
    """Trains a small table on the workers, and the same table in one process."""
    whole = torch.randn(600, 8, generator=torch.Generator().manual_seed(2)) / 8
    sharded = ChunkShardingSpec(0, [f"{name}/cpu" for name in HOLDERS]).shard(whole)
    sharded.requires_grad_()
    head = torch.nn.Linear(8, 1)
    distributed = gw.optim.DistributedOptimizer(torch.optim.SGD, [sharded], lr=0.5)
    whole.requires_grad_()
    for seed in range(5):
        with gw.autograd.context() as ctx:
            ctx.backward(loss_of(sharded, head, seed))
            distributed.step(ctx)
        (gradient,) = torch.autograd.grad(loss_of(whole, head, seed), [whole])
        with torch.no_grad():
            whole -= 0.5 * gradient.to_dense()
    return float((sharded.full_tensor() - whole).detach().abs().max())


def describe(table: ShardedTensor) -> None:
    """Who has what of the table, and what a step touches."""
    num_bytes = table.numel() * table.element_size()
    print(f"the table has {table.size(0):,} rows of {table.size(1)} numbers, {num_bytes / 1e6:.1f} MB:")
    for shard in table.metadata().shards_metadata:
        first, number = shard.shard_offsets[0], shard.shard_sizes[0]
        print(f"  rows {first:,} to {first + number - 1:,} are on {shard.placement}")
    touched = len(torch.unique(make_batch(seed=2)[0]))
    print(
        f"a batch of {NUM_REVIEWS} reviews has {touched:,} of the words: its gradient is {touched / NUM_WORDS:.0%} of that"
    )


def main() -> None:
    """Trains, and checks."""
    parser = argparse.ArgumentParser(description="A sharded embedding table, and several trainers.")
    parser.add_argument("--steps", type=int, default=40, help="of each trainer")
    num_steps = parser.parse_args().steps
    names = [*HOLDERS, *TRAINERS]
    with gw.Cluster.local(len(names), names=names) as cluster:
        spec = ChunkShardingSpec(0, [f"{name}/cpu" for name in HOLDERS])
        table = gw.shard.sharded_tensor.zeros(spec, NUM_WORDS, WIDTH, requires_grad=True)
        head = RemoteModule("table0", torch.nn.Linear, (WIDTH, 1))
        describe(table)
        before, began = share_right(table, head), time.perf_counter()
        jobs = [
            worker.submit(train, table, head, number, num_steps)
            for number, worker in enumerate(cluster.workers[len(HOLDERS) :])
        ]
        for name, job in zip(TRAINERS, jobs, strict=True):
            losses = job.wait()
            print(f"{name}: the loss fell from {losses[0]:.3f} to {sum(losses[-5:]) / 5:.3f} in {num_steps} steps")
        rate = len(jobs) * num_steps * NUM_REVIEWS / (time.perf_counter() - began)
        print(f"together they read {rate:,.0f} reviews/s")
        after, error = share_right(table, head), difference_from_one_process()
    assert error < 1e-5, f"the sharded table differs by {error:.1e}"
    print(f"a small table, trained like this, differs from one of one process by {error:.1e}")
    print(f"embedding_table: {before:.0%} of new reviews were told right before, {after:.0%} now")


if __name__ == "__main__":
    main()
