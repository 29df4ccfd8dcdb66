"""Every optimizer of torch.optim, with its parameters on workers, does what it does in one process: bit for bit."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from gradwire import optim
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError
from gradwire.rpc import RRef
from optim.programs import Distributed, OneProcess, assert_same, batches, make

SEEDS = (1, 2, 3)
CLASSES = {
    name: found
    for name, found in sorted(vars(torch.optim).items())
    if inspect.isclass(found) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
}
NEEDS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}}
VARIANTS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    ("Adam", {"foreach": True, "amsgrad": True}),
    ("AdamW", {"fused": True, "weight_decay": 0.1}),
    ("Adagrad", {"lr_decay": 0.1, "foreach": True}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
]


def compare(cluster: Cluster, made: Any, kind: str = "dense", num_steps: int = 4) -> None:
    here, there = OneProcess(SEEDS, kind), Distributed(SEEDS, cluster.workers, kind)
    for world in (here, there):
        world.make_optimizer(made)
    for number in range(num_steps):
        assert there.step(batches(number)) == here.step(batches(number))
    assert_same(there.values(), here.values())
    assert not torch.equal(here.values()[0], OneProcess(SEEDS).values()[0])


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"LBFGS"}))
def test_every_class(cluster: Cluster, name: str) -> None:
    kind = "sparse" if name == "SparseAdam" else "dense"
    compare(cluster, make(CLASSES[name], **{"lr": 0.05, **NEEDS.get(name, {})}), kind)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_options_are_passed_on(cluster: Cluster, name: str, options: dict[str, Any]) -> None:
    compare(cluster, make(CLASSES[name], **options))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's Adagrad warns in one process, too
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients(cluster: Cluster, name: str) -> None:
    compare(cluster, make(CLASSES[name], lr=0.05), "sparse")


def test_lbfgs_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigurationError, match="LBFGS sees all parameters as one vector"):
        optim.DistributedOptimizer(torch.optim.LBFGS, [RRef(torch.nn.Parameter(torch.ones(1)))])
