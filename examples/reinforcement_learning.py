"""
Reinforcement learning with gradients through calls
===================================================

One learner has the policy. Three actors have environments of their own. An actor gets the weights of the policy as
arguments of a call, plays, and returns a loss that depends on them. When the learner calls ``backward``, each actor
differentiates its own games, and the gradients of the weights come back to the learner::

    learner                                actor0, actor1, actor2
    weights of the policy        -->       play 32 games of 25 moves
    mean of the losses           <--       loss (REINFORCE), mean return
    backward                     -->       through 25 moves
    gradients of the weights     <--
    step of Adam

Run it::

    python examples/reinforcement_learning.py

Before it trains, the program compares one gradient with that of the same games in one process.
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
    """Return a module that takes position and speed, and gives a score for each of two pushes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same initial weights wherever it is made
        return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))


# %%
# The environment
# ---------------
# A cart on a line is pushed to the left or to the right. The nearer it is to the middle, the better.


class Carts:
    """Several games at once."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def start(self) -> torch.Tensor:
        """Begin new games, and return position and speed of each cart."""
        self.position = torch.rand(NUM_GAMES, generator=self.random) * 2 - 1
        self.speed = torch.zeros(NUM_GAMES)
        return torch.stack((self.position, self.speed), 1)

    def push(self, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Push each cart, and return what is seen after that with a reward for each."""
        self.speed = 0.9 * self.speed + 0.1 * (2.0 * right - 1.0)
        self.position = self.position + self.speed
        return torch.stack((self.position, self.speed), 1), -self.position.abs()


# %%
# On an actor
# -----------
# ``functional_call`` runs the module with the weights of the call in place of its own.


class Actor:
    """Lives on a worker, with its environment."""

    def __init__(self, seed: int) -> None:
        self.carts = Carts(seed)
        self.policy = make_policy()  # its weights are not used: they come with each call

    def play(self, weights: Weights) -> tuple[torch.Tensor, float]:
        """Return a loss whose gradient makes good moves more likely, and the mean return."""
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


# %%
# On the learner
# --------------
# All actors play at the same time.


def train(actors: list[rpc.RRef[Actor]], policy: nn.Module, num_updates: int) -> list[float]:
    """Return the mean return before each update."""
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [policy], lr=0.02)
    weights = dict(policy.named_parameters())
    history = []
    for number in range(num_updates):
        with gw.autograd.context() as ctx:
            games = [actor.rpc_async().play(weights) for actor in actors]
            losses, returns = zip(*(game.wait() for game in games), strict=True)
            ctx.backward(torch.stack(losses).mean())
            optimizer.step(ctx)
        history.append(sum(returns) / len(returns))
        if number % 15 == 0:
            print(f"update {number:2}: mean return {history[-1]:6.2f}")
    return history


# %%
# Compare with one process
# ------------------------


def gradient_error(actors: list[rpc.RRef[Actor]]) -> float:
    """Return the largest difference from the gradient of one process."""
    policy, alone = make_policy(), make_policy()
    with gw.autograd.context() as ctx:
        weights = dict(policy.named_parameters())
        games = [actor.rpc_async().play(weights) for actor in actors]
        ctx.backward(torch.stack([game.wait()[0] for game in games]).mean())
        found = [ctx.gradients()[parameter] for parameter in policy.parameters()]
    losses = [Actor(seed).play(dict(alone.named_parameters()))[0] for seed in range(NUM_ACTORS)]
    expected = torch.autograd.grad(torch.stack(losses).mean(), list(alone.parameters()))
    return float(torch.stack([(one - other).abs().max() for one, other in zip(found, expected, strict=True)]).max())


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a policy with three actors.")
    parser.add_argument("--updates", type=int, default=60)
    num_updates = parser.parse_args().updates
    names = [f"actor{number}" for number in range(NUM_ACTORS)]
    with gw.Cluster.local(NUM_ACTORS, names=names):
        actors = [rpc.remote(name, Actor, args=(seed,)) for seed, name in enumerate(names)]
        error = gradient_error(actors)
        if not error <= 1e-6:
            raise SystemExit(f"reinforcement_learning: the gradient differs from that of one process by {error:.1e}")
        print(f"the gradient of {NUM_ACTORS * NUM_GAMES} games differs from that of one process by {error:.1e}")
        began = time.perf_counter()
        history = train(actors, make_policy(), num_updates)
        rate = num_updates * NUM_ACTORS * NUM_GAMES * NUM_MOVES / (time.perf_counter() - began)
    before, after = history[0], sum(history[-5:]) / 5
    if not after > before / 2:  # returns are negative
        raise SystemExit(f"reinforcement_learning: the mean return is {after:.1f}, {before:.1f} before training")
    print(f"{rate:,.0f} moves/s")
    print(f"reinforcement_learning: the mean return rose from {before:.1f} to {after:.1f} in {num_updates} updates")


if __name__ == "__main__":
    main()
