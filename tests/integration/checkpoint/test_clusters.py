"""What lives on many workers: saved by them, loaded on others, and in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoint.programs import Training, batch, make_layer, make_many, make_plain, make_tied, one_process
from gradwire import autograd, checkpoint, rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import CannotSave, CheckpointDamaged, CheckpointMismatch
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer

NUM_STEPS = 6


def names(cluster: Cluster) -> list[str]:
    return [worker.name for worker in cluster.workers]


@pytest.mark.parametrize("placement", [(0, 1), (2, 2), (1, 0), (None, 2)])
def test_training_goes_on_bit_for_bit_on_other_workers(
    cluster: Cluster, tmp_path: Path, placement: tuple[int | None, int | None]
) -> None:
    expected = one_process(NUM_STEPS)[1]
    first = Training(names(cluster)[:2])
    losses = [first.step(number) for number in range(3)]
    checkpoint.save(tmp_path, {**first.state, "step": 3})
    where = [rpc.get_worker_info().name if number is None else names(cluster)[number] for number in placement]
    second = Training(where)
    second.step(99)  # has other weights and state of its own, which must go
    assert checkpoint.load(tmp_path, second.state) == {"step": 3}
    losses += [second.step(number) for number in range(3, NUM_STEPS)]
    assert losses == expected


def test_it_loads_in_one_process_as_plain_state_dicts(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(names(cluster)[:2])
    for number in range(3):
        training.step(number)
    checkpoint.save(tmp_path, training.state)
    found = checkpoint.read(tmp_path)
    expected, losses = one_process(NUM_STEPS)
    model = nn.Sequential(make_layer(0), make_layer(1))
    for layer, state in zip(model, found["layers"], strict=True):
        layer.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.load_state_dict(found["optim"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    schedule.load_state_dict(found["schedule"])
    for number in range(3, NUM_STEPS):
        loss = model(batch(number)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        assert loss.item() == losses[number]
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])


def test_objects_change_between_here_and_there(cluster: Cluster, tmp_path: Path) -> None:
    local = make_layer(1)
    reference = rpc.remote(names(cluster)[0], torch.randn, args=(4,))
    checkpoint.save(tmp_path, {"layer": local, "vector": reference})
    remote = RemoteModule(names(cluster)[2], make_layer, (1,))
    remote.load_state_dict({name: torch.zeros_like(value) for name, value in local.state_dict().items()})
    vector = torch.zeros(4)
    assert checkpoint.load(tmp_path, {"layer": remote, "vector": vector}) == {}
    for name, value in remote.state_dict().items():
        assert torch.equal(value, local.state_dict()[name])
    assert torch.equal(vector, reference.to_here())
    elsewhere = rpc.remote(names(cluster)[1], torch.zeros, args=(4,))
    checkpoint.load(tmp_path, {"vector": elsewhere})
    assert torch.equal(elsewhere.to_here(), vector)


def test_each_owner_writes_what_it_has(cluster: Cluster, tmp_path: Path) -> None:
    first, second, third = names(cluster)
    outer = nn.Sequential(
        RemoteModule(first, make_layer, (0,)), nn.Linear(4, 4), RemoteModule(second, make_layer, (1,))
    )
    tied = rpc.remote(third, make_tied)
    summary = checkpoint.save(tmp_path, {"outer": outer, "tied": tied, "again": tied})
    assert sorted(file.worker for file in summary.files) == ["driver", first, second, third]
    entries = {entry.path: entry for entry in summary.entries}
    assert entries["outer"].workers == ("driver", first, second)
    assert (entries["tied"].num_tensors, entries["again"].num_tensors) == (3, 3)
    assert summary.num_tensors == 6 + 3
    expected = outer.state_dict()
    found = checkpoint.read(tmp_path)["outer"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    other = nn.Sequential(make_layer(0), nn.Linear(4, 4), RemoteModule(third, make_layer, (1,)))
    checkpoint.load(tmp_path, {"outer": other})
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_what_does_not_fit_changes_nothing_anywhere(cluster: Cluster, tmp_path: Path) -> None:
    first, second, third = names(cluster)
    summary = checkpoint.save(
        tmp_path, {"a": RemoteModule(first, make_layer, (0,)), "b": RemoteModule(second, make_layer, (1,))}
    )
    a, b = RemoteModule(second, make_layer, (0,)), RemoteModule(third, nn.Linear, (4, 2))
    for module in (a, b):
        module.load_state_dict({name: torch.zeros_like(value) for name, value in module.state_dict().items()})

    def check_unchanged() -> None:
        values = [*a.state_dict().values(), *b.state_dict().values()]
        assert all(value.eq(0).all() for value in values)

    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint.load(tmp_path, {"a": a, "b": b})
    assert caught.value.problems == (
        "'b/weight' has shape [1, 4] in the checkpoint and [2, 4] here",
        "'b/bias' has shape [1] in the checkpoint and [2] here",
    )
    check_unchanged()
    path = next(tmp_path / file.name for file in summary.files if file.worker == second)
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    b = RemoteModule(third, make_layer, (1,))
    b.load_state_dict({name: torch.zeros_like(value) for name, value in b.state_dict().items()})
    with pytest.raises(CheckpointDamaged, match=rf"'b/\w+' in {path}"):
        checkpoint.load(tmp_path, {"a": a, "b": b})
    check_unchanged()


def test_optimizers_change_between_one_process_and_many(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(names(cluster)[:2])
    for number in range(3):
        training.step(number)
    checkpoint.save(tmp_path / "many", training.state)
    model = nn.ModuleList([make_layer(0), make_layer(1)])
    local = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(local, 0.5)
    checkpoint.load(tmp_path / "many", {"layers": list(model), "optim": local, "schedule": schedule})
    assert local.param_groups[0]["lr"] == training.optimizer.param_groups[0]["lr"]
    checkpoint.save(tmp_path / "one", {"layers": list(model), "optim": local, "schedule": schedule})
    other = Training(names(cluster)[1:])
    checkpoint.load(tmp_path / "one", other.state)
    expected = one_process(NUM_STEPS)[1]
    assert [other.step(number) for number in range(3, NUM_STEPS)] == expected[3:]


def test_many_tensors_are_described_in_one_call(cluster: Cluster, tmp_path: Path) -> None:
    reference = rpc.remote(names(cluster)[0], make_many, args=(6000,))
    summary = checkpoint.save(tmp_path, {"many": reference})
    assert summary.num_tensors == 6000
    assert (tmp_path / "index.json").stat().st_size > 1 << 20
    other = rpc.remote(names(cluster)[1], make_many, args=(6000, 1.0))
    checkpoint.load(tmp_path, {"many": other})
    checkpoint.save(tmp_path, {"many": other})  # more than one message may carry
    state = checkpoint.read(tmp_path)["many"]
    assert all(state[str(number)].item() == number for number in range(6000))


def test_contexts_keep_what_they_saw_when_parameters_are_loaded(cluster: Cluster, tmp_path: Path) -> None:
    layer = RemoteModule(names(cluster)[0], make_layer, (1,))
    x = torch.ones(1, 4, requires_grad=True)
    weight = layer.state_dict()["weight"]
    checkpoint.save(tmp_path, {"layer": RemoteModule(names(cluster)[1], nn.Linear, (4, 1))})
    with autograd.context() as ctx:
        result = layer(x)
        checkpoint.load(tmp_path, {"layer": layer})
        ctx.backward(result.sum())
        gradient = autograd.get_gradients(ctx)[x]
    assert torch.equal(gradient, weight)
    assert not torch.equal(layer.state_dict()["weight"], weight)


def test_an_optimizer_of_other_parameters_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(names(cluster)[:2])
    training.step(0)
    checkpoint.save(tmp_path, training.state)
    other = Training(names(cluster)[:2])
    other.optimizer.add_param_group({"params": [("more", torch.zeros(1))]})
    with pytest.raises(
        CheckpointMismatch, match=r"'optim' is not the state of this optimizer: .*number of parameter groups"
    ):
        checkpoint.load(tmp_path, other.state)


def test_an_optimizer_of_parameters_of_other_shapes_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    """The owner's fused kernel would write beyond the end of the state; its worker lives on."""
    where = names(cluster)[0]
    optimizers = []
    for width in (4, 2):
        layer = RemoteModule(where, nn.Linear, (width, width))
        optimizer = DistributedOptimizer(torch.optim.Adam, [layer], lr=0.1, fused=True)
        optimizers.append(optimizer)
        with autograd.context() as ctx:
            ctx.backward(layer(torch.ones(1, width)).sum())
            optimizer.step(ctx)
    large, small = optimizers
    checkpoint.save(tmp_path, {"optim": large})
    before = small.state_dict()["state"]
    with pytest.raises(
        CheckpointMismatch, match=r"state 'exp_avg' of parameter 'weight' has shape \[4, 4\], and must have \[2, 2\]"
    ):
        checkpoint.load(tmp_path, {"optim": small})
    after = small.state_dict()["state"]
    assert all(torch.equal(after[number][key], item) for number in before for key, item in before[number].items())


@pytest.mark.parametrize("value", [{"a": 1}, "text", object])
def test_references_to_plain_values_are_refused(cluster: Cluster, tmp_path: Path, value: Any) -> None:
    reference = rpc.remote(names(cluster)[0], make_plain, args=(value,))
    with pytest.raises(CannotSave, match=r"'x' is a reference to a .* which has no state_dict"):
        checkpoint.save(tmp_path, {"x": reference})
    assert not (tmp_path / "index.json").exists()


def test_progress_sees_what_others_write(cluster: Cluster, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    references = [rpc.remote(name, torch.ones, args=(1 << 18,)) for name in names(cluster)]
    checkpoint.save(tmp_path, {"all": references}, progress=lambda *now: told.append(now))
    assert told[-1] == (3 << 20, 3 << 20)
    assert told == sorted(told)
    told.clear()
    checkpoint.load(tmp_path, {"all": references}, progress=lambda *now: told.append(now))
    assert told[-1] == (3 << 20, 3 << 20)
