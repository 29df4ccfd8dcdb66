"""`ShardedOptimizer` in one process, with parameters that are not sharded."""

from __future__ import annotations

import signal

import pytest
import torch

from gradwire.shard import ShardedOptimizer


def test_ctrl_c_ends_a_closure(deferring: None) -> None:
    weight = torch.zeros(2, requires_grad=True)
    optimizer = ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=0.1)
    went_on = []

    def closure() -> float:
        signal.raise_signal(signal.SIGINT)
        went_on.append(True)
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(closure)
    assert not went_on
