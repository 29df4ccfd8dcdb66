"""A module on another worker behaves like the same module here."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import ConfigurationError, RRefError, UnknownWorker
from gradwire.nn import RemoteModule
from nn.models import Net, gradients_of, make_input, mode_on_owner, step, weights_of


def forward_elsewhere(module: RemoteModule, x: torch.Tensor) -> tuple[Any, Any]:
    return module(x).detach(), module.forward_async(x).wait().detach()


def make_nothing() -> str:
    return "no module"


def fill(part: nn.Module) -> None:
    if isinstance(part, nn.Linear):
        nn.init.constant_(part.weight, 0.25)


def double_result(module: nn.Module, args: Any, result: torch.Tensor) -> torch.Tensor:
    return result * 2


def halve_gradient(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(None if item is None else item / 2 for item in grad_input)


def is_on_owner(rref: Any) -> bool:
    return bool(rref.is_owner())


def test_forward_is_that_of_the_module(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1)
    assert torch.equal(remote(x), local(x))
    assert torch.equal(remote.forward(x, factor=3.0), local(x, factor=3.0))
    assert torch.equal(remote.forward_async(x).wait(), local(x))
    assert torch.equal(remote.forward_async(x, factor=0.5).wait(), local(x, factor=0.5))


def test_gradients_are_those_of_one_process(cluster: Cluster) -> None:
    first, second = (RemoteModule(worker.name, Net, (4, 4), {"seed": n}) for n, worker in enumerate(cluster.workers))
    x, local = make_input(1).requires_grad_(), nn.Sequential(Net(4, 4, 0), Net(4, 4, 1))
    local(x).square().sum().backward()
    with gw.autograd.context() as ctx:
        ctx.backward(second(first(x)).square().sum())
        assert torch.equal(ctx.gradients()[x], x.grad)
        for remote, part in ((first, local[0]), (second, local[1])):
            found = gradients_of(remote, ctx)
            assert found.keys() == {name for name, _ in part.named_parameters()}
            assert all(torch.equal(found[name], param.grad) for name, param in part.named_parameters())


@pytest.mark.parametrize("form", ["worker1", "worker1/cpu", "rank:1", "rank:1/cpu", 1])
def test_placement(cluster: Cluster, form: Any) -> None:
    remote = RemoteModule(form, Net, (4, 2))
    assert remote.module_rref.owner_name() == "worker1"
    assert remote.on == ("worker1" if str(form).startswith("worker1") else 1)
    assert remote.device == "cpu"
    assert remote(make_input(1)).shape == (3, 2)


def test_remote_parameters_are_references_in_order(cluster: Cluster) -> None:
    remote, local = cluster.workers[0].module(Net, 4, 2), Net(4, 2)
    named = remote.named_remote_parameters()
    assert [name for name, _ in named] == [name for name, _ in local.named_parameters()]
    for (_, rref), param, other in zip(named, local.parameters(), remote.remote_parameters(), strict=True):
        assert rref.owner_name() == "worker0"
        assert torch.equal(rref.to_here(), param)
        assert torch.equal(other.to_here(), param)
        assert cluster.workers[0].call(is_on_owner, rref)
    assert remote.remote_parameters(recurse=False) == []


def test_named_parameters_and_buffers_are_copies(cluster: Cluster) -> None:
    remote, local = cluster.workers[0].module(Net, 4, 2), Net(4, 2)
    for name, value in remote.named_parameters():
        assert torch.equal(value, local.get_parameter(name))
        assert not value.requires_grad
        value.zero_()
    assert torch.equal(weights_of(remote)["first.weight"], local.first.weight)
    assert next(name for name, _ in remote.named_parameters(prefix="net")) == "net.first.weight"
    assert [(name, value.item()) for name, value in remote.named_buffers()] == [("scale", 2.0)]
    assert [value.item() for value in remote.buffers()] == [2.0]


def test_parameters_would_train_copies(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 2)
    words = r"``parameters`` not supported for RemoteModule. Please use ``remote_parameters``.* DistributedOptimizer\("
    with pytest.raises(ValueError, match=words):
        torch.optim.SGD(remote.parameters(), lr=0.1)


def test_methods_by_name(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1)
    assert remote.shapes() == local.shapes()
    assert remote.rpc_sync().shapes() == local.shapes()
    assert remote.rpc_async().shapes().wait() == local.shapes()
    assert torch.equal(remote.first_only(x, sign=-1), local.first_only(x, sign=-1))
    with pytest.raises(LookupError, match="not today"):
        remote.fail()
    assert not hasattr(remote, "no_such_method")
    assert not hasattr(remote, "first")  # an attribute that is no method stays where it is
    with pytest.raises(AttributeError, match="no_such_method"):
        remote.no_such_method()


def test_methods_take_part_in_gradients(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1)
    local.first_only(x).square().sum().backward()
    with gw.autograd.context() as ctx:
        ctx.backward(remote.first_only(x).square().sum())
        found = gradients_of(remote, ctx)
    assert found.keys() == {"first.weight", "first.bias"}
    assert torch.equal(found["first.weight"], local.first.weight.grad)


def test_mode_changes_there_and_here(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    remote = worker.module(Net, 4, 2)
    assert remote.training
    for change, expected in ((remote.eval, False), (remote.train, True), (lambda: remote.train(False), False)):
        assert change() is remote
        assert worker.call(mode_on_owner, remote.module_rref) is remote.training is expected


def test_conversions_happen_on_the_owner(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(Net, 4, 2), make_input(1)
    assert remote.float() is remote
    assert remote(x.float()).dtype == torch.float32
    for convert, dtype in (
        (remote.half, torch.float16),
        (remote.bfloat16, torch.bfloat16),
        (remote.double, torch.float64),
        (lambda: remote.to(torch.float32), torch.float32),
        (lambda: remote.to("cpu", dtype=torch.float64), torch.float64),
        (lambda: remote.type(torch.float32), torch.float32),
        (lambda: remote.cpu().to(dtype=torch.float64), torch.float64),
    ):
        convert()
        assert {value.dtype for _, value in remote.named_parameters()} == {dtype}
    with gw.autograd.context() as ctx:  # converted parameters are still shared as was said
        ctx.backward(remote(x).sum())
        assert len(step(remote, ctx)) == 4


def test_requires_grad_and_zero_grad(cluster: Cluster) -> None:
    remote, x = cluster.workers[0].module(Net, 4, 2), make_input(1)
    remote.requires_grad_(False)
    with gw.autograd.context():
        assert not remote(x).requires_grad
    remote.requires_grad_()
    remote.zero_grad()
    with gw.autograd.context() as ctx:
        ctx.backward(remote(x).sum())
        assert len(gradients_of(remote, ctx)) == 4


def test_apply_runs_on_the_owner(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 2)
    assert remote.apply(fill) is remote
    assert torch.equal(weights_of(remote)["second.weight"], torch.full((2, 8), 0.25, dtype=torch.float64))
    assert not torch.equal(weights_of(remote)["second.bias"], torch.full((2,), 0.25, dtype=torch.float64))


def test_hooks_here_run_here(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1)
    seen = []
    with remote.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape)):
        remote(x)
    handle = remote.register_forward_hook(double_result)
    assert torch.equal(remote(x), 2 * local(x))
    assert torch.equal(forward_elsewhere(remote, x)[0], 2 * local(x))
    assert torch.equal(rpc.rpc_sync("worker1", forward_elsewhere, args=(remote, x))[0], local(x))
    handle.remove()
    assert torch.equal(remote(x), local(x))
    assert seen == [x.shape]


def test_hooks_on_the_owner_run_for_everybody(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1)
    handle = remote.register_owner_hook("forward", double_result)
    assert torch.equal(rpc.rpc_sync("worker1", forward_elsewhere, args=(remote, x))[0], 2 * local(x))
    handle.remove()
    handle.remove()
    assert torch.equal(remote(x), local(x))
    with pytest.raises(ConfigurationError, match="unknown kind of hook 'sideways'"):
        remote.register_owner_hook("sideways", double_result)  # type: ignore[arg-type]


def test_backward_hooks_on_the_owner(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1).requires_grad_()
    local(x).sum().backward()
    with remote.register_owner_hook("full_backward", halve_gradient), gw.autograd.context() as ctx:
        ctx.backward(remote(x).sum())
        assert torch.equal(ctx.gradients()[x], x.grad / 2)


def test_backward_hooks_here(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1).requires_grad_()
    local(x).sum().backward()
    handle = remote.register_full_backward_hook(halve_gradient)
    with gw.autograd.context() as ctx:
        ctx.backward(remote(x).sum())
        assert torch.equal(ctx.gradients()[x], x.grad / 2)
    handle.remove()


def test_handles_travel(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2).eval(), Net(4, 2), make_input(1)
    for result in rpc.rpc_sync("worker1", forward_elsewhere, args=(remote, x)):
        assert torch.equal(result, local(x))
    for result in rpc.rpc_sync("worker0", forward_elsewhere, args=(remote, x)):
        assert torch.equal(result, local(x))
    copied = rpc.rpc_sync("worker1", echo, args=({"inside": [remote]},))["inside"][0]
    assert torch.equal(copied(x), local(x))
    assert (copied.on, copied.device, copied.training) == ("worker0", "cpu", False)


def echo(value: Any) -> Any:
    return value


def test_handles_from_references(cluster: Cluster) -> None:
    remote, local, x = cluster.workers[0].module(Net, 4, 2), Net(4, 2), make_input(1)
    assert remote.get_module_rref() is remote.module_rref
    again = RemoteModule.init_from_module_rref("worker0/cpu", remote.module_rref)
    assert torch.equal(again(x), local(x))
    there = rpc.rpc_sync("worker1", RemoteModule.init_from_module_rref, args=("worker0", remote.module_rref))
    assert torch.equal(there(x), local(x))
    made = rpc.remote("worker1", Net, args=(4, 2))  # nobody said how it is shared
    assert torch.equal(RemoteModule.init_from_module_rref("worker1", made)(x), local(x))


def test_a_module_of_this_worker(cluster: Cluster) -> None:
    remote, local, x = RemoteModule("driver", Net, (4, 2)), Net(4, 2), make_input(1)
    assert torch.equal(remote(x), local(x))
    assert remote.get_module_rref().is_owner()
    local(x).sum().backward()
    with gw.autograd.context() as ctx:
        ctx.backward(remote(x).sum())
        found = gradients_of(remote, ctx)
    assert torch.equal(found["first.weight"], local.first.weight.grad)


def test_pickle_is_refused(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 2)
    with pytest.raises(
        RuntimeError, match=r"Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled"
    ):
        pickle.dumps(remote)


def test_what_goes_wrong_in_the_making(cluster: Cluster) -> None:
    with pytest.raises(
        ValueError, match=r"Expect `module_cls\(\*args, \*\*kwargs\)` returns an instance of <class nn.Module>,"
    ):
        RemoteModule("worker0", make_nothing)(make_input(1))
    with pytest.raises(TypeError, match="num_out"):
        RemoteModule("worker0", Net, (4,)).shapes()
    with pytest.raises(UnknownWorker, match="nobody"):
        RemoteModule("nobody", Net, (4, 2))
    with pytest.raises(ValueError, match="concurrency must be one of snapshot, serialize, hogwild, not 'often'"):
        RemoteModule("worker0", Net, (4, 2), concurrency="often")  # type: ignore[arg-type]


def test_a_reference_to_something_else_is_no_module(cluster: Cluster) -> None:
    odd = RemoteModule.init_from_module_rref("worker0", rpc.remote("worker0", make_nothing))
    for use in (odd, odd.state_dict, odd.remote_parameters, lambda: odd.device):
        with pytest.raises(RRefError, match="needs a reference to a module, not to a str"):
            use()


def test_what_a_handle_cannot_have(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 2)
    for name, args in {
        "register_buffer": ("b", torch.ones(1)),
        "register_parameter": ("p", nn.Parameter(torch.ones(1))),
        "add_module": ("m", None),
        "share_memory": (),
    }.items():
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            getattr(remote, name)(*args)


def test_repr_says_what_and_where(cluster: Cluster) -> None:
    remote = cluster.workers[0].module(Net, 4, 2)
    remote.eval()
    assert repr(remote).startswith("RemoteModule(Net on worker0/cpu, eval, <RRef ")
    assert "confirmed" in repr(remote)
    assert "RemoteModule(Net on worker0/cpu" in repr(nn.Sequential(remote, nn.Linear(2, 2)))
