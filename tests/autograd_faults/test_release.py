"""A context is released while something of it is still under way; messages come twice, or in another order."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from autograd_faults import tasks
from autograd_faults.worlds import (
    BOUND_S,
    begin_backward,
    check_works,
    go_on,
    make_input,
    wait_clean,
    wait_for_file,
)
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed, UnknownContext
from gradwire.rpc.oneway import Notices
from gradwire.testing import wait_until

MODES = pytest.mark.parametrize("mode", ["smart", "fast"])


@MODES
def test_released_while_a_pass_is_under_way(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    first, second, _ = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = first.call(tasks.through, x, [second.name], "holds", str(tmp_path)).sum()
        backward = begin_backward(ctx, loss, mode=mode)
        wait_for_file(tmp_path)
    started = time.monotonic()
    error = backward.wait(BOUND_S)
    assert time.monotonic() - started < BOUND_S
    assert isinstance(error, BackwardFailed)
    assert isinstance(error.__cause__, UnknownContext)
    assert "released on worker driver at test_release.py" in str(error)
    wait_clean(cluster.workers)  # though the run of the local engine has not ended there
    go_on(tmp_path)
    check_works(cluster.workers)


def test_released_by_another_worker_while_a_pass_is_under_way(cluster: Cluster, tmp_path: Path) -> None:
    """Any worker of the context may end it; the root hears of it."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        third.call(tasks.layer, x)
        loss = first.call(tasks.through, x, [second.name], "holds", str(tmp_path)).sum()
        backward = begin_backward(ctx, loss)
        wait_for_file(tmp_path)
        third.call(gw.autograd._release_context, int(ctx))
        error = backward.wait(BOUND_S)
        assert isinstance(error, BackwardFailed)
        assert "released on worker worker2" in str(error)
        wait_until(lambda: tasks.where_released(int(ctx)), BOUND_S, "that the driver hears of it")
        with pytest.raises(UnknownContext, match="released on worker worker2"):
            ctx.gradients()
        wait_clean(cluster.workers)
    go_on(tmp_path)
    check_works(cluster.workers)


def test_released_while_calls_are_in_flight(cluster: Cluster, tmp_path: Path) -> None:
    """They end as if there had been no context, and leave none behind where they go on to."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context():
        calls = [first.submit(tasks.hold_and_call, x, str(tmp_path), [second.name, third.name]) for _ in range(4)]
        wait_for_file(tmp_path)
    wait_clean(cluster.workers)
    go_on(tmp_path)
    for call in calls:
        assert call.wait().shape == (3,)
    check_works(cluster.workers)


def test_calls_that_race_with_the_release(cluster: Cluster) -> None:
    """Whoever comes first: nothing is left."""
    first, second, third = cluster.workers
    x = make_input()
    for _ in range(20):
        with gw.autograd.context():
            calls = [first.submit(tasks.through, x, [second.name, third.name]) for _ in range(3)]
        for call in calls:
            assert call.wait().shape == (3,)
    check_works(cluster.workers)


def test_two_passes_and_one_is_dropped(cluster: Cluster, tmp_path: Path) -> None:
    """At the same time, in the same context, over the same workers."""
    first, second, _ = cluster.workers
    x, y = make_input(), make_input()
    with gw.autograd.context() as ctx:
        good = first.call(tasks.through, x, [second.name], "holds", str(tmp_path)).sum()
        bad = first.call(tasks.through, y, [second.name], "raises").sum()
        backward = begin_backward(ctx, good)
        wait_for_file(tmp_path)
        with pytest.raises(BackwardFailed, match="in backward"):
            ctx.backward(bad)
        go_on(tmp_path)
        assert backward.wait() is None
        assert torch.allclose(ctx.gradients()[x], tasks.expected(3, x)[0])
        assert y not in ctx.gradients()
    check_works(cluster.workers)


# -- what the network may do -------------------------------------------------------------------------------------------


@MODES
def test_messages_that_come_twice(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """All that the driver sends: gradients, the commit, the release."""
    send = Notices.send

    def send_twice(self: Notices, *args: Any, **kwargs: Any) -> None:
        send(self, *args, **kwargs)
        send(self, *args, **kwargs)

    monkeypatch.setattr(Notices, "send", send_twice)
    first, second, _ = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        value = first.call(tasks.through, x, [second.name])
        loss = second.call(tasks.layer, value + x).sum()
        ctx.backward(loss, mode=mode, retain_graph=True)
        once = ctx.gradients()[x]
        parts = [worker.call(tasks.weight_gradient, int(ctx)) for worker in (first, second)]
        ctx.backward(loss, mode=mode)
        again = [worker.call(tasks.weight_gradient, int(ctx)) for worker in (first, second)]
        assert torch.allclose(ctx.gradients()[x], 2 * once)
        for before, after in zip(parts, again, strict=True):
            assert before is not None
            assert after is not None
            assert torch.allclose(after, 2 * before)
    leaf = x.detach().requires_grad_()
    hidden = tasks.layer(tasks.layer(leaf)) + leaf
    (expected,) = torch.autograd.grad(tasks.layer(hidden).sum(), leaf)
    assert torch.allclose(once, expected)
    check_works(cluster.workers)


@MODES
def test_messages_that_overtake_each_other(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The gradient that leaves first arrives last, when the worker has already joined the pass for another one."""
    send = Notices.send
    held: list[tuple[Any, ...]] = []
    sent = threading.Semaphore(0)

    def hold_first(self: Notices, to: str, name: str, note: Any, tensors: Any = (), *args: Any, **options: Any) -> None:
        if name == "autograd.propagate" and not held:
            held.append((to, name, note, [tensor.clone() for tensor in tensors], *args))
            return
        send(self, to, name, note, tensors, *args, **options)
        if name == "autograd.propagate":
            sent.release()

    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        values = [worker.call(tasks.through, x, [third.name]) for worker in (first, second, first)]
        monkeypatch.setattr(Notices, "send", hold_first)
        backward = begin_backward(ctx, torch.stack(values).sum(), mode=mode)
        assert all(sent.acquire(timeout=10) for _ in range(2))
        send(rpc.current_agent().notices, *held[0])
        assert backward.wait() is None
        assert torch.allclose(ctx.gradients()[x], 3 * tasks.expected(2, x)[0])
    monkeypatch.undo()
    check_works(cluster.workers)
