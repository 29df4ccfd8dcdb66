"""Random training programs: whatever is done to an optimizer, in whatever order, ends as in one process, bit for bit."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradwire.cluster.api import Cluster
from optim.programs import Distributed, OneProcess, assert_same, batches, make

SEEDS = (1, 2, 3, 4, 5)
_FIRST, _, _LAST = os.environ.get("GRADWIRE_TRAINING_SEEDS", "0-5").partition("-")  # of the programs
CLASSES: list[tuple[type[Any], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.RMSprop, {"lr": 0.02, "centered": True}),
    (torch.optim.Adadelta, {"lr": 0.5}),
]


class Pair:
    """The same program in both worlds, act by act."""

    def __init__(self, cluster: Cluster, choose: random.Random) -> None:
        self.choose = choose
        self.here, self.there = OneProcess(SEEDS), Distributed(SEEDS, cluster.workers)
        optimizer_class, options = choose.choice(CLASSES)
        self.rest = [3, 4]  # parameters that may be added later

        def made(distributed: Any, parameters: list[Any]) -> Any:
            groups = [{"params": parameters[:2]}, {"params": parameters[2:3], "lr": options["lr"] / 2}]
            return make(optimizer_class, **options)(distributed, groups)

        for world in (self.here, self.there):
            world.make_optimizer(made)

    def train(self) -> None:
        """One to three contexts, maybe clipped, with some of the parameters."""
        inputs = [batches(self.choose.randrange(100)) for _ in range(self.choose.randint(1, 3))]
        used = sorted(self.choose.sample(range(len(SEEDS)), self.choose.randint(1, len(SEEDS))))
        clips = self.choose.sample(["norm", "value"], self.choose.randint(0, 2))
        self.here.optimizer.zero_grad()
        for weight in self.here.parameters:
            weight.grad = None  # also of those that are not in the optimizer yet
        for x in inputs:
            self.here.loss(x, used).backward()
        trained = [weight for group in self.here.optimizer.param_groups for weight in group["params"]]
        trained = [weight for weight in trained if weight.grad is not None]
        clips = clips if trained else []  # torch cannot clip nothing by value
        for clip in clips:
            if clip == "norm":
                torch.nn.utils.clip_grad_norm_(trained, 0.3)
            else:
                torch.nn.utils.clip_grad_value_(trained, 0.1)
        self.here.optimizer.step()

        def act(ctx: Any) -> None:
            for clip in clips:
                if clip == "norm":
                    self.there.optimizer.clip_grad_norm_(ctx, 0.3)
                else:
                    self.there.optimizer.clip_grad_value_(ctx, 0.1)
            self.there.optimizer.step(ctx)

        self.there.in_contexts(inputs, act, used)

    def change_rate(self) -> None:
        number, factor = self.choose.randrange(2), self.choose.choice([0.5, 0.9, 1.1])
        for world in (self.here, self.there):
            world.optimizer.param_groups[number]["lr"] *= factor

    def add_group(self) -> None:
        if self.rest:
            number = self.rest.pop(0)
            for world in (self.here, self.there):
                world.optimizer.add_param_group({"params": [world.parameters[number]], "lr": 0.01})

    def reload(self) -> None:
        """Each takes over the state of the other."""
        states = [world.optimizer.state_dict() for world in (self.here, self.there)]
        self.here.optimizer.load_state_dict(states[1])
        self.there.optimizer.load_state_dict(states[0])


@pytest.mark.filterwarnings("ignore:step changed nothing")  # some batches leave all parameters out
@pytest.mark.parametrize("seed", range(int(_FIRST), int(_LAST or _FIRST) + 1))
def test_same_as_in_one_process(cluster: Cluster, seed: int) -> None:
    pair = Pair(cluster, random.Random(seed))
    acts: list[Callable[[], None]] = [pair.train, pair.train, pair.train, pair.change_rate, pair.add_group, pair.reload]
    for _ in range(10):
        act = pair.choose.choice(acts)
        act()
        assert_same(pair.there.values(), pair.here.values())
    pair.train()
    assert_same(pair.there.values(), pair.here.values())
