"""User code raises, on this or another worker: the pass fails everywhere, says where and why, and leaves nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from autograd_faults import tasks
from autograd_faults.tasks import OnPurpose
from autograd_faults.worlds import (
    begin_backward,
    check_works,
    go_on,
    make_input,
    wait_clean,
    wait_dropped,
    wait_for_file,
)
from gradwire.cluster.api import Cluster
from gradwire.errors import BackwardFailed, UnsettledSend

MODES = pytest.mark.parametrize("mode", ["smart", "fast"])


def traceback_of(error: BaseException) -> str:
    """All texts of an error and its causes, those from other workers among them."""
    texts = []
    link: BaseException | None = error
    while link is not None:
        texts.append(str(link))
        link = link.__cause__
    return "\n".join(texts)


@MODES
@pytest.mark.parametrize(
    ("way", "where"), [([], "worker0"), (["worker1"], "worker1"), (["worker1", "worker2"], "worker2")]
)
def test_backward_raises_on_a_worker(cluster: Cluster, mode: str, way: list[str], where: str) -> None:
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = cluster.workers[0].call(tasks.through, x, way, "raises").sum()
        with pytest.raises(BackwardFailed, match=r"in backward \(OnPurpose;") as caught:
            ctx.backward(loss, mode=mode)
        assert (caught.value.worker, caught.value.operation) == (where, "running the local backward")
        text = traceback_of(caught.value)
        assert f"of worker '{where}'" in text
        assert 'raise OnPurpose("in backward")' in text
        wait_dropped(ctx, cluster.workers)
    check_works(cluster.workers)


@MODES
def test_backward_raises_on_the_driver(cluster: Cluster, mode: str) -> None:
    """After a gradient has left for one worker, and while others wait for theirs."""
    x = make_input()
    with gw.autograd.context() as ctx:
        first = cluster.workers[0].call(tasks.through, x, ["worker1"])
        between: torch.Tensor = tasks.Raises.apply(first)  # type: ignore[no-untyped-call]
        second = cluster.workers[2].call(tasks.layer, between)
        with pytest.raises(BackwardFailed, match=r"in backward \(OnPurpose;") as caught:
            ctx.backward(second.sum(), mode=mode)
        assert caught.value.worker == "driver"
        assert isinstance(caught.value.__cause__, OnPurpose)
        wait_dropped(ctx, cluster.workers)
    check_works(cluster.workers)


@MODES
@pytest.mark.parametrize("kind", ["value", "weight", "accumulated"])
def test_hook_raises(cluster: Cluster, mode: str, kind: str) -> None:
    x = make_input()
    with gw.autograd.context() as ctx:
        first = cluster.workers[0].call(tasks.layer, x)
        loss = cluster.workers[1].call(tasks.hooked, first, kind).sum()
        with pytest.raises(BackwardFailed, match=r"in a hook \(OnPurpose;") as caught:
            ctx.backward(loss, mode=mode)
        assert caught.value.worker == "worker1"
        wait_dropped(ctx, cluster.workers)
    check_works(cluster.workers)


@pytest.mark.parametrize("is_gated", [False, True], ids=["plain", "at a gate"])
def test_those_who_wait_for_others_are_told(cluster: Cluster, tmp_path: Path, is_gated: bool) -> None:
    """One worker raises while another is in the middle of its part, and the driver stands at a gate."""
    x = make_input()
    with gw.autograd.context() as ctx:
        hidden = x * 2
        slow = cluster.workers[0].call(tasks.through, hidden, [], "holds", str(tmp_path))
        bad = cluster.workers[1].call(tasks.through, slow, [], "raises")
        good = cluster.workers[2].call(tasks.through, x, [], "holds", str(tmp_path))
        loss = bad.sum() + good.sum() + (hidden.sum() if is_gated else 0)
        backward = begin_backward(ctx, loss)
        error = backward.wait()
        assert isinstance(error, BackwardFailed)
        assert error.worker == "worker1"
        assert backward.seconds < 5.0
        go_on(tmp_path)
        wait_dropped(ctx, cluster.workers)
    check_works(cluster.workers)


def test_forward_raises(cluster: Cluster) -> None:
    """The context lives on, with what was recorded, and the call that failed has no part in the loss."""
    x = make_input()
    with gw.autograd.context() as ctx:
        with pytest.raises(OnPurpose, match="in forward"):
            cluster.workers[0].call(tasks.fail_forward, x, ["worker1"])
        loss = cluster.workers[0].call(tasks.through, x, ["worker2"]).sum()
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], tasks.expected(2, x)[0])
    check_works(cluster.workers)


def test_pass_after_a_failure_in_the_same_context(cluster: Cluster) -> None:
    x = make_input()
    with gw.autograd.context() as ctx:
        good = cluster.workers[0].call(tasks.through, x, ["worker1"]).sum()
        bad = cluster.workers[2].call(tasks.through, x, [], "raises").sum()
        with pytest.raises(BackwardFailed):
            ctx.backward([good, bad], retain_graph=True)
        wait_dropped(ctx, cluster.workers)
        ctx.backward(good, timeout=20)
        assert torch.allclose(ctx.gradients()[x], tasks.expected(2, x)[0])
        with torch.no_grad():
            parts = [worker.call(tasks.weight_gradient, int(ctx)) for worker in cluster.workers[:2]]
        assert torch.allclose(torch.stack([part for part in parts if part is not None]).sum(0), tasks.expected(2, x)[1])
    check_works(cluster.workers)


def test_result_that_cannot_be_rebuilt_has_no_part_in_the_loss(cluster: Cluster) -> None:
    """The call fails after its arguments were recorded on both sides; the next one is not held up by it."""
    x = make_input()
    with gw.autograd.context() as ctx:
        with pytest.raises(TypeError):
            cluster.workers[0].call(unsendable, x)
        loss = cluster.workers[0].call(tasks.layer, x).sum()
        ctx.backward(loss, timeout=20)
        assert torch.allclose(ctx.gradients()[x], tasks.expected(1, x)[0])
    check_works(cluster.workers)


def unsendable(x: torch.Tensor) -> Any:
    return [x * 2, threading.Lock()]


@pytest.mark.parametrize(("fault", "words"), [("raises", "in backward"), ("not a number", "nan values")])
def test_anomaly_mode_shows_the_forward_call_of_the_far_side(cluster: Cluster, fault: str, words: str) -> None:
    x = make_input()
    with torch.autograd.set_detect_anomaly(True), gw.autograd.context() as ctx:
        loss = cluster.workers[0].call(tasks.through, x, ["worker1"], fault).sum()
        with pytest.raises(BackwardFailed, match=words) as caught:
            ctx.backward(loss)
    assert caught.value.worker == "worker1"
    assert "Traceback of forward call" in str(caught.value)
    assert "return layer(FAULTS[fault].apply(layer(x), *args))" in str(caught.value)
    check_works(cluster.workers)
    assert not cluster.workers[1].call(torch.is_anomaly_enabled)


def test_fast_names_the_send_that_nobody_answers(cluster: Cluster) -> None:
    """Its result is not used; SMART copes with that, in the same context."""
    x = make_input()
    with gw.autograd.context() as ctx:
        used = cluster.workers[0].call(tasks.through, x, ["worker1"])
        cluster.workers[2].call(tasks.layer, x)
        with pytest.raises(UnsettledSend, match="not supported in FAST mode; use mode") as caught:
            ctx.backward(used.sum(), mode="fast", retain_graph=True)
        (line,) = caught.value.sends
        assert all(
            word in line
            for word in ("tasks:layer", "test_user_code.py", "in test_fast_names", "on worker driver to worker2")
        )
        assert caught.value.worker == "driver"
        wait_dropped(ctx, cluster.workers)
        ctx.backward(used.sum(), timeout=20)
        assert torch.allclose(ctx.gradients()[x], tasks.expected(2, x)[0])
    check_works(cluster.workers)


def test_fast_names_the_send_of_another_worker(cluster: Cluster) -> None:
    """The second worker called the third and did not use what came back."""
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = cluster.workers[0].call(call_for_nothing, x, "worker1").sum()
        with pytest.raises(UnsettledSend) as caught:
            ctx.backward(loss, mode="fast")
        lines = "; ".join(caught.value.sends)
        assert "on worker worker0 to worker1" in lines
        assert "in call_for_nothing" in lines
    check_works(cluster.workers)


def call_for_nothing(x: torch.Tensor, name: str) -> torch.Tensor:
    hidden = tasks.layer(x)
    gw.rpc.rpc_sync(name, tasks.layer, args=(hidden,))
    return hidden


def test_explain_shows_who_waits_for_whom(cluster: Cluster, tmp_path: Path) -> None:
    """The whole chain: the driver waits for the first worker, that one for the second, which computes."""
    x = make_input()
    with gw.autograd.context() as ctx:
        loss = cluster.workers[0].call(tasks.through, x, ["worker1"], "holds", str(tmp_path)).sum()
        backward = begin_backward(ctx, loss)
        wait_for_file(tmp_path)
        text = str(ctx.explain())
        go_on(tmp_path)
        assert backward.wait() is None
        for line in ("driver waits for worker0: send", "worker0 waits for worker1: send", "worker1 computes (1 run "):
            assert line in text
        assert "begun by driver" in text
        assert "worker2" not in text
    wait_clean(cluster.workers)
