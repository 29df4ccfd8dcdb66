"""One learner, several actors with environments of their own, and gradients that come back through the calls.

    python examples/reinforcement_learning.py

An actor gets the weights of the policy as arguments of a call. It plays, and returns a loss that depends on them. The
learner calls backward: each actor differentiates its own games, and the gradients of the weights come back to the learner.

    learner                                actor0, actor1, actor2
    weights of the policy        -->       play 32 games of 25 moves with them
    sum of the losses            <--       loss (REINFORCE), mean return
    backward                     -->       through 25 moves
    gradient of the weights      <--
    Adam, here

The games: a cart on a line, which is pushed left or right. The nearer it is to the middle, the better.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import gradwire as gw
from gradwire import rpc

NUM_ACTORS, NUM_GAMES, NUM_MOVES = 3, 32, 25
Weights = dict[str, torch.Tensor]


def make_policy() -> nn.Module:
    """Position and speed in, a score for each of two pushes out; the same weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


class Carts:
    """Some carts on lines of their own. Nothing here knows of learning."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def start(self) -> torch.Tensor:
        """Begin new games; returns position and speed of each cart."""
        self.position = torch.rand(NUM_GAMES, generator=self.random) * 2 - 1
        self.speed = torch.zeros(NUM_GAMES)
        return torch.stack((self.position, self.speed), 1)

    def push(self, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart; returns what is seen after that, and a reward for each."""
        self.speed = 0.9 * self.speed + 0.1 * (2.0 * right - 1.0)
        self.position = self.position + self.speed
        return torch.stack((self.position, self.speed), 1), -self.position.abs()


class Actor:
    """Lives on a worker, with its environment."""

    def __init__(self, seed: int) -> None:
        self.carts = Carts(seed)
        self.policy = make_policy()  # its form; the weights come with each call

    def play(self, weights: Weights) -> tuple[torch.Tensor, float]:
        """A loss whose gradient makes what went well more likely, and the mean return."""
        seen, scores, rewards = self.carts.start(), [], []
        for _ in range(NUM_MOVES):
            choices = torch.func.functional_call(self.policy, weights, seen).log_softmax(1)
            pushes = torch.multinomial(choices.detach().exp(), 1, generator=self.carts.random)
            scores.append(choices.gather(1, pushes).squeeze(1))
            seen, reward = self.carts.push(pushes.squeeze(1))
            rewards.append(reward)
        returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)  # from each move to the end
        advantages = (returns - returns.mean(1, keepdim=True)) / returns.std()
        return -(torch.stack(scores) * advantages).mean(), float(returns[0].mean())


def train(actors: list[rpc.RRef[Actor]], policy: nn.Module, num_updates: int) -> list[float]:
    """The mean return before each update."""
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [policy], lr=0.02)
    weights = dict(policy.named_parameters())
    history = []
    for number in range(num_updates):
        with gw.autograd.context() as ctx:
            games = [actor.rpc_async().play(weights) for actor in actors]  # all play at the same time
            losses, returns = zip(*(game.wait() for game in games), strict=True)
            ctx.backward(torch.stack(losses).mean())
            optimizer.step(ctx)
        history.append(sum(returns) / len(returns))
        if number % 15 == 0:
            print(f"update {number:2}: mean return {history[-1]:6.2f}")
    return history


def gradient_error(actors: list[rpc.RRef[Actor]]) -> float:
    """How far a gradient is from the one of the same games in one process."""
    policy, alone = make_policy(), make_policy()
    with gw.autograd.context() as ctx:
        weights = dict(policy.named_parameters())
        games = [actor.rpc_async().play(weights) for actor in actors]
        ctx.backward(torch.stack([game.wait()[0] for game in games]).mean())
        found = [ctx.gradients()[parameter] for parameter in policy.parameters()]
    losses = [Actor(seed).play(dict(alone.named_parameters()))[0] for seed in range(NUM_ACTORS)]
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(alone.parameters()))
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def main() -> None:
    """Trains, and checks."""
    parser = argparse.ArgumentParser(description="One learner, several actors.")
    parser.add_argument("--updates", type=int, default=60)
    num_updates = parser.parse_args().updates
    names = [f"actor{number}" for number in range(NUM_ACTORS)]
    with gw.Cluster.local(NUM_ACTORS, names=names):
        actors = [rpc.remote(name, Actor, args=(seed,)) for seed, name in enumerate(names)]
        error = gradient_error(actors)
        assert error < 1e-6, f"gradients differ by {error:.1e}"
        print(f"the gradient of {NUM_ACTORS * NUM_GAMES} games differs from that of one process by {error:.1e}")
        began = time.perf_counter()
        history = train(actors, make_policy(), num_updates)
        rate = num_updates * NUM_ACTORS * NUM_GAMES * NUM_MOVES / (time.perf_counter() - began)
    before, after = history[0], sum(history[-5:]) / 5
    assert after > before / 2, "it has not learned to stay near the middle"
    print(f"{rate:,.0f} moves/s")
    print(f"reinforcement_learning: the mean return rose from {before:.1f} to {after:.1f} in {num_updates} updates")


if __name__ == "__main__":
    main()
