"""What torch puts around a step, and when it may be left out."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.optim._watched import is_watched, quick_step

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
