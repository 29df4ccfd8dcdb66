"""What cannot be optimized is refused, and says why."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import optim, rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import CannotSend, ConfigurationError, OptimizerError, OptimizerNotMade, UnknownContext
from gradwire.optim.local import OPERATE
from gradwire.rpc import RRef
from optim.programs import Distributed, batches, make, make_weight

SGD = torch.optim.SGD


def make_non_leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True) * 2


def make_text() -> str:
    return "weight"


def make_two_of_one() -> tuple[RRef[Any], RRef[Any]]:
    weight = torch.nn.Parameter(torch.ones(2))
    return RRef(weight), RRef(weight)


def failing() -> None:
    raise ArithmeticError("no parameter today")


class OnlyOnDriver(SGD):
    """Cannot be made on the workers."""

    def __init__(self, params: Any, lr: float) -> None:
        if rpc.get_worker_info().name != "driver":
            raise LookupError("only at home")
        super().__init__(params, lr)


@pytest.mark.parametrize("what", [None, 3, "SGD", torch.nn.Linear, SGD([torch.ones(1)], lr=1.0)])
def test_not_a_class_of_optimizers(cluster: Cluster, what: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected an optimizer class"):
        optim.DistributedOptimizer(what, [torch.nn.Parameter(torch.ones(1))], lr=0.1)


@pytest.mark.parametrize("params", [3, None, "weights", b"weights", ["weight"], [3], [("name", 3)], [["nested"]]])
def test_not_parameters(cluster: Cluster, params: Any) -> None:
    with pytest.raises(ConfigurationError, match="expected"):
        optim.DistributedOptimizer(SGD, params, lr=0.1)


@pytest.mark.parametrize("params", [[], (), [torch.nn.ReLU()], [{"params": []}]])
def test_no_parameters(cluster: Cluster, params: Any) -> None:
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        optim.DistributedOptimizer(SGD, params, lr=0.1)


def test_groups_that_are_none(cluster: Cluster) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    for params in ([{"lr": 0.1}], [{"params": weight}, weight]):
        with pytest.raises(ConfigurationError, match="a parameter group is a dict"):
            optim.DistributedOptimizer(SGD, params, lr=0.1)
    with pytest.raises(ConfigurationError, match="a set have no order"):
        optim.DistributedOptimizer(SGD, [{"params": {weight}}], lr=0.1)
    with pytest.raises(ConfigurationError, match="two parameters have the name 'a'"):
        optim.DistributedOptimizer(SGD, [("a", weight), ("a", torch.nn.Parameter(torch.ones(1)))], lr=0.1)


def test_a_parameter_twice(cluster: Cluster) -> None:
    """Through one reference, through two, and in two groups."""
    one = rpc.remote("worker0", make_weight, (1,))
    two = list(cluster.workers[0].call(make_two_of_one))
    for params in ([one, one], two, [{"params": one}, {"params": one}], [two[0], one, two[1]]):
        with pytest.raises(OptimizerNotMade, match=r"worker0: .*appear more than once"):
            optim.DistributedOptimizer(SGD, params, lr=0.1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [(make_non_leaf, "non-leaf"), (make_text, "not a tensor, but a str"), (failing, "no parameter today")],
)
def test_references_to_something_else(cluster: Cluster, function: Any, reason: str) -> None:
    with pytest.raises(OptimizerNotMade, match=f"worker1: .*{reason}"):
        optim.DistributedOptimizer(
            SGD, [rpc.remote("worker1", function), rpc.remote("worker0", make_weight, (1,))], lr=0.1
        )


def test_all_failures_are_listed(cluster: Cluster) -> None:
    there = Distributed((1, 2, 3), cluster.workers)
    with pytest.raises(OptimizerNotMade, match="LookupError: only at home") as caught:
        there.make_optimizer(make(OnlyOnDriver, lr=0.1))
    assert sorted(caught.value.failed) == ["worker0", "worker1"]
    assert isinstance(caught.value.__cause__, LookupError)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        there.make_optimizer(make(SGD, lr=-1.0))
    with pytest.raises(OptimizerNotMade, match="unexpected keyword argument 'colour'"):
        there.make_optimizer(make(SGD, colour="red"))


def test_contexts_that_are_none(cluster: Cluster) -> None:
    there = Distributed((1, 2, 3), cluster.workers)
    there.make_optimizer(make(SGD, lr=0.1))
    before = there.values()
    with gw.autograd.context() as ctx:
        ctx.backward(there.loss(batches(0)))
        for wrong in (None, "ctx", True, [], [None], 1.5, lambda: None):
            with pytest.raises(ConfigurationError, match="context_id must be a context id"):
                there.optimizer.step(wrong)
        with pytest.raises(ConfigurationError, match="a context is listed twice"):
            there.optimizer.step([ctx, ctx])
        with pytest.raises(UnknownContext, match="Could not find autograd context with id: 12345"):
            there.optimizer.step([ctx, 12345])
    with pytest.raises(UnknownContext, match="It was released"):
        there.optimizer.step(ctx)
    with pytest.raises(UnknownContext):
        there.optimizer.clip_grad_norm_(ctx, 1.0)
    assert all(torch.equal(got, want) for got, want in zip(there.values(), before, strict=True))


def test_owners_do_only_what_optimizers_do(cluster: Cluster) -> None:
    there = Distributed((1, 2), cluster.workers)
    there.make_optimizer(make(SGD, lr=0.1))
    with pytest.raises(PermissionError, match="unknown optimizer operation"):
        there.optimizer.remote_optimizers[0]._ask(OPERATE, ("__reduce__",), 10.0)
    with pytest.raises(PermissionError, match="unknown optimizer operation"):
        there.parameters[0]._ask(OPERATE, ("zero_",), 10.0)


def test_it_does_not_travel(cluster: Cluster) -> None:
    """Half of it would be missing there; whoever gets it would step with options that the owners never heard."""
    there = Distributed((1, 2), cluster.workers)
    there.make_optimizer(make(SGD, lr=0.1))
    for send in (lambda opt: rpc.rpc_sync("worker1", repr, (opt,)), copy.deepcopy, pickle.dumps):
        with pytest.raises((OptimizerError, CannotSend), match="send the modules or references"):
            send(there.optimizer)
    assert "lr: 0.1" in repr(there.optimizer)
