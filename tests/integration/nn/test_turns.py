"""Who waits for whom: steps for forward calls, and with "serialize" one context for another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import gradwire as gw
from gradwire import rpc
from gradwire.autograd.context import DistAutogradContext
from gradwire.cluster.api import Cluster
from gradwire.errors import RpcTimeout
from gradwire.nn import RemoteModule, module_owner
from gradwire.params import rwlock, snapshots
from gradwire.params.rwlock import ReadingCall
from gradwire.testing import wait_until
from nn.models import Net, Seen, gradients_of, make_input, step, take_steps, weights_of

NUM_TRAINERS = 8
NUM_STEPS = 200

_entered, _gate = threading.Event(), threading.Event()


class Slow(nn.Module):
    """Two products with its weight; between them it waits, or calls another worker."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5, dtype=torch.float64))

    def forward(self, x: torch.Tensor, elsewhere: str = "") -> torch.Tensor:
        first = x * self.weight
        if elsewhere:
            first = rpc.rpc_sync(elsewhere, wait_at_gate, args=(first,))
        else:
            wait_at_gate(first)
        return first * self.weight


def wait_at_gate(x: torch.Tensor) -> torch.Tensor:
    _entered.set()
    assert _gate.wait(30)
    return x * 1.0


def has_entered() -> bool:
    return _entered.is_set()


def open_gate() -> None:
    _gate.set()


def close_gate() -> None:
    _gate.clear()
    _entered.clear()


def add_one(module_rref: Any) -> None:
    """A step without a context: all who have used the weight are others."""
    (weight,) = module_rref.local_value().parameters()
    with snapshots.stepping([weight], []), torch.no_grad():
        weight.add_(1.0)


def num_pending(module_rref: Any) -> int:
    """Steps that wait for forward calls."""
    (weight,) = module_rref.local_value().parameters()
    found = rwlock.find(weight)
    assert found is not None
    return found.group.turns.num_pending


def set_idle(seconds: float) -> None:
    rwlock.IDLE_S = seconds


def test_a_step_waits_for_forward_calls_under_way(cluster: Cluster) -> None:
    """So a forward call sees one moment between steps."""
    worker = cluster.workers[0]
    remote, x = worker.module(Slow), torch.ones(4, dtype=torch.float64)
    worker.call(set_idle, 60.0)  # the call stands at the gate, and is not to be taken for one that waits
    worker.call(close_gate)
    with gw.autograd.context() as ctx:
        future = remote.forward_async(x)
        with torch.no_grad():  # these calls have no part in the context, and wait for no step
            wait_until(lambda: worker.call(has_entered), 10.0, "that the forward call is under way")
            other = worker.submit(add_one, remote.module_rref)
            wait_until(lambda: worker.call(num_pending, remote.module_rref) == 1, 10.0, "that the step waits")
            worker.call(open_gate)
            result = future.wait()
            other.wait()
        assert torch.equal(result, torch.full((4,), 0.25, dtype=torch.float64))
        ctx.backward(result.sum())
        assert torch.equal(gradients_of(remote, ctx)["weight"], torch.ones(4, dtype=torch.float64))
    assert torch.equal(weights_of(remote)["weight"], torch.full((4,), 1.5, dtype=torch.float64))


def test_a_forward_call_that_waits_holds_up_no_step(cluster: Cluster) -> None:
    """It calls another worker meanwhile; a step that waited for it could wait for itself."""
    worker, other = cluster.workers
    remote, x = worker.module(Slow), torch.ones(4, dtype=torch.float64)
    other.call(close_gate)
    with gw.autograd.context() as ctx:
        future = remote.forward_async(x, elsewhere=other.name)
        wait_until(lambda: other.call(has_entered), 10.0, "that the forward call waits")
        worker.call(add_one, remote.module_rref)
        other.call(open_gate)
        result = future.wait()
        ctx.backward(result.sum())
        assert torch.equal(result.detach(), torch.full((4,), 0.5 * 1.5, dtype=torch.float64))  # it saw both
        assert torch.equal(gradients_of(remote, ctx)["weight"], torch.full((4,), 0.5 + 1.5, dtype=torch.float64))


