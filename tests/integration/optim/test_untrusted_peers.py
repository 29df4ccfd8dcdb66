"""What other workers ask of an owner's part is checked before anything is done; both trust data only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.errors import (
    ConfigurationError,
    DecodeError,
    NotExposed,
    OptimizerError,
    OptimizerNotMade,
    OptimizerStepFailed,
    RRefError,
)
from gradwire.optim.local import MAKE, OPERATE
from gradwire.rpc import functions
from gradwire.rref import context as rref_context
from gradwire.rref.api import create

MakeAgents = Callable[..., list[rpc.Agent]]
Optimizer = gw.optim.DistributedOptimizer


@rpc.expose(name="test_optim_strangers.make_weight")
def make_weight(size: int) -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(size, 2))


@rpc.expose(name="test_optim_strangers.use")
def use(weight: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return weight.local_value().square().sum()


@pytest.fixture
def weight(make_agents: MakeAgents) -> Iterator[rpc.RRef[torch.Tensor]]:
    """A parameter of worker b, seen from a."""
    a, _ = make_agents(2, trust="data")
    rpc.set_current_agent(a)
    yield create(rref_context.of(a), "b", make_weight, (3,), None, -1.0)
    rpc.set_current_agent(None)


def step(optimizer: Optimizer, weight: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", use, (weight,)))
        optimizer.step(ctx)
    return weight.to_here().detach()


BAD_ORDERS: list[tuple[Any, ...]] = [
    ("step",),
    ("step", "1", (1,)),
    ("step", True, (1,)),
    ("step", -1, (1,)),
    ("step", 1, ()),
    ("step", 2**63, (1,)),
    ("step", 1, (2**64,)),
    ("step", 1, (1,), 2**64),
    ("step", 1, (1,), 0, {}, [("scale", 2**2000)]),
    ("step", 1, 5),
    ("load_named_state", {"a": torch.ones(2)}),
    ("step", 1, ("x",)),
    ("step", 1, (1,), "pass"),
    ("step", 1, (1,), 0, [1]),
    ("step", 1, (1,), 0, {"0": {}}),
    ("step", 1, (1,), 0, {}, [("scale", "x")]),
    ("step", 1, (1,), 0, {}, [("add", 1.0)]),
    ("step", 1, (1,), 0, {}, [("scale", 1.0)] * 65),
    ("step", 1, (1,), 0, {}, [], "more"),
    ("norms", (1,), (), "fro"),
    ("norms", (1,), (), None),
    ("is_finite", (1,)),
    ("zero_grad", "yes"),
    ("named_state", 1),
    ("state_problems", {"w": {"step": 3}}),
    ("state_problems", {"w": {"step": ((2**70, -1), False)}}),
    ("load_named_state", [1]),
    ("load_named_state", {"w": 3}),
    ("load_named_state", {1: {}}),
    ("add_groups", []),
    ("add_groups", [(1, ["w"], [], {})]),
    ("add_groups", [(1, ["w"], [3], {})]),
    ("add_groups", [(1, ["w"], [torch.ones(2)], {})]),
    ("add_groups", [(-1, [], [], {})]),
    ("remove_groups", "all"),
    ("describe", 1),
]


def test_orders_of_another_form_are_refused(weight: rpc.RRef[torch.Tensor]) -> None:
    optimizer = Optimizer(torch.optim.SGD, [("w", weight)], lr=0.1)
    (there,) = optimizer.remote_optimizers
    for order in BAD_ORDERS:
        with pytest.raises(DecodeError, match=r"^invalid arguments for"):
            there._ask(OPERATE, order, 10.0)
    for operation in ("_step", "__init__", "__class__", "", 3, None, ["step"]):
        with pytest.raises(NotExposed, match="unknown optimizer operation"):
            there._ask(OPERATE, (operation,), 10.0)
    assert torch.allclose(step(optimizer, weight), torch.full((3, 2), 0.8))


@pytest.mark.parametrize(
    "order",
    [
        ("SGD", [], (), {}),
        ("SGD", [(0, ["w"], [1], {})], (), {}),
        ("SGD", "groups", (), {}),
        ("SGD", [(0, ["w"], [], {})], (), {}),
    ],
)
def test_optimizers_of_nothing_are_not_made(weight: rpc.RRef[torch.Tensor], order: tuple[Any, ...]) -> None:
    with pytest.raises(DecodeError, match=r"^invalid arguments for creating an optimizer"):
        rpc.rpc_sync("b", MAKE, args=order)


@pytest.mark.parametrize("name", ["LBFGS", "Optimizer", "lr_scheduler", "os", "__name__", ""])
def test_only_optimizers_are_made(weight: rpc.RRef[torch.Tensor], name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.optim on worker \w+ has no optimizer"):
        rpc.rpc_sync("b", MAKE, args=(name, [(0, ["w"], [weight], {})], (), {}))


def test_options_are_what_torchs_optimizers_know(weight: rpc.RRef[torch.Tensor]) -> None:
    """Groups keep their parameters, and a bad option does not stay in them."""
    optimizer = Optimizer(torch.optim.SGD, [("w", weight)], lr=0.1)
    (there,) = optimizer.remote_optimizers
    for options in (
        {"params": [torch.ones(3)]},
        {"param_names": ["x"]},
        {"colour": 1},
        {"lr": torch.ones(2, 2)},
        {"lr": {"a": 1}},
        {"momentum": [[1.0]]},
        {"momentum": [1.0] * 17},
    ):
        with pytest.raises(ConfigurationError, match=r"group 0 has no options|option '\w+' cannot have"):
            there._ask(OPERATE, ("step", 1, (1,), 0, {0: {"dampening": 0.5, **options}}), 10.0)
    _, groups = there._ask(OPERATE, ("describe",), 10.0)
    assert (groups[0]["lr"], groups[0]["dampening"], groups[0]["momentum"]) == (0.1, 0, 0)
    with pytest.raises(OptimizerNotMade, match="option 'lr' cannot have"):
        Optimizer(torch.optim.SGD, [("w", weight)], lr=torch.ones(2, 2))
    assert torch.allclose(step(optimizer, weight), torch.full((3, 2), 0.8))


def test_groups_are_added_at_the_end_and_under_names_of_their_own(weight: rpc.RRef[torch.Tensor]) -> None:
    """A failure takes only the new ones away."""
    optimizer = Optimizer(torch.optim.SGD, [("w", weight)], lr=0.1)
    (there,) = optimizer.remote_optimizers
    other = create(rref_context.here(), "b", make_weight, (3,), None, -1.0)
    for group in ((0, ["v"], [other], {}), (1, ["w"], [other], {}), (1, ["v"], [weight], {})):
        with pytest.raises(ConfigurationError, match=r"was added before|have the name 'w'|appear more than once"):
            there._ask(OPERATE, ("add_groups", [group]), 10.0)
    assert torch.allclose(step(optimizer, weight), torch.full((3, 2), 0.8))


def test_a_state_that_does_not_fit_is_refused(weight: rpc.RRef[torch.Tensor]) -> None:
    """Fused kernels would write beyond the end of it."""
    optimizer = Optimizer(torch.optim.Adam, [("w", weight)], lr=0.1, fused=True)
    (there,) = optimizer.remote_optimizers
    step(optimizer, weight)
    good = there._ask(OPERATE, ("named_state", True), 10.0)
    for key, value in (("exp_avg", torch.ones(1)), ("exp_avg_sq", torch.ones(2, 2)), ("step", torch.ones(0))):
        with pytest.raises(ConfigurationError, match=f"state '{key}' of parameter 'w' has shape"):
            there._ask(OPERATE, ("load_named_state", {"w": {**good["w"], key: value}}), 10.0)
    after = there._ask(OPERATE, ("named_state", True), 10.0)
    assert all(torch.equal(after["w"][key], value) for key, value in good["w"].items())


@pytest.mark.parametrize("answer", [None, "done", [1], {"a": torch.ones(1)}])
def test_answers_of_another_form_are_failures_of_that_owner(
    weight: rpc.RRef[torch.Tensor], monkeypatch: pytest.MonkeyPatch, answer: Any
) -> None:
    optimizer = Optimizer(torch.optim.SGD, [("w", weight)], lr=0.1)
    with monkeypatch.context() as patch:
        patch.setitem(functions.exposed, OPERATE, lambda *_: answer)
        with pytest.raises(OptimizerStepFailed, match="Failed: b: DecodeError: invalid answer to 'step'"):
            step(optimizer, weight)
        with (
            pytest.raises(OptimizerError, match="b: DecodeError: invalid answer to 'norms'"),
            gw.autograd.context() as ctx,
        ):
            optimizer.clip_grad_norm_(ctx, 1.0)
        with pytest.raises(OptimizerNotMade, match="b: DecodeError: invalid answer to 'describe'"):
            Optimizer(torch.optim.SGD, [("w", weight)], lr=0.1)
    assert torch.allclose(step(optimizer, weight), torch.full((3, 2), 0.8))


def test_workers_that_hold_no_reference_are_refused(make_agents: MakeAgents) -> None:
    """Ids can be guessed."""
    a, _, c = make_agents(3, trust="data")
    rpc.set_current_agent(a)
    try:
        weight = create(rref_context.of(a), "b", make_weight, (3,), None, -1.0)
        optimizer = Optimizer(torch.optim.SGD, [("w", weight)], lr=0.1)
        (there,) = optimizer.remote_optimizers
        for operation in (("describe",), ("zero_grad", True), ("named_state", True), ("load_named_state", {})):
            _, order = there._prepare(operation, 10.0)
            rref_id, maker = order[:2]
            for claimed in {maker, None}:
                with pytest.raises((RRefError, DecodeError), match=r"holds no reference to it|gave another worker"):
                    c.call("b", OPERATE, (rref_id, claimed, *operation))
        assert torch.allclose(step(optimizer, weight), torch.full((3, 2), 0.8))
        del optimizer, there, weight
    finally:
        rpc.set_current_agent(None)
