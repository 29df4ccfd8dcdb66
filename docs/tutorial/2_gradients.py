"""Page 2 of the tutorial: gradients that go through calls."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

import gradwire as gw

NUM_WORDS = 100


def make_batch(number):
    """Return 64 reviews of five words each, and which of them are positive."""
    random = torch.Generator().manual_seed(number)
    words = torch.randint(NUM_WORDS, (64, 5), generator=random)
    positive = (words % 2).sum(1) > 2  # words with odd numbers are friendly
    return words, positive.float()


def loss_of(scores, number):
    """Return how badly the sum of the words' scores predicts which reviews are positive."""
    words, positive = make_batch(number)
    return binary_cross_entropy_with_logits(scores[words].sum(1) - 2.5, positive)


def main():
    scores = torch.full((NUM_WORDS,), 0.5, requires_grad=True)
    with gw.Cluster.local(2) as cluster:
        for step in range(3):
            with gw.autograd.context() as ctx:
                futures = [worker.submit(loss_of, scores, worker.rank) for worker in cluster.workers]
                loss = sum(future.wait() for future in futures)
                ctx.backward(loss)  # through both workers
                gradient = ctx.gradients()[scores]
            print(f"step {step}: loss {loss.item():.3f}")
            if step == 0:
                expected = torch.autograd.grad(loss_of(scores, 0) + loss_of(scores, 1), scores)[0]
                print("same gradient as in one process:", torch.allclose(gradient, expected))
            with torch.no_grad():
                scores -= 5 * gradient


if __name__ == "__main__":
    main()
