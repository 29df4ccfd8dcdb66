"""Which changes of options the owners are told."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.optim.state_dict import OptionLog


def make_log(**options: Any) -> tuple[OptionLog, dict[str, Any]]:
    log = OptionLog()
    log.add(options)
    return log, {**options, "params": [], "param_names": []}


def tell(log: OptionLog, group: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """What a step does: the owners hear of the changes."""
    changes = log.changes([group])
    log.note(changes)
    return changes


def test_changes_are_told_once() -> None:
    log, group = make_log(lr=0.1, betas=(0.9, 0.99), foreach=None)
    assert tell(log, group) == {}
    group["lr"] = 0.2
    assert tell(log, group) == {0: {"lr": 0.2}}
    assert tell(log, group) == {}
    group.update(betas=(0.9, 0.9), foreach=True)
    assert tell(log, group) == {0: {"betas": (0.9, 0.9), "foreach": True}}
    assert log.everything() == {0: {"lr": 0.2, "betas": (0.9, 0.9), "foreach": True}}


def test_changes_that_nobody_was_told_are_kept() -> None:
    log, group = make_log(lr=torch.tensor(0.1))
    group["lr"] = 0.2
    assert log.changes([group]) == log.changes([group]) == {0: {"lr": 0.2}}
    assert log.everything() == {0: {"lr": torch.tensor(0.1)}}


def test_options_of_schedulers_stay_here() -> None:
    log, group = make_log(lr=0.1)
    group["initial_lr"] = 0.1
    assert tell(log, group) == {}
    assert log.everything() == {0: {"lr": 0.1}}


def test_a_tensor_that_is_changed_in_place_is_noticed() -> None:
    log, group = make_log(lr=torch.tensor(0.1))
    assert tell(log, group) == {}
    group["lr"].fill_(0.2)
    assert tell(log, group)[0]["lr"] == torch.tensor(0.2)
    assert tell(log, group) == {}
    group["lr"] = 0.2
    assert tell(log, group) == {0: {"lr": 0.2}}


def test_types_are_told_apart() -> None:
    log, group = make_log(maximize=False, weight_decay=0)
    group.update(maximize=0, weight_decay=0.0)
    assert tell(log, group) == {0: {"maximize": 0, "weight_decay": 0.0}}


def test_nan_is_not_the_end() -> None:
    log, group = make_log(lr=0.1)
    group["lr"] = float("nan")
    assert 0 in tell(log, group)
    assert tell(log, group) == {}  # the same object: nothing new


def test_an_option_that_was_taken_away_is_no_change() -> None:
    log, group = make_log(lr=0.1)
    del group["lr"]
    assert tell(log, group) == {}