def hold_up(module_rref: Any) -> torch.Tensor:
    """A plain function that uses the weight, and then waits for a step in a way that nobody can see."""
    (weight,) = module_rref.local_value().parameters()
    result: torch.Tensor = (weight * weight).sum()
    _entered.set()
    assert _gate.wait(60)
    return result


def add_one_and_open(module_rref: Any) -> None:
    add_one(module_rref)
    open_gate()


def test_waiting_that_nobody_can_see_ends(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    remote = worker.module(Slow)
    worker.call(close_gate)
    worker.call(set_idle, 0.5)
    with gw.autograd.context() as ctx:
        future = worker.submit(hold_up, remote.module_rref)
        wait_until(lambda: worker.call(has_entered), 10.0, "that the function waits")
        worker.call(add_one_and_open, remote.module_rref)
        ctx.backward(future.wait())
        assert torch.equal(gradients_of(remote, ctx)["weight"], torch.ones(4, dtype=torch.float64))
    worker.call(set_idle, 60.0)


class Late(Slow):
    """Takes its time to be made."""

    def __init__(self) -> None:
        super().__init__()
        wait_at_gate(self.weight)

    def forward(self, x: torch.Tensor, elsewhere: str = "") -> torch.Tensor:
        return x * self.weight * self.weight


def test_a_call_that_comes_before_the_module_is_made(cluster: Cluster) -> None:
    worker, x = cluster.workers[0], torch.ones(4, dtype=torch.float64)
    worker.call(close_gate)
    made = rpc.remote(worker.name, module_owner.MAKE, (Late, (), {}, "cpu", "snapshot"))
    remote = RemoteModule.init_from_module_rref(worker.name, made)  # the constructor itself would wait
    with gw.autograd.context() as ctx:
        future = remote.forward_async(x)
        wait_until(lambda: worker.call(has_entered), 10.0, "that the module is being made")
        worker.call(open_gate)
        result = future.wait()
        worker.call(add_one, remote.module_rref)
        ctx.backward(result.sum())
        assert torch.equal(gradients_of(remote, ctx)["weight"], torch.ones(4, dtype=torch.float64))


def train_in_turn(remote: RemoteModule, trainer: int, num_steps: int) -> None:
    for number in range(num_steps):
        with gw.autograd.context() as ctx:
            result, _ = remote(make_input(1000 * trainer + number))
            ctx.backward(result.square().sum())
            step(remote, ctx, rate=0.05, label=(trainer, number))


@pytest.mark.slow
def test_serialized_trainers_equal_one_after_the_other(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    worker.call(take_steps)
    remote = RemoteModule("worker0", Seen, concurrency="serialize")
    with ThreadPoolExecutor(NUM_TRAINERS) as pool:
        jobs = [pool.submit(train_in_turn, remote, number, NUM_STEPS) for number in range(NUM_TRAINERS // 2)]
        jobs += [
            pool.submit(rpc.rpc_sync, "worker1", train_in_turn, (remote, number, NUM_STEPS), None, 0)
            for number in range(NUM_TRAINERS // 2, NUM_TRAINERS)
        ]
        for job in jobs:
            job.result(timeout=100)
    order = worker.call(take_steps)
    assert sorted(order) == [(trainer, number) for trainer in range(NUM_TRAINERS) for number in range(NUM_STEPS)]
    local = Seen()
    for trainer, number in order:
        result, _ = local(make_input(1000 * trainer + number))
        (gradient,) = torch.autograd.grad(result.square().sum(), [local.weight])
        with torch.no_grad():
            local.weight.sub_(gradient, alpha=0.05)
    assert torch.equal(weights_of(remote)["weight"], local.weight)


def num_in_line(module_rref: Any) -> int:
    """Contexts that wait for their turn."""
    found = rwlock.find(next(module_rref.local_value().parameters()))
    assert found is not None
    return found.group.turns.num_in_line


def forward_and_step(remote: RemoteModule, x: torch.Tensor) -> int:
    with gw.autograd.context() as ctx:
        ctx.backward(remote(x).sum())
        return len(step(remote, ctx))


def test_a_context_keeps_its_turn_until_it_has_stepped(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    remote, x = RemoteModule("worker0", Net, (4, 2), concurrency="serialize"), make_input(1)
    with ThreadPoolExecutor(1) as pool, gw.autograd.context() as first:
        loss = remote(x).sum()
        other = pool.submit(forward_and_step, remote, x)
        wait_until(lambda: worker.call(num_in_line, remote.module_rref) == 1, 10.0, "that the other waits")
        first.backward(loss)
        assert worker.call(num_in_line, remote.module_rref) == 1
        assert len(step(remote, first)) == 4
        assert other.result(timeout=20) == 4  # though the first is not released yet


def test_the_end_of_a_context_ends_its_turn(cluster: Cluster) -> None:
    remote, x = RemoteModule("worker0", Net, (4, 2), concurrency="serialize"), make_input(1)
    for _ in range(3):
        with gw.autograd.context():
            assert remote(x).requires_grad  # no step
    with gw.autograd.context() as ctx:
        ctx.backward(remote(x).sum())
        assert len(step(remote, ctx)) == 4


def test_waiting_in_vain_names_the_holder(cluster: Cluster) -> None:
    remote, x = RemoteModule("worker0", Net, (4, 2), concurrency="serialize"), make_input(1)
    with gw.autograd.context() as first:
        remote(x)
        holder = f"it is the turn of context {int(first)} of worker driver, which has neither stepped nor been released"
        with (
            gw.autograd.context(),
            pytest.raises(RpcTimeout, match=rf"gradwire.nn.invoke on worker worker0 .*: {holder}"),
        ):
            remote.rpc_sync(timeout=4.0).first_only(x)
    assert forward_and_step(remote, x) == 4


class Scaled(nn.Module):
    """Uses a weight of another module, and one of its own."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.factor, self.weight = nn.Parameter(torch.full((4,), 2.0)), weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factor


@pytest.mark.parametrize(("mode", "changed"), [("snapshot", "factor"), ("hogwild", "weight")])
def test_a_forward_call_waits_for_steps_on_parameters_of_several_modules(
    mode: snapshots.Mode, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch saves any of them: it is an error if one is changed while it is saved."""
    lent = nn.Linear(4, 1, bias=False)
    snapshots.guard(lent.parameters(), mode)
    module, x = Scaled(lent.weight), torch.ones(1, 4, requires_grad=True)
    param = module.get_parameter(changed)
    module_owner._groups_of(module)
    is_waiting, has_begun = threading.Event(), threading.Event()
    wait_readable = ReadingCall._wait_readable

    def wait_noticed(call: ReadingCall, group: snapshots.Group) -> None:
        is_waiting.set()
        wait_readable(call, group)

    def step() -> None:
        with snapshots.stepping([param], ()), torch.no_grad():
            has_begun.set()
            assert is_waiting.wait(20)
            param.fill_(3.0)

    monkeypatch.setattr(ReadingCall, "_wait_readable", wait_noticed)
    monkeypatch.setattr(module_owner, "_find_module", lambda *_: module)
    context = DistAutogradContext(1)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(step)
        assert has_begun.wait(20)
        with snapshots.recording(context, module_owner.FORWARD):
            result = module_owner.forward(0, None, x)
        other.result(timeout=20)
    assert torch.equal(result, x * module.weight * module.factor)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(gradient, module.weight * module.factor)


def test_inference_waits_for_no_turn(cluster: Cluster) -> None:
    remote, local, x = RemoteModule("worker0", Net, (4, 2), concurrency="serialize"), Net(4, 2), make_input(1)
    with gw.autograd.context():
        remote(x)
        with torch.no_grad():
            assert torch.equal(remote(x), local(x))  # the context does not travel with a call under no_grad
