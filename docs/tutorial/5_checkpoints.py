"""Page 5 of the tutorial: save, and go on with other workers."""

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


def train_together(model, trainers, numbers):
    """Divide the batches among the trainers, and wait until all of them are done."""
    runs = [trainer.submit(train, model, numbers[start :: len(trainers)]) for start, trainer in enumerate(trainers)]
    for run in runs:
        run.wait()


def main():
    with gw.Cluster.local(3, roles={"server": 1, "trainer": 2}) as cluster:
        server, *trainers = cluster.workers
        model = nn.Sequential(server.module(make_table), server.module(make_head))
        train_together(model, trainers, range(50))
        saved = accuracy(model)
        gw.checkpoint.save("checkpoint", {"model": model, "next_batch": 50})

    with gw.Cluster.local(3, roles={"server": 2, "trainer": 1}) as cluster:  # two servers now, and one trainer
        first, second, *trainers = cluster.workers
        model = nn.Sequential(first.module(make_table), second.module(make_head))
        values = gw.checkpoint.load("checkpoint", {"model": model})
        print("loaded:", values, "- same accuracy:", accuracy(model) == saved)
        train_together(model, trainers, range(values["next_batch"], 100))
        print(f"right: {accuracy(model):.0%} of new reviews")
        gw.checkpoint.save("checkpoint", {"model": model, "next_batch": 100})

    weights = gw.checkpoint.read("checkpoint")["model"]  # plain tensors, no cluster
    print("tensors:", ", ".join(weights))


if __name__ == "__main__":
    main()
