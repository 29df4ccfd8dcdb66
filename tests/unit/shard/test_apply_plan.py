"""What a plan means for a module, and what is wrong with plans."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conftest import MakeAgents
from gradwire import _progress_bar
from gradwire.rpc import set_current_agent
from gradwire.shard import ChunkShardingSpec, Sharder, ShardingPlan, shard_module
from gradwire.shard.apply_plan import read_plan

ROWS = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
COLUMNS = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"])


class Keep(Sharder):
    def shard(self, module: nn.Module) -> nn.Module:
        return module


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.emb2 = nn.Embedding(4, 2), nn.Embedding(4, 2)
        self.layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
        self.tied = nn.Linear(2, 4)
        self.tied.weight = self.emb2.weight
        self.register_buffer("table", torch.zeros(4))
        self.text = "text"
        self.turned = torch.zeros(3, 2).t()

    @property
    def computed(self) -> torch.Tensor:
        return torch.zeros(2, 2)


def test_steps_of_a_plan() -> None:
    model = Model()
    plan = ShardingPlan(
        {"layers.0.weight": ROWS, "table": ROWS, "emb": Keep(), "emb2.weight": COLUMNS, "tied.weight": COLUMNS},
        {"": ROWS, "layers.1": COLUMNS},
        ["layers", "emb"],
    )
    steps = read_plan(model, plan)
    assert [step.name for step in steps.parameters] == ["layers.0.weight", "table", "emb2.weight"]
    assert steps.parameters[0].value is model.layers[0].weight
    assert steps.parameters[2].slots == [(model.emb2, "weight"), (model.tied, "weight")]
    assert [(step.name, step.slots) for step in steps.sharders] == [("emb", [(model, "emb")])]
    assert steps.outputs == {"": ROWS, "layers.1": COLUMNS}
    assert steps.local_outputs == ["layers", "emb"]


def test_a_path_is_not_the_beginning_of_another() -> None:
    steps = read_plan(Model(), ShardingPlan({"emb": Keep(), "emb2.weight": ROWS}))
    assert len(steps.parameters) == len(steps.sharders) == 1


def test_a_module_that_is_in_two_places_is_found_in_both() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": shared})
    (step,) = read_plan(model, ShardingPlan({"b": Keep()})).sharders
    assert step.slots == [(model, "b"), (model["a"], "0")] or step.slots == [(model["a"], "0"), (model, "b")]
    (parameter,) = read_plan(model, ShardingPlan({"a.0.weight": ROWS, "b.weight": ROWS})).parameters
    assert parameter.slots == [(shared, "weight")]


def plan_of(entries: Any, *more: Any) -> Callable[[], ShardingPlan]:
    return lambda: ShardingPlan(entries, *more)


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        (plan_of({"layers.0.weight": 3}), TypeError, "Only `ShardingSpec` and `Sharder` are supported to shard 'layers.0.w"),
        (plan_of([ROWS]), TypeError, "dict by name"),
        (plan_of({3: ROWS}), TypeError, "dict by name"),
        (lambda: {"layers.0.weight": ROWS}, TypeError, "a ShardingPlan, not dict"),
        (plan_of({}, {"layers": "rows"}), TypeError, "Only `ShardingSpec` is supported as output_plan for 'layers'"),
        (plan_of({}, None, "layers"), TypeError, "list of module paths"),
        (plan_of({}, None, ["layers", "layers"]), ValueError, "'layers' twice"),
        (plan_of({"layers.2.weight": ROWS}), AttributeError, "no attribute"),
        (plan_of({"layers.0.kernel": ROWS}), AttributeError, "has no attribute `kernel`"),
        (plan_of({"nowhere": Keep()}), AttributeError, "no attribute"),
        (plan_of({}, {"nowhere": ROWS}), AttributeError, "no attribute"),
        (plan_of({}, None, ["nowhere"]), AttributeError, "no attribute"),
        (plan_of({"": Keep()}), KeyError, "path must not be empty for custom sharder!"),
        (plan_of({"layers.0.bias": ROWS}), ValueError, "Expected Linear.bias to be a Tensor, but found NoneType"),
        (plan_of({"text": ROWS}), ValueError, "Expected Model.text to be a Tensor, but found str"),
        (plan_of({"layers": ROWS}), ValueError, "Expected Model.layers to be a Tensor, but found Sequential"),
        (plan_of({"turned": ROWS}), ValueError, "turned is not a contiguous Tensor"),
        (plan_of({"computed": ROWS}), ValueError, "is computed"),
        (plan_of({"emb2.weight": ROWS, "tied.weight": COLUMNS}), ValueError, "are the same parameter"),
        (plan_of({"emb.weight": ROWS, "emb": Keep()}), RuntimeError, "should not conflict with the submodule tree"),
        (plan_of({"layers": Keep(), "layers.0.weight": ROWS}), RuntimeError, "should not conflict with the submodule"),
        (plan_of({"tied": Keep(), "emb2.weight": ROWS}), RuntimeError, "should not conflict with the submodule tree"),
        (plan_of({"layers": Keep(), "layers.0": Keep()}), RuntimeError, "should not conflict with the submodule tree"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_plans(plan: Callable[[], ShardingPlan], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_plan(Model(), plan())


def test_modules_that_cannot_be_sharded() -> None:
    with pytest.raises(TypeError, match="only an"):
        read_plan(torch.zeros(2), ShardingPlan({}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no size yet"):
        read_plan(_lazy(), ShardingPlan({"weight": ROWS}))
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    normed.product = normed.bias * 2
    for name in ("weight", "product"):
        with pytest.raises(ValueError, match="is computed"):
            read_plan(normed, ShardingPlan({name: ROWS}))
    assert len(read_plan(normed, ShardingPlan({"parametrizations.weight.original1": ROWS})).parameters) == 1


def _lazy() -> nn.Module:
    module = nn.Module()
    module.weight = nn.UninitializedParameter()
    return module


class Interrupted(Sharder):
    went_on = False

    def shard(self, module: nn.Module) -> nn.Module:
        signal.raise_signal(signal.SIGINT)
        self.went_on = True
        return module


def test_ctrl_c_ends_a_sharder(deferring: None) -> None:
    model, sharder = Model(), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        shard_module(model, ShardingPlan({"emb": sharder}))
    assert not sharder.went_on
    assert isinstance(model.emb, nn.Embedding)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sharding_that_takes_long_shows_progress(make_agents: MakeAgents, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(_progress_bar, "_DELAY_S", 0.0)
    a, _ = make_agents(2)
    set_current_agent(a)
    try:
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        spec = ChunkShardingSpec(0, ["a/cpu", "b/cpu"])
        shard_module(model, ShardingPlan({"0.weight": spec, "1.weight": spec}))
        del model
    finally:
        set_current_agent(None)
    assert "sharding parameters" in terminal.getvalue()
    assert "1/2" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
