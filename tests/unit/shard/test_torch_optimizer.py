"""Torch's optimizers: what may be left out around them, and which states they may be given."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.errors import ConfigurationError
from gradwire.shard.torch_optimizer import (
    KNOWN_STATE,
    is_watched,
    laid_out_like,
    load_state,
    make_optimizer,
    method_of,
    quick_step,
)

CLASSES = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor", "Rprop")


def make(name: str = "SGD", **options: Any) -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 12).view(3, 4))
    made: torch.optim.Optimizer = getattr(torch.optim, name)([weight], lr=0.1, **options)
    return made


def value_after(optimizer: torch.optim.Optimizer, step: Any) -> torch.Tensor:
    (weight,) = optimizer.param_groups[0]["params"]
    with torch.no_grad():
        for number in range(3):
            weight.grad = torch.cos(weight + number)
            step()
    return weight.detach()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CLASSES)
def test_the_numbers_are_the_same(name: str) -> None:
    quick, whole = make(name), make(name)
    assert torch.equal(value_after(quick, quick_step(quick)), value_after(whole, whole.step))


def test_hooks_of_one_optimizer_and_of_all() -> None:
    optimizer, seen = make(), []
    step = quick_step(optimizer)
    handles = [
        optimizer.register_step_pre_hook(lambda *_: seen.append("one")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all")),
    ]
    value_after(optimizer, step)
    assert seen == ["one", "all"] * 3
    for handle in handles:
        handle.remove()
    value_after(optimizer, step)
    assert seen == ["one", "all"] * 3
    assert not is_watched(optimizer)


def test_a_profiler() -> None:
    optimizer = make()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert is_watched(optimizer)
        value_after(optimizer, quick_step(optimizer))
    assert "Optimizer.step#SGD.step" in {event.key for event in profile.key_averages()}


def test_wrappers_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = torch.optim.SGD.step, []

    @functools.wraps(original)
    def counted(*args: Any, **kwargs: Any) -> Any:
        seen.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    optimizer = make()
    value_after(optimizer, quick_step(optimizer))
    assert len(seen) == 3


def test_one_that_needs_grad_mode_is_left_alone() -> None:
    optimizer = make("Adam", differentiable=True)
    assert quick_step(optimizer) == optimizer.step


def test_what_others_put_in_the_place_of_a_step_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    step, before, seen = quick_step(optimizer), torch.optim.SGD.step, []

    def noted(self: torch.optim.SGD, *args: Any) -> Any:
        seen.append("class")
        return before(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "step", noted)
        step()
    assert seen == ["class"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns if it has seen no step
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        step()
        scheduler.step()


# -- the guard against torch's compiler ----------------------------------------------------------------------------------


def unload_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiler look unloaded; what a test imports anew is not what other tests see."""
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    if "_dynamo" in vars(torch):
        monkeypatch.setitem(vars(torch), "_dynamo", vars(torch)["_dynamo"])


@pytest.mark.parametrize("name", ["add_param_group", "load_state_dict", "state_dict", "zero_grad"])
def test_the_guard_is_left_out_until_the_compiler_is_loaded(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    optimizer = make()
    guarded = getattr(optimizer, name)
    unload_compiler(monkeypatch)
    assert method_of(optimizer, name) == guarded.__func__.__wrapped__.__get__(optimizer)
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    assert method_of(optimizer, name) == guarded


def test_methods_that_others_have_replaced_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    unload_compiler(monkeypatch)
    seen: list[str] = []

    class Own(torch.optim.SGD):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            seen.append("class")
            super().add_param_group(param_group)

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = make_optimizer(Own, [weight], (), {"lr": 0.1})
    assert seen == ["class"]
    optimizer.zero_grad = lambda *_: seen.append("instance")
    method_of(optimizer, "zero_grad")(True)
    before = torch.optim.Optimizer.zero_grad
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", functools.wraps(before)(lambda *_: seen.append("wrapper")))
    method_of(make(), "zero_grad")(True)
    assert seen == ["class", "instance", "wrapper"]


def test_an_optimizer_is_made_as_by_calling_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    unload_compiler(monkeypatch)
    weight = torch.nn.Parameter(torch.ones(2))
    made, called = (
        make_optimizer(torch.optim.SGD, [weight], (0.5,), {"momentum": 0.9}),
        torch.optim.SGD([weight], 0.5, 0.9),
    )
    assert made.state_dict() == called.state_dict()
    assert vars(made).keys() == vars(called).keys()
    with pytest.raises(ValueError, match="Invalid learning rate"):
        make_optimizer(torch.optim.SGD, [weight], (-1.0,), {})


# -- state ---------------------------------------------------------------------------------------------------------------

ALL_CLASSES = [
    found
    for found in vars(torch.optim).values()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.9, "fused": True}],
    "Adam": [{}, {"amsgrad": True}, {"amsgrad": True, "fused": True}],
    "AdamW": [{"lr": torch.tensor(0.1)}, {"fused": True}],
    "Adagrad": [{}, {"fused": True}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "ASGD": [{}, {"foreach": True}],
}
CASES = [
    pytest.param(kind, options, id=f"{kind.__name__}-{','.join(options)}")
    for kind in ALL_CLASSES
    if kind is not torch.optim.LBFGS
    for options in VARIANTS.get(kind.__name__, [{}])
]
SHAPES = ((3, 4), (2, 3, 4), (5,), (1,), ())


