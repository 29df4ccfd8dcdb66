"""Saving and loading in one process, without any cluster."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gradwire import checkpoint
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointError, CheckpointMismatch, CheckpointMissing


class Tied(nn.Module):
    """Two names for one parameter, a buffer, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.note = "none"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Stubborn:
    """Takes no state."""

    def __init__(self) -> None:
        self.state = {"a": 1}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state
        if state["a"] != 1:
            raise ValueError("I will not")


def train(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, num_steps: int) -> list[float]:
    losses = []
    for step in range(num_steps):
        loss = model(torch.arange(6.0).view(2, 3) + step).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def make_training() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optim": optimizer, "sched": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4, 4])}


def test_training_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    state = make_training()
    train(*state.values(), 3)
    checkpoint.save(tmp_path, {**state, "step": 3})
    expected = train(*state.values(), 5)
    other = make_training()
    train(*other.values(), 1)
    assert checkpoint.load(tmp_path, other) == {"step": 3}
    assert train(*other.values(), 5) == expected


def test_a_tied_weight_is_saved_once_and_stays_tied(tmp_path: Path) -> None:
    model = Tied()
    model.note = "kept"
    model.norm(torch.randn(4, 3))
    summary = checkpoint.save(tmp_path, {"model": model})
    assert summary.num_tensors == 6
    found = checkpoint.read(tmp_path)["model"]
    assert found["first.weight"] is found["second.weight"]
    assert found["_extra_state"] == {"note": "kept"}
    other = Tied()
    checkpoint.load(tmp_path, {"model": other})
    assert other.second.weight is other.first.weight
    assert torch.equal(other.first.weight, model.first.weight)
    assert torch.equal(other.norm.running_mean, model.norm.running_mean)
    assert other.note == "kept"


def test_values_come_back_and_tensors_are_filled_or_returned(tmp_path: Path) -> None:
    saved = {"a": [1, (2.5, None)], "t": torch.arange(3), "nested": {"m": nn.Linear(1, 1), "n": 4, "u": torch.ones(2)}}
    checkpoint.save(tmp_path, saved)
    target = torch.zeros(3, dtype=torch.int64)
    values = checkpoint.load(tmp_path, {"t": target, "a": None})
    assert torch.equal(target, torch.arange(3))
    assert values.keys() == {"a", "nested"}
    assert values["a"] == [1, (2.5, None)]
    assert values["nested"]["n"] == 4
    assert torch.equal(values["nested"]["u"], torch.ones(2))
    assert "m" not in values["nested"]


def test_names_that_mean_something_elsewhere(tmp_path: Path) -> None:
    state = {
        "__metadata__": torch.ones(1),
        "": {"weight": torch.zeros(1)},
        "weight": torch.full((1,), 2.0),
        "$tensor": 3,
    }
    checkpoint.save(tmp_path, {**state, "/": nn.Linear(1, 1)})
    found = checkpoint.load(tmp_path)
    assert found.keys() == state.keys()
    assert (found["__metadata__"].item(), found[""]["weight"].item(), found["weight"].item()) == (1, 0, 2)
    assert found["$tensor"] == 3


def test_containers_of_objects(tmp_path: Path) -> None:
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    checkpoint.save(tmp_path, {"models": models, "pair": (nn.Linear(1, 1), 5)})
    others = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert checkpoint.load(tmp_path, {"models": others}) == {}
    for model, other in zip(models, others, strict=True):
        assert torch.equal(model.weight, other.weight)
    with pytest.raises(CheckpointMismatch, match="'models' was not saved as 1 items"):
        checkpoint.load(tmp_path, {"models": others[:1]})


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return copy.deepcopy(model.state_dict())


@pytest.mark.parametrize(
    ("other", "problems"),
    [
        (nn.Linear(3, 2), ["'model/weight' has shape [2, 2] in the checkpoint and [2, 3] here"]),
        (nn.Linear(2, 2, dtype=torch.float64), ["'model/weight' is float32 in the checkpoint and float64 here"]),
        (nn.Linear(2, 2, bias=False), ["'model/bias' is in the checkpoint and not wanted"]),
        (nn.BatchNorm1d(2), ["'model/running_mean' is wanted and not in the checkpoint"]),
        (torch.zeros(2), ["'model' was not saved as a tensor"]),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), ["'model' was not saved as an optimizer of one process"]),
        (3, ["'model' was saved as a module; give one that is to be filled"]),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, other: Any, problems: list[str]) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2), "good": torch.ones(3)})
    good = torch.zeros(3)
    with pytest.raises(CheckpointMismatch, match="nothing was changed") as caught:
        checkpoint.load(tmp_path, {"good": good, "model": other})
    assert set(problems) <= set(caught.value.problems)
    assert all(problem in str(caught.value) for problem in problems)
    assert good.tolist() == [0, 0, 0]


def test_missing_keys_are_named_with_what_is_there(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2), "step": 1})
    with pytest.raises(CheckpointMismatch, match=r"'modle' is not in the checkpoint; there are 'model', 'step'"):
        checkpoint.load(tmp_path, {"modle": nn.Linear(2, 2)})
    assert checkpoint.load(tmp_path, {"modle": nn.Linear(2, 2)}, strict=False) == {"step": 1}


