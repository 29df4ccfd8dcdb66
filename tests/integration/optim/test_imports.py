"""Optimizers do not import torch's compiler, which would take every worker seconds before its first one."""

from __future__ import annotations

import sys

import torch

import gradwire as gw
from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck

NAMES = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor")


def is_imported(module: str) -> bool:
    return module in sys.modules


def use_sharded_optimizer() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = gw.shard.ShardedOptimizer({"weight": weight}, torch.optim.Adam, lr=0.1)
    weight.grad = torch.ones(2)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()


def test_the_first_optimizer_of_a_worker_imports_no_compiler(leak_check: LeakCheck) -> None:
    """Made, grown, stepped, clipped, saved, loaded and cleared."""
    with Cluster.local(1) as cluster:
        (worker,) = cluster.workers
        for name in NAMES:
            first, second = (gw.nn.RemoteModule(worker.name, torch.nn.Linear, (2, 2)) for _ in range(2))
            at_once = [first, second] if name == "Adagrad" else [first]  # it takes no further group in torch 2.8
            optimizer = gw.optim.DistributedOptimizer(getattr(torch.optim, name), at_once, lr=0.1)
            if len(at_once) == 1:
                optimizer.add_param_group({"params": [second]})
            with gw.autograd.context() as ctx:
                ctx.backward(second(first(torch.ones(1, 2))).sum())
                optimizer.clip_grad_norm_(ctx, 1.0)
                optimizer.step(ctx)
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad()
        assert not worker.call(is_imported, "torch._dynamo")
        worker.call(use_sharded_optimizer)
        assert not worker.call(is_imported, "torch._dynamo")