def stepped(kind: type[Any], options: dict[str, Any], num_steps: int = 2) -> tuple[Any, list[torch.nn.Parameter]]:
    shapes = ((3, 4), (4, 3)) if kind is getattr(torch.optim, "Muon", None) else SHAPES  # it takes matrices only
    params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, torch.Size(shape).numel()).view(shape)) for shape in shapes]
    optimizer = make_optimizer(kind, params, (), {"lr": 0.1, **options})
    for number in range(num_steps):
        step(optimizer, params, number)
    return optimizer, params


def step(optimizer: Any, params: list[torch.nn.Parameter], number: int) -> None:
    for item in params:
        gradient = torch.cos(item.detach() + number)
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam) and item.dim()
        item.grad = gradient.to_sparse() if is_sparse else gradient
    if isinstance(optimizer, torch.optim.SparseAdam):
        params[-1].grad = None
    optimizer.step()


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_state_of_every_class_loads_again(kind: type[Any], options: dict[str, Any]) -> None:
    """The next step is the same; and all tensors that a class keeps are among those that are compared."""
    one, params = stepped(kind, options)
    other, others = stepped(kind, options, num_steps=1)
    state = {target: dict(one.state[item]) for item, target in zip(params, others, strict=True) if one.state.get(item)}
    assert {key for values in state.values() for key, item in values.items() if torch.is_tensor(item)} <= KNOWN_STATE
    copies = {
        item: {k: v.clone() if torch.is_tensor(v) else v for k, v in found.items()} for item, found in state.items()
    }
    load_state(other, copies, {})
    for item, target in zip(params, others, strict=True):
        target.data.copy_(item.data)
    step(one, params, 7)
    step(other, others, 7)
    assert all(torch.equal(item, target) for item, target in zip(params, others, strict=True))


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_state_of_another_shape_is_refused_and_nothing_changes(kind: type[Any], options: dict[str, Any]) -> None:
    optimizer, params = stepped(kind, options)
    before = {item: dict(optimizer.state[item]) for item in params if optimizer.state.get(item)}
    for item, values in before.items():
        for key, value in values.items():
            if not torch.is_tensor(value):
                continue
            for wrong in (torch.zeros(0), torch.zeros(2, 7), torch.zeros(*value.shape, 2), [1.0], "text"):
                with pytest.raises(ConfigurationError, match=f"state '{key}' of parameter 'w' (has shape|is a)"):
                    load_state(optimizer, {item: {**values, key: wrong}}, {item: "w"})
    after = {item: dict(optimizer.state[item]) for item in params if optimizer.state.get(item)}
    assert before.keys() == after.keys()
    assert all(after[item][key] is value for item, values in before.items() for key, value in values.items())


def test_complex_and_real_numbers_are_not_mixed() -> None:
    optimizer, (weight, *_) = stepped(torch.optim.Adam, {})
    values = {**optimizer.state[weight], "exp_avg": torch.zeros(3, 4, dtype=torch.complex64)}
    with pytest.raises(ConfigurationError, match="is complex, and the parameter is not"):
        load_state(optimizer, {weight: values}, {weight: "w"})


@pytest.mark.parametrize("state", [{"momentum_buffer": torch.zeros(3, 4)}, {3: 4}, "text", {"step": None}])
def test_a_state_of_another_optimizer_is_refused_and_nothing_changes(state: Any) -> None:
    optimizer, (weight, *_) = stepped(torch.optim.Adam, {"fused": True})
    state_before, groups_before = optimizer.state, optimizer.param_groups
    with pytest.raises(ConfigurationError, match="the state"):
        load_state(optimizer, {weight: state}, {weight: "w"})
    assert optimizer.state is state_before
    assert optimizer.param_groups is groups_before


def test_state_has_the_strides_of_its_parameter() -> None:
    """Fused kernels go through memory from the first element on, whatever the strides say."""
    optimizer, (weight, *_) = stepped(torch.optim.Adam, {"fused": True})
    values = dict(optimizer.state[weight])
    shared = torch.zeros(1).expand(3, 4)  # one element in memory
    turned = torch.arange(12.0).view(4, 3).t()
    load_state(optimizer, {weight: {**values, "exp_avg": shared, "exp_avg_sq": turned}}, {})
    found = optimizer.state[weight]
    assert found["exp_avg"].stride() == found["exp_avg_sq"].stride() == weight.stride()
    assert torch.equal(found["exp_avg_sq"], turned)
    assert laid_out_like(weight, weight.detach()).data_ptr() == weight.data_ptr()


def test_a_class_of_ones_own_keeps_what_it_likes() -> None:
    class Shampoo(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = make_optimizer(Shampoo, [weight], (), {})
    load_state(optimizer, {weight: {"exp_avg": torch.ones(2), "step": [1, 2], 0: 3}}, {})
    assert (optimizer.state[weight]["step"], optimizer.state[weight][0]) == ([1, 2], 3)