def test_not_strict_loads_what_both_have(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    checkpoint.save(tmp_path, {"model": saved})
    other = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.BatchNorm1d(2))
    before = state_of(other)
    with pytest.raises(CheckpointMismatch, match=r"'model/1.weight' has shape"):
        checkpoint.load(tmp_path, {"model": other}, strict=False)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())
    other = nn.Sequential(nn.Linear(2, 2, dtype=torch.float64), nn.Tanh(), nn.Linear(2, 2))
    before = state_of(other)
    checkpoint.load(tmp_path, {"model": other}, strict=False)
    assert torch.equal(other[0].weight, saved[0].weight.double())
    assert torch.equal(other[2].weight, before["2.weight"])


def test_a_group_of_another_size_is_found_first(tmp_path: Path) -> None:
    state = make_training()
    train(*state.values(), 1)
    checkpoint.save(tmp_path, state)
    weight = torch.zeros(1)
    other = torch.optim.AdamW([weight])
    with pytest.raises(
        CheckpointMismatch, match=r"'optim' has groups of \[4\] parameters in the checkpoint and \[1\] here"
    ):
        checkpoint.load(tmp_path, {"optim": other, "model": state["model"]})
    assert not other.state


def test_state_of_another_shape_is_found_first(tmp_path: Path) -> None:
    """Torch itself would take it, and its fused kernel would write beyond the end."""
    optimizers = []
    for size in (8, 2):
        weight = nn.Parameter(torch.ones(size))
        weight.grad = torch.ones(size)
        optimizers.append(torch.optim.Adam([weight], fused=True))
        optimizers[-1].step()
    large, small = optimizers
    checkpoint.save(tmp_path, {"optim": small})
    with pytest.raises(
        CheckpointMismatch, match=r"'optim': state 'exp_avg' of parameter 0 has shape \[2\], and must have \[8\]"
    ):
        checkpoint.load(tmp_path, {"optim": large})
    checkpoint.load(tmp_path, {"optim": small})


def test_an_object_that_refuses_is_named_and_others_are_put_back(tmp_path: Path) -> None:
    first, second = Stubborn(), Stubborn()
    first.state = second.state = {"a": 2}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=3.0)
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"optim": optimizer, "model": model, "stubborn": second})
    other = torch.optim.SGD([torch.zeros(1)], lr=4.0)
    target, here = Stubborn(), nn.Linear(2, 2)
    before = state_of(here)
    with pytest.raises(
        CheckpointError, match="'stubborn' was not loaded: Stubborn did not take its state: ValueError: I will"
    ):
        checkpoint.load(tmp_path, {"optim": other, "model": here, "stubborn": target})
    assert other.param_groups[0]["lr"] == 4.0
    assert target.state == {"a": 1}
    assert all(torch.equal(value, before[name]) for name, value in here.state_dict().items())


def test_damage_is_found_before_anything_changes(tmp_path: Path) -> None:
    summary = checkpoint.save(tmp_path, {"a": nn.Linear(2, 2), "b": nn.Linear(20, 20), "step": 5})
    path = tmp_path / summary.files[0].name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    target = nn.Linear(2, 2), nn.Linear(20, 20)
    before = [state_of(item) for item in target]
    with pytest.raises(CheckpointDamaged, match=rf"tensor 'b/bias' in {path} is damaged: its bytes have changed"):
        checkpoint.load(tmp_path, {"a": target[0], "b": target[1]})
    for item, state in zip(target, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in item.state_dict().items())
    for call in (checkpoint.verify, checkpoint.read):
        with pytest.raises(CheckpointDamaged, match="b/bias"):
            call(tmp_path)
    checkpoint.load(tmp_path, {"a": target[0]})  # what is not damaged can be saved from the ruin
    path.unlink()
    with pytest.raises(CheckpointMissing, match=path.name):
        checkpoint.load(tmp_path, {"a": target[0]})
    assert checkpoint.load(tmp_path) == {"step": 5}


