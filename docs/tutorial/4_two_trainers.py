"""Page 4 of the tutorial: two trainers share one model."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import gradwire as gw

NUM_WORDS = 100


def make_batch(number):
    """Return 64 reviews of five words each, and which of them are positive."""
    random = torch.Generator().manual_seed(number)
    words = torch.randint(NUM_WORDS, (64, 5), generator=random)
    positive = (words % 2).sum(1) > 2  # words with odd numbers are friendly
    return words, positive.float()


def make_table():
    """Return a vector for each word; a review is the sum of its words."""
    torch.manual_seed(0)
    return nn.EmbeddingBag(NUM_WORDS, 8, mode="sum")


def make_head():
    """Return the layers that turn the vector of a review into one score."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))


def train_step(model, optimizer, number):
    """Make one step on one batch, and return its loss."""
    words, positive = make_batch(number)
    with gw.autograd.context() as ctx:
        loss = binary_cross_entropy_with_logits(model(words), positive)
        ctx.backward(loss)
        optimizer.step(ctx)
    return loss.item()


def accuracy(model):
    """Return the share of 640 new reviews that the model gets right."""
    batches = [make_batch(1_000_000 + number) for number in range(10)]
    with torch.no_grad():
        return sum(((model(words) > 0) == positive).float().mean().item() for words, positive in batches) / 10


def train(model, numbers):
    """Train on these batches; a trainer runs this."""
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [model], lr=0.03)
    for number in numbers:
        train_step(model, optimizer, number)


def main():
    with gw.Cluster.local(3, roles={"server": 1, "trainer": 2}) as cluster:
        server, *trainers = cluster.workers
        print("workers:", [worker.name for worker in cluster.workers])
        model = nn.Sequential(server.module(make_table), server.module(make_head))
        print(f"right: {accuracy(model):.0%} of new reviews")
        runs = [trainer.submit(train, model, range(start, 100, 2)) for start, trainer in enumerate(trainers)]
        for run in runs:
            run.wait()
        print(f"right: {accuracy(model):.0%} of new reviews")


if __name__ == "__main__":
    main()
