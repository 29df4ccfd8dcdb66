"""Page 1 of the tutorial: functions that run in other processes."""

import torch

import gradwire as gw

NUM_WORDS = 100


def make_batch(number):
    """Return 64 reviews of five words each, and which of them are positive."""
    random = torch.Generator().manual_seed(number)
    words = torch.randint(NUM_WORDS, (64, 5), generator=random)
    positive = (words % 2).sum(1) > 2  # words with odd numbers are friendly
    return words, positive.float()


def count_positive(number):
    """Return how many reviews of a batch are positive."""
    _, positive = make_batch(number)
    return int(positive.sum())


def main():
    with gw.Cluster.local(2) as cluster:
        first, second = cluster.workers

        words, positive = first.call(make_batch, 0)  # waits for the result
        print("first review:", words[0].tolist(), "is positive:", bool(positive[0]))

        future = second.submit(count_positive, 0)  # does not wait
        print("positive:", future.wait(), "of", len(words))

        print("in four batches:", cluster.map(count_positive, range(4)))


if __name__ == "__main__":
    main()
