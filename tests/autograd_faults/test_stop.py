"""A worker does not answer in time: it is stopped, or its backward does not return. The deadline holds all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import gradwire as gw
from autograd_faults import tasks
from autograd_faults.worlds import (
    begin_backward,
    check_works,
    go_on,
    make_input,
    wait_clean,
    wait_dropped,
    wait_for_file,
)
from cluster.processes import stopped
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed, RpcTimeout
from gradwire.testing import wait_until

MODES = pytest.mark.parametrize("mode", ["smart", "fast"])
TIMEOUT_S = 3.0
LATE_S = 1.8
"""No wait may last longer than this beyond its deadline: less than a probe takes that nobody hurries."""


@MODES
@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "at a gate"])
def test_stopped_past_the_deadline(cluster: Cluster, mode: str, is_gated: bool) -> None:
    """It goes on with a pass that is over everywhere else: what it says then counts for nothing, and it learns the end."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        hidden = x * 2
        loss = first.call(tasks.through, hidden, [second.name]).sum() + (hidden.sum() if is_gated else 0)
        with stopped(second.pid):
            started = time.monotonic()
            with pytest.raises(
                BackwardFailed, match=r"timed out after 3 s.*tasks:through.*worker0 to worker1"
            ) as caught:
                ctx.backward(loss, mode=mode, timeout=TIMEOUT_S)
            assert time.monotonic() - started < TIMEOUT_S + LATE_S
            assert isinstance(caught.value.__cause__, RpcTimeout)
            wait_dropped(ctx, [first, third])
        wait_dropped(ctx, cluster.workers)
        assert not ctx.gradients()
    check_works(cluster.workers)


