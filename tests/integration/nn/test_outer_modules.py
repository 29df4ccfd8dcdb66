"""A remote module as a part of others, and its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire.cluster.api import Cluster
from gradwire.nn import RemoteModule
from nn.models import Net, gradients_of, make_input, mode_on_owner, step, weights_of


class Noted(nn.Module):
    """State that is no tensor, and one normalised layer."""

    def __init__(self) -> None:
        super().__init__()
        self.note = "new"
        self.norm = nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]

    def read_note(self) -> str:
        return self.note

    def write_note(self, note: str) -> None:
        self.note = note


def make_outer(cluster: Cluster) -> nn.Sequential:
    return nn.Sequential(cluster.workers[0].module(Net, 4, 3), nn.Tanh(), nn.Linear(3, 2, dtype=torch.float64))


def make_local(outer: nn.Sequential) -> nn.Sequential:
    """The same with the first part here."""
    local = nn.Sequential(Net(4, 3), nn.Tanh(), nn.Linear(3, 2, dtype=torch.float64))
    local[2].load_state_dict(outer[2].state_dict())
    return local


def test_sequential_computes_and_differentiates(cluster: Cluster) -> None:
    outer, x = make_outer(cluster), make_input(1)
    local = make_local(outer)
    local(x).square().sum().backward()
    with gw.autograd.context() as ctx:
        result = outer(x)
        ctx.backward(result.square().sum())
        assert torch.equal(result, local(x))
        assert torch.equal(ctx.gradients()[outer[2].weight], local[2].weight.grad)
        found = gradients_of(outer[0], ctx)
        assert all(torch.equal(found[name], param.grad) for name, param in local[0].named_parameters())


def test_outer_module_has_only_parameters_of_here(cluster: Cluster) -> None:
    outer = make_outer(cluster)
    assert [name for name, _ in outer.named_parameters()] == ["2.weight", "2.bias"]
    assert len(list(outer.modules())) == 4
    assert len(list(outer.parameters())) == 2


def test_mode_of_the_outer_module_travels(cluster: Cluster) -> None:
    outer = make_outer(cluster)
    for change, expected in ((outer.eval, False), (outer.train, True)):
        change()
        assert cluster.workers[0].call(mode_on_owner, outer[0].module_rref) is expected


def test_apply_of_the_outer_module_travels(cluster: Cluster) -> None:
    outer = make_outer(cluster)
    outer.apply(zero)
    assert all(not value.any() for value in weights_of(outer[0]).values())
    assert not outer[2].weight.any()


def zero(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        nn.init.zeros_(part.weight)
        nn.init.zeros_(part.bias)


def test_conversion_of_the_outer_module_leaves_it_alone(cluster: Cluster) -> None:
    outer = make_outer(cluster)
    outer.float()
    assert outer[2].weight.dtype == torch.float32
    assert {value.dtype for value in weights_of(outer[0]).values()} == {torch.float64}


def test_state_dict_is_that_of_one_process(cluster: Cluster) -> None:
    outer = make_outer(cluster)
    local = make_local(outer)
    state, expected = outer.state_dict(), local.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert state._metadata == expected._metadata
    state["0.first.weight"].zero_()  # a copy
    assert weights_of(outer[0])["first.weight"].any()
    prefixed = outer[0].state_dict(prefix="net.")
    assert list(prefixed) == [f"net.{name}" for name in local[0].state_dict()]


def test_state_of_one_process_loads(cluster: Cluster) -> None:
    outer, other = (
        make_outer(cluster),
        nn.Sequential(Net(4, 3, seed=7), nn.Tanh(), nn.Linear(3, 2, dtype=torch.float64)),
    )
    assert str(outer.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    x = make_input(1)
    assert torch.equal(outer(x), other(x))
    back = Net(4, 3)
    back.load_state_dict(outer[0].state_dict())
    assert torch.equal(back(x), other[0](x))


def test_strict_loading_names_the_keys(cluster: Cluster) -> None:
    outer = make_outer(cluster)
    state = outer.state_dict()
    del state["0.first.bias"]
    state["0.second.more"] = torch.ones(1)
    with pytest.raises(RuntimeError) as caught:
        outer.load_state_dict(state)
    assert 'Missing key(s) in state_dict: "0.first.bias"' in str(caught.value)
    assert 'Unexpected key(s) in state_dict: "0.second.more"' in str(caught.value)
    missing, unexpected = outer.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["0.first.bias"], ["0.second.more"])


def test_sizes_that_do_not_fit_are_an_error(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 3)
    with pytest.raises(RuntimeError, match=r"(?s)on worker worker0: .*size mismatch for second.weight"):
        remote.load_state_dict(Net(4, 5).state_dict(), strict=False)


def test_assigned_state_is_used(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(Net, 4, 3), make_input(1)
    remote.load_state_dict(Net(4, 3, seed=3).float().state_dict(), assign=True)
    assert {value.dtype for value in weights_of(remote).values()} == {torch.float32}
    with gw.autograd.context() as ctx:
        ctx.backward(remote(x.float()).sum())
        assert len(gradients_of(remote, ctx)) == 4


def test_buffers_and_extra_state(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Noted), Noted(), make_input(1)
    assert torch.equal(remote(x), local(x))
    remote.write_note("seen")
    state = remote.state_dict()
    assert state["_extra_state"] == {"note": "seen"}
    assert torch.equal(state["norm.running_mean"], local.norm.running_mean)
    assert state["norm.num_batches_tracked"] == 1
    again = cluster.workers[1].module(Noted)
    again.load_state_dict(state)
    assert again.read_note() == "seen"
    again.eval()
    local.eval()
    assert torch.equal(again(x), local(x))


def test_lazy_modules_are_made_by_their_first_call(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(nn.LazyLinear, 2, dtype=torch.float64), make_input(1)
    with gw.autograd.context() as first:
        loss = remote(x).square().sum()
        before = weights_of(remote)
        with gw.autograd.context() as second:
            second.backward(remote(make_input(2)).square().sum())
            step(remote, second)
        first.backward(loss)
        found = gradients_of(remote, first)
    local = nn.Linear(4, 2, dtype=torch.float64)
    local.load_state_dict(before)
    local(x).square().sum().backward()
    assert torch.equal(found["weight"], local.weight.grad)


class Split(nn.Module):
    """Its first half is on another worker."""

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.lower = RemoteModule(worker, Net, (4, 3))
        self.upper = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.constant_(self.upper.weight, 0.25)
        nn.init.zeros_(self.upper.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.upper(self.lower(x))


def test_a_remote_module_with_a_remote_part(cluster: Cluster) -> None:
    outer, x = cluster.workers[0].module(Split, "worker1"), make_input(1)
    local = nn.Sequential(Net(4, 3), nn.Linear(3, 2, dtype=torch.float64))
    nn.init.constant_(local[1].weight, 0.25)
    nn.init.zeros_(local[1].bias)
    local(x).square().sum().backward()
    with gw.autograd.context() as ctx:
        result = outer(x)
        ctx.backward(result.square().sum())
        assert torch.equal(result, local(x))
        assert torch.equal(gradients_of(outer, ctx)["upper.weight"], local[1].weight.grad)
    expected = {f"lower.{name}": value for name, value in local[0].state_dict().items()}
    expected |= {f"upper.{name}": value for name, value in local[1].state_dict().items()}
    state = outer.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    names = [f"lower.{name}" for name, _ in local[0].named_parameters()]
    found = outer.named_remote_parameters()
    assert [name for name, _ in found] == [*names, "upper.weight", "upper.bias"]
    assert [rref.owner_name() for _, rref in found] == ["worker1"] * 4 + ["worker0"] * 2
    assert all(torch.equal(rref.to_here(), expected[name]) for name, rref in found)
    del found
    outer.eval()
    assert str(outer.load_state_dict(state)) == "<All keys matched successfully>"