class Keeping(nn.Module):
    """Keeps tensors of the state that it is given: one that torch would copy, and one of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(3))
        self.extra = torch.zeros(2)

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state, prefix, *rest)
        self.kept = state[prefix + "kept"]

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


class KeepingExtra(nn.Linear):
    """Is loaded by torch, and keeps its extra state."""

    extra = torch.zeros(2)
    get_extra_state = Keeping.get_extra_state
    set_extra_state = Keeping.set_extra_state


def test_modules_may_keep_tensors_of_the_state(tmp_path: Path) -> None:
    model = nn.Sequential(Keeping(), KeepingExtra(2, 2))
    model[0].kept += 5
    model[0].extra, model[1].extra = torch.ones(2), torch.ones(2)
    checkpoint.save(tmp_path, {"model": model})
    other = nn.Sequential(Keeping(), KeepingExtra(2, 2))
    checkpoint.load(tmp_path, {"model": other})
    for found, value in ((other[0].kept, 5), (other[0].extra, 1), (other[1].extra, 1)):
        assert type(found) is torch.Tensor
        assert set(found.tolist()) == {value}
    assert torch.equal(other[1].weight, model[1].weight)


def test_hooks_decide_what_is_loaded(tmp_path: Path) -> None:
    """They see all that was saved, and may leave something as it is."""
    checkpoint.save(tmp_path, {"model": nn.Linear(2, 2)})
    other = nn.Linear(2, 2)
    before, seen = state_of(other), []
    other.register_load_state_dict_pre_hook(lambda _, state, *rest: seen.extend(state) or state.pop("weight"))
    other.register_load_state_dict_post_hook(lambda module, keys: seen.append(module.bias.tolist()))
    checkpoint.load(tmp_path, {"model": other})
    bias = checkpoint.read(tmp_path)["model"]["bias"].tolist()
    assert seen == ["weight", "bias", bias]
    assert torch.equal(other.weight, before["weight"])


class Cutting(Stubborn):
    """Takes a state, and takes the bytes of files away."""

    def __init__(self, paths: list[Path]) -> None:
        super().__init__()
        self.paths = paths

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state
        for path in self.paths:
            os.truncate(path, 0)


def test_a_file_that_is_cut_off_meanwhile_is_an_error_and_objects_are_put_back(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(2000))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    first = Cutting([])
    first.state = {"a": 2}
    summary = checkpoint.save(tmp_path, {"first": first, "optim": optimizer})
    target, other = Cutting([tmp_path / file.name for file in summary.files]), torch.optim.Adam([parameter])
    with pytest.raises(CheckpointDamaged, match=r"on worker local at .* damaged: the file ends too early") as caught:
        checkpoint.load(tmp_path, {"first": target, "optim": other})
    assert caught.value.file == summary.files[0].name
    assert target.state == {"a": 1}
    assert not other.state


def test_loading_is_a_change_that_autograd_sees(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path, {"model": model, "x": torch.ones(2)})
    x = torch.zeros(2, requires_grad=True)
    for target in ({"model": model}, {"x": x}):
        loss = (model(x) * x.exp() * x).sum()
        checkpoint.load(tmp_path, target)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_cannot_be_saved_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"step": 1})
    files = set(tmp_path.iterdir())
    for bad in (object(), {"x": [nn.Linear]}, torch.eye(2).to_sparse(), nn.Linear(1, 1, device="meta")):
        with pytest.raises(CannotSave, match=r"'bad'|'bad/x/0'|tensor 'bad"):
            checkpoint.save(tmp_path, {"step": 2, "bad": bad})
    with pytest.raises(CannotSave, match="needs a dict"):
        checkpoint.save(tmp_path, [1])  # type: ignore[arg-type]
    assert checkpoint.load(tmp_path) == {"step": 1}
    assert {path for path in tmp_path.iterdir() if path.name != ".gradwire-readers"} == files - {
        tmp_path / ".gradwire-readers"
    }


def test_progress_is_told_and_ends_with_all(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    checkpoint.save(tmp_path, {"a": torch.zeros(3 << 20)}, progress=lambda *now: told.append(now))
    total = 12 << 20
    assert told[-1] == (total, total)
    assert told == sorted(told)
    told.clear()
    checkpoint.load(tmp_path, {"a": torch.ones(3 << 20)}, progress=lambda *now: told.append(now))
    assert told[-1] == (total, total)


def test_nothing_is_printed_where_nobody_looks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for progress in (None, False, True):
        checkpoint.save(tmp_path, {"a": torch.zeros(8)}, progress=progress)
        checkpoint.load(tmp_path, {"a": torch.zeros(8)}, progress=progress)
    assert capfd.readouterr() == ("", "")


def test_a_summary_shows_what_is_there(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"model": nn.Linear(256, 4), "step": 7, "names": ["a", "b"], "t": torch.ones(1)})
    summary = checkpoint.inspect(tmp_path)
    text = repr(summary)
    assert f"<Checkpoint {tmp_path}: 3 tensors, 4.3 KiB in 1 file; generation g0001-" in text
    assert "model  module     torch.nn.modules.linear.Linear  2 tensors, 4.0 KiB, by local" in text
    assert "step   value      7" in text
    assert "names  value      2 items" in text
    assert summary.entries[0].num_bytes == 4 * (4 * 256 + 4)
    assert [entry.kind for entry in summary.entries] == ["module", "value", "value", "tensor"]
    assert checkpoint.verify(tmp_path) == summary


def test_a_summary_prints_no_control_characters(tmp_path: Path) -> None:
    summary = checkpoint.save(tmp_path, {"\x1b[2Jname": 1})
    assert "\x1b" not in repr(summary)
    assert "?[2Jname" in repr(checkpoint.inspect(tmp_path))


def test_a_read_only_directory_can_be_loaded(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, {"step": 1})
    (tmp_path / ".gradwire-readers").unlink()
    tmp_path.chmod(0o555)
    try:
        assert checkpoint.load(tmp_path) == {"step": 1}
    finally:
        tmp_path.chmod(0o755)