def test_stopped_with_a_gradient_that_fills_the_connection(cluster: Cluster) -> None:
    """Nobody reads the gradient at the other end; neither the pass nor the end of the context waits for it."""
    first = cluster.workers[0]
    x = torch.ones(4_000_000, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = first.call(torch.mul, x, 2.0).sum()
        with stopped(first.pid):
            started = time.monotonic()
            with pytest.raises(BackwardFailed):
                ctx.backward(loss, timeout=TIMEOUT_S)
            assert time.monotonic() - started < TIMEOUT_S + LATE_S
            gw.autograd._release_context(ctx)
            assert time.monotonic() - started < TIMEOUT_S + 2 * LATE_S
    check_works(cluster.workers)


def test_graph_shows_who_does_not_answer(cluster: Cluster) -> None:
    first, second, _ = cluster.workers
    with gw.autograd.context() as ctx:
        loss = first.call(tasks.through, make_input(), [second.name]).sum()
        with stopped(second.pid):
            started = time.monotonic()
            graph = ctx.graph(loss, timeout=TIMEOUT_S)
            assert time.monotonic() - started < TIMEOUT_S + LATE_S
        assert {item.name: item.answered for item in graph.workers} == {
            "driver": True,
            first.name: True,
            second.name: False,
        }
        assert f"{second.name} did not answer." in graph.to_svg()
    wait_clean(cluster.workers)
    check_works(cluster.workers)


def test_stopped_and_released(cluster: Cluster) -> None:
    """The end of the context is told to a worker that hears of it when it goes on."""
    first, second, third = cluster.workers
    x = make_input()
    context = gw.autograd.context()
    context.__enter__()
    first.call(tasks.through, x, [second.name, third.name])
    with stopped(first.pid):
        started = time.monotonic()
        context.__exit__()
        assert time.monotonic() - started < LATE_S
    wait_clean(cluster.workers)
    check_works(cluster.workers)


def test_stopped_in_forward(cluster: Cluster) -> None:
    """The call fails by its own deadline, and arrives when nobody waits for it: the context is over by then."""
    first = cluster.workers[0]
    x = make_input()
    with gw.autograd.context(), stopped(first.pid), pytest.raises(RpcTimeout):
        first.with_timeout(TIMEOUT_S).call(tasks.through, x, ["worker1"])
    check_works(cluster.workers)


def test_call_that_timed_out_has_no_part_in_the_loss(cluster: Cluster, tmp_path: Path) -> None:
    """It still runs there, with its arguments recorded on both sides, while the pass goes through its worker."""
    first = cluster.workers[0]
    x = make_input()
    with gw.autograd.context() as ctx:
        with pytest.raises(RpcTimeout):
            first.with_timeout(2.0).call(tasks.hold_and_call, x, str(tmp_path), [])
        wait_for_file(tmp_path)
        ctx.backward(first.call(tasks.layer, x).sum(), timeout=20)
        go_on(tmp_path)
        assert torch.allclose(ctx.gradients()[x], tasks.expected(1, x)[0])
    check_works(cluster.workers)


@MODES
@pytest.mark.parametrize("fault", ["holds", "computes"])
def test_backward_that_does_not_return(cluster: Cluster, tmp_path: Path, mode: str, fault: str) -> None:
    """The pass ends by its deadline, whether or not that node leaves the interpreter to others, and the next one works."""
    first, second, third = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = first.call(tasks.through, x, [second.name], fault, str(tmp_path)).sum()
        started = time.monotonic()
        with pytest.raises(BackwardFailed, match=r"timed out after 3 s.*worker1"):
            ctx.backward(loss, mode=mode, timeout=TIMEOUT_S)
        assert time.monotonic() - started < TIMEOUT_S + LATE_S
        wait_for_file(tmp_path)
        wait_dropped(ctx, [first, third])
        go_on(tmp_path)
        wait_dropped(ctx, cluster.workers)
    check_works(cluster.workers)


@MODES
def test_report_that_comes_too_late_to_be_sent(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """A worker is done after the deadline, and was not told of the end by the one it talks to: the root tells it."""
    first, second, third = cluster.workers
    x = make_input()
    with torch.no_grad():
        second.call(
            tasks.through, x, [first.name]
        )  # so that it can write to that one; to the root it must connect first
    with gw.autograd.context() as ctx:
        loss = first.call(tasks.through, x, [second.name], "holds", str(tmp_path)).sum()
        backward = begin_backward(ctx, loss, mode=mode, timeout=TIMEOUT_S)
        wait_for_file(tmp_path)
        with stopped(first.pid):
            assert isinstance(backward.wait(), BackwardFailed)
            go_on(tmp_path)
            wait_dropped(ctx, [second, third])
        wait_dropped(ctx, cluster.workers)
    check_works(cluster.workers)


def test_pass_that_is_dropped_in_the_middle_does_not_run_on(cluster: Cluster, tmp_path: Path) -> None:
    """The node that held it up returns; what is behind it is not run, and no gradient leaves."""
    first, second, _ = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = first.call(tasks.through, x, [second.name], "holds", str(tmp_path)).sum()
        with pytest.raises(BackwardFailed):
            ctx.backward(loss, timeout=TIMEOUT_S, retain_graph=True)
        wait_for_file(tmp_path)
        wait_dropped(ctx, cluster.workers)
        go_on(tmp_path)
        ctx.backward(loss, timeout=20)  # through the same graph, while the first run may not have ended yet
        assert torch.allclose(ctx.gradients()[x], expected_with_extra_layer(x))
    check_works(cluster.workers)


def expected_with_extra_layer(x: torch.Tensor) -> torch.Tensor:
    """A function with a fault has a layer on either side of it."""
    return tasks.expected(3, x)[0]


def test_driver_that_does_not_run_its_part(cluster: Cluster, tmp_path: Path) -> None:
    """The others wait for the root, which is busy; when it is done, the pass is."""
    first, second, _ = cluster.workers
    x = make_input()
    with gw.autograd.context() as ctx:
        there = first.call(tasks.through, x, [second.name])
        held = tasks.Holds.apply(there, str(tmp_path))  # type: ignore[no-untyped-call]
        backward = begin_backward(ctx, held.sum())
        wait_for_file(tmp_path)
        go_on(tmp_path)
        assert backward.wait() is None
        wait_until(lambda: x in ctx.gradients())
        assert torch.allclose(ctx.gradients()[x], tasks.expected(2, x)[0])
    check_works(cluster.workers)
