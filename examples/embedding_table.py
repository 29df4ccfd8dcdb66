"""
Shard an embedding table
========================

Three workers hold one third each of an embedding table. Two others train it at the same time with sparse gradients: a
step sends and changes the rows of the words in its batch and no others. The model learns from made-up reviews which
words make a review a good one::

    trainer0, trainer1                  table0            table1            table2
    ids of the words of a batch  -->    words 0-16,666    words 16,667-...  the rest
    one vector per review        <--    each adds up the rows that it has
    backward: their gradients    -->    a sparse gradient: the rows of those words only
    step                         -->    an optimizer for its part of the table

Run it::

    python examples/embedding_table.py --steps 40

The first lines show where the rows are and how small the gradient of a batch is. At the end the program trains a
small table on the workers and in one process, and compares the two.
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
NUM_REVIEWS, REVIEW_LENGTH = 512, 20  # reviews in a batch, words in a review

# %%
# The data
# --------
# A review is good if its words are, in sum. As in real text, some words are much more common than others.


def make_batch(seed: int, num_words: int = NUM_WORDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the words of some reviews [NUM_REVIEWS, REVIEW_LENGTH], and 1.0 for each good one."""
    merits = torch.randn(num_words, generator=torch.Generator().manual_seed(0))
    random = torch.Generator().manual_seed(seed)
    words = (num_words ** torch.rand(NUM_REVIEWS, REVIEW_LENGTH, generator=random)).long() - 1
    sums = merits[words].sum(1)
    return words, (sums > sums.median()).float()


# %%
# The model
# ---------
# One vector per word, added up over a review, then a linear layer. ``table`` may be a sharded tensor or a plain one:
# the code is the same.


def compute_scores(table: torch.Tensor, head: torch.nn.Module, words: torch.Tensor) -> torch.Tensor:
    scores: torch.Tensor = head(F.embedding_bag(words, table, mode="sum", sparse=True))
    return scores.squeeze(1)


def compute_loss(table: torch.Tensor, head: torch.nn.Module, seed: int) -> torch.Tensor:
    words, labels = make_batch(seed, table.size(0))
    return F.binary_cross_entropy_with_logits(compute_scores(table, head, words), labels)


def compute_accuracy(table: torch.Tensor, head: torch.nn.Module) -> float:
    """Return the share of new reviews that the model classifies correctly."""
    with torch.no_grad():
        words, labels = make_batch(seed=1)
        return float(((compute_scores(table, head, words) > 0) == (labels > 0)).float().mean())


# %%
# On a trainer
# ------------
# A trainer is sent the table like any other argument, and makes optimizers of its own. It tells the driver how far it is.


def train(table: ShardedTensor, head: RemoteModule, trainer: int, num_steps: int) -> list[float]:
    table_optimizer = gw.optim.DistributedOptimizer(torch.optim.SparseAdam, [("table", table)], lr=0.05)
    head_optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [head], lr=0.02)
    losses = []
    for step in range(num_steps):
        with gw.autograd.context() as ctx:
            loss = compute_loss(table, head, seed=1_000_000 * (trainer + 1) + step)
            ctx.backward(loss)
            table_optimizer.step(ctx)
            head_optimizer.step(ctx)
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            gw.rpc.rpc_sync("driver", report, args=(trainer, len(losses), losses[-1]))
    return losses


def report(trainer: int, step: int, loss: float) -> None:
    print(f"trainer{trainer}: step {step}, loss {loss:.3f}\n", end="")  # in one piece: both may report at once


# %%
# On the driver
# -------------


def make_model() -> tuple[ShardedTensor, RemoteModule]:
    """Return the table, in three parts, and the linear layer."""
    spec = ChunkShardingSpec(0, [f"{name}/cpu" for name in HOLDERS])
    table = gw.shard.sharded_tensor.zeros(spec, NUM_WORDS, WIDTH, requires_grad=True)
    return table, RemoteModule("table0", torch.nn.Linear, (WIDTH, 1))


def show_placement(table: ShardedTensor) -> None:
    num_bytes = table.numel() * table.element_size()
    print(f"the table has {table.size(0):,} rows of {table.size(1)} numbers, {num_bytes / 1e6:.1f} MB:")
    for shard in table.metadata().shards_metadata:
        first, number = shard.shard_offsets[0], shard.shard_sizes[0]
        print(f"  rows {first:,} to {first + number - 1:,} are on {shard.placement}")
    touched = len(torch.unique(make_batch(seed=2)[0]))
    print(
        f"a batch of {NUM_REVIEWS} reviews uses {touched:,} rows: its gradient is {touched / NUM_WORDS:.0%} of the table"
    )


def train_together(
    cluster: gw.Cluster, table: ShardedTensor, head: RemoteModule, num_steps: int
) -> dict[str, list[float]]:
    """Return the losses of each trainer."""
    trainers = cluster.workers[len(HOLDERS) :]
    futures = {
        worker.name: worker.submit(train, table, head, number, num_steps) for number, worker in enumerate(trainers)
    }
    losses = {name: future.wait() for name, future in futures.items()}
    for name, found in losses.items():
        last = sum(found[-5:]) / 5
        print(f"{name}: the loss fell from {found[0]:.3f} to {last:.3f} in {num_steps} steps (mean of the last 5)")
    return losses


# %%
# Compare with one process
# ------------------------


def difference_from_one_process() -> float:
    """Train a small table on the workers and in one process; return the largest difference."""
    local = torch.randn(600, 8, generator=torch.Generator().manual_seed(2)) / 8
    sharded = ChunkShardingSpec(0, [f"{name}/cpu" for name in HOLDERS]).shard(local)
    sharded.requires_grad_()
    head = torch.nn.Linear(8, 1)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [sharded], lr=0.5)
    local.requires_grad_()
    for seed in range(5):
        with gw.autograd.context() as ctx:
            ctx.backward(compute_loss(sharded, head, seed))
            optimizer.step(ctx)
        (gradient,) = torch.autograd.grad(compute_loss(local, head, seed), [local])
        with torch.no_grad():
            local -= 0.5 * gradient.to_dense()
    return float((sharded.full_tensor() - local).detach().abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a sharded embedding table from two trainers.")
    parser.add_argument("--steps", type=int, default=40, help="steps of each trainer (default: 40)")
    num_steps = parser.parse_args().steps
    names = [*HOLDERS, *TRAINERS]
    with gw.Cluster.local(len(names), names=names) as cluster:
        table, head = make_model()
        show_placement(table)
        before, start = compute_accuracy(table, head), time.perf_counter()
        train_together(cluster, table, head, num_steps)
        rate = len(TRAINERS) * num_steps * NUM_REVIEWS / (time.perf_counter() - start)
        print(f"both trainers together: {rate:,.0f} reviews/s")
        after, difference = compute_accuracy(table, head), difference_from_one_process()
    if not difference <= 1e-5:
        raise SystemExit(f"embedding_table: the sharded table differs from that of one process by {difference:.1e}")
    if after <= before:
        raise SystemExit(f"embedding_table: the accuracy on new reviews is {after:.0%}, {before:.0%} before training")
    print(f"a small table trained in the same way differs from that of one process by {difference:.1e}")
    print(f"embedding_table: the accuracy on new reviews rose from {before:.0%} to {after:.0%}")


if __name__ == "__main__":
    main()
