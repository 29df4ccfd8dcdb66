"""Hooks that look at ``.grad`` of leaves: on the nodes that accumulate gradients, and post-accumulate hooks."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import local_engine as accumulators
from gradwire.autograd.backward_pass import BackwardPass
from gradwire.autograd.context import DistAutogradContext
from gradwire.autograd.local_engine import run_accumulators
from gradwire.errors import AutogradError, BackwardFailed
from gradwire.params import grads as lending
from gradwire.params.grads import GradClaim
from gradwire.rpc import Agent
from gradwire.testing import wait_until


def make_leaf() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def hooked_leaf(hook: Callable[[torch.Tensor], None]) -> torch.Tensor:
    leaf = make_leaf()
    leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return leaf


def node_of(leaf: torch.Tensor) -> Any:
    """The node that accumulates the gradient of a leaf; to be kept, or its hooks go with it."""
    return get_gradient_edge(leaf).node


# -- post-accumulate hooks -------------------------------------------------------------------------------------------


def test_hook_sees_the_gradient_and_grad_is_as_before() -> None:
    seen: list[torch.Tensor | None] = []
    leaf = hooked_leaf(lambda param: seen.append(param.grad))
    leaf.grad = torch.full((2,), 7.0)
    table = {leaf: torch.ones(2), make_leaf(): torch.ones(2)}
    assert run_accumulators(table) == {}
    (first,) = seen
    assert first is not None
    assert first.tolist() == [1.0, 1.0]
    assert leaf.grad.tolist() == [7.0, 7.0]
    assert [gradient.tolist() for gradient in table.values()] == [[1.0, 1.0], [1.0, 1.0]]


def test_hook_may_consume_the_gradient() -> None:
    def consume(param: torch.Tensor) -> None:
        param.grad = None

    leaf = hooked_leaf(consume)
    table = {leaf: torch.ones(2)}
    run_accumulators(table)
    assert table == {}


def test_hook_may_replace_the_gradient() -> None:
    def scale(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad = param.grad * 10

    leaf = hooked_leaf(scale)
    table = {leaf: torch.ones(2)}
    run_accumulators(table)
    assert table[leaf].tolist() == [10.0, 10.0]


def test_hook_that_raises_leaves_grad_as_before() -> None:
    def fail(param: torch.Tensor) -> None:
        raise ValueError("on purpose")

    leaf = hooked_leaf(fail)
    leaf.grad = torch.full((2,), 7.0)
    with pytest.raises(ValueError, match="on purpose"):
        run_accumulators({leaf: torch.ones(2)})
    assert leaf.grad.tolist() == [7.0, 7.0]
    claim = GradClaim([leaf])
    assert claim.acquire(blocking=False)
    claim.release()


def test_hook_runs_once_with_the_total_of_the_pass(trio: list[Agent]) -> None:
    """The leaf is used here, and behind two calls."""
    seen: list[list[float]] = []

    def note(param: torch.Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.tolist())

    leaf = hooked_leaf(note)
    with gw.autograd.context() as ctx:
        there = [rpc.rpc_sync(name, torch.mul, args=(leaf * 2, 3.0)) for name in ("b", "c")]
        ctx.backward((there[0] + there[1] + leaf).sum())
        assert ctx.gradients()[leaf].tolist() == [13.0, 13.0]
    assert seen == [[13.0, 13.0]]
    assert leaf.grad is None


def test_hook_that_raises_fails_the_pass(trio: list[Agent]) -> None:
    def fail(param: torch.Tensor) -> None:
        raise ValueError("no good gradient")

    leaf = hooked_leaf(fail)
    with gw.autograd.context() as ctx:
        value = rpc.rpc_sync("b", torch.mul, args=(leaf, 3.0))
        with pytest.raises(BackwardFailed, match=r"no good gradient \(ValueError;") as caught:
            ctx.backward(value.sum())
        assert caught.value.worker == "a"
        assert ctx.gradients() == {}
        assert leaf.grad is None


# -- hooks on nodes --------------------------------------------------------------------------------------------------


def test_hooks_on_the_node_run_once_in_torchs_order(trio: list[Agent]) -> None:
    """Those on the leaf itself have run before, and do not again."""
    order: list[tuple[str, list[float]]] = []

    def note(kind: str, gradient: torch.Tensor | None) -> None:
        assert gradient is not None
        order.append((kind, gradient.tolist()))

    def run(backward: Callable[[torch.Tensor], None], leaf: torch.Tensor) -> list[tuple[str, list[float]]]:
        order.clear()
        node = node_of(leaf)
        leaf.register_hook(lambda gradient: (note("leaf", gradient), gradient * 2)[1])  # type: ignore[no-untyped-call]
        leaf.register_post_accumulate_grad_hook(lambda param: note("accumulated", param.grad))  # type: ignore[no-untyped-call]
        node.register_prehook(lambda gradients: note("before", gradients[0]))
        node.register_hook(lambda _, gradients: note("after", gradients[0]))
        backward((leaf * 3 + leaf).sum())
        return list(order)

    alone = make_leaf()
    expected = run(lambda loss: loss.backward(), alone)  # type: ignore[no-untyped-call]
    assert [kind for kind, _ in expected] == ["leaf", "before", "accumulated", "after"]
    leaf = make_leaf()
    leaf.grad = torch.full((2,), 7.0)
    with gw.autograd.context() as ctx:
        assert run(lambda loss: ctx.backward(rpc.rpc_sync("b", torch.mul, args=(loss, 1.0))), leaf) == expected
        assert alone.grad is not None
        assert torch.equal(ctx.gradients()[leaf], alone.grad)
    assert leaf.grad.tolist() == [7.0, 7.0]


def test_a_hook_before_the_node_may_change_the_gradient(trio: list[Agent]) -> None:
    leaf = make_leaf()
    node = node_of(leaf)
    node.register_prehook(lambda gradients: (gradients[0] * 10,))
    with gw.autograd.context() as ctx:
        ctx.backward((leaf * 2).sum())
        assert ctx.gradients()[leaf].tolist() == [20.0, 20.0]


def test_a_hook_that_was_removed_does_not_run(trio: list[Agent]) -> None:
    leaf, seen = make_leaf(), []
    node = node_of(leaf)
    node.register_hook(lambda *_: seen.append(1)).remove()
    with gw.autograd.context() as ctx:
        ctx.backward((leaf * 2).sum())
        assert ctx.gradients()[leaf].tolist() == [2.0, 2.0]
    assert seen == []


def test_hooks_are_left_alone_by_grad(trio: list[Agent]) -> None:
    leaf, seen = make_leaf(), []
    node = node_of(leaf)
    node.register_hook(lambda *_: seen.append(1))
    with gw.autograd.context() as ctx:
        gw.autograd.grad(ctx, [(leaf * 2).sum()], [leaf])
    assert seen == []


def test_a_recorded_pass_stays_recorded_through_hooks(trio: list[Agent]) -> None:
    leaf = make_leaf()
    node = node_of(leaf)
    node.register_hook(lambda *_: None)
    with gw.autograd.context() as ctx:
        ctx.backward((leaf**3).sum(), create_graph=True)
        (again,) = gw.autograd.grad(ctx, [ctx.gradients()[leaf].sum()], [leaf])
        assert again is not None
        assert again.tolist() == [6.0, 6.0]


def test_recorded_passes_do_not_make_python_repeat_warnings(trio: list[Agent]) -> None:
    """Python shows a warning once for each line, until the filters change."""
    leaf = hooked_leaf(lambda _: None)

    def run_pass() -> None:
        with gw.autograd.context() as ctx:
            ctx.backward((leaf**3).sum(), create_graph=True)
        warnings.warn("of this line", stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            run_pass()
    assert [str(item.message) for item in shown] == ["of this line"]


def test_a_pass_inside_a_hook_that_reaches_the_same_leaf_is_an_error(trio: list[Agent]) -> None:
    """torch's node has a lock, which its own thread would wait for."""

    def run_another(param: torch.Tensor) -> None:
        with gw.autograd.context() as other, torch.enable_grad():
            other.backward((param * 2).sum(), timeout=10.0)

    leaf = hooked_leaf(run_another)
    with gw.autograd.context() as ctx, pytest.raises(BackwardFailed, match="reaches the same leaf"):
        ctx.backward((leaf * 2).sum(), timeout=10.0)


# -- DistributedDataParallel; tests/integration/autograd has some with other ranks -----------------------------------


@pytest.fixture
def process_group() -> Iterator[None]:
    """One of two ranks whose other rank does not exist: everything that is sent comes back as it is."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_replicas_are_known_as_long_as_they_live(process_group: None) -> None:
    module = torch.nn.Linear(2, 1)
    replica = DistributedDataParallel(module)
    assert accumulators._reducer_of(module.weight) is replica.reducer
    assert accumulators._reducer_of(make_leaf()) is None
    del replica
    gc.collect()
    assert accumulators._reducer_of(module.weight) is None


def test_replicas_made_before_gradwire_was_imported_are_found(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = DistributedDataParallel(torch.nn.Linear(2, 1), static_graph=True)
    monkeypatch.setattr(accumulators, "_reduced", {})
    monkeypatch.setattr(accumulators, "_static", weakref.WeakSet())
    accumulators._find_reducers()
    assert accumulators._reducer_of(replica.module.weight) is replica.reducer
    assert replica.reducer in accumulators._static


def test_pass_that_is_committed_between_the_hooks_and_the_commit_of_another_counts(
    process_group: None, trio: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the reducer has averaged includes the gradients that the context had then, and no later ones."""
    replica = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    weight, end_pass, begun = replica.module.weight, DistAutogradContext.end_pass, []
    with gw.autograd.context() as ctx, replica.no_sync():
        losses = [factor * replica(torch.ones(1, 2)).sum() for factor in (1.0, 2.0, 4.0)]

        def run_another_first(self: DistAutogradContext, current: BackwardPass, is_committed: bool) -> None:
            if not begun:
                begun.append(current)
                ctx.backward(losses[2])
            end_pass(self, current, is_committed)

        ctx.backward(losses[0])
        monkeypatch.setattr(DistAutogradContext, "end_pass", run_another_first)
        ctx.backward(losses[1])
        assert torch.equal(ctx.gradients()[weight], torch.full((1, 2), 7.0))


# -- one user of .grad at a time -------------------------------------------------------------------------------------


def test_hooks_wait_for_a_step_on_the_same_leaf_and_for_no_other() -> None:
    """A step lends ``.grad`` its gradients; a step on other parameters must not hold up a hook that waits for ranks."""
    seen: list[float] = []
    leaf, other = hooked_leaf(lambda param: seen.append(float(param.grad.sum()))), make_leaf()  # type: ignore[union-attr]
    step, unrelated = GradClaim([leaf]), GradClaim([other])
    assert step.acquire(blocking=False)
    assert unrelated.acquire(blocking=False)
    leaf.grad = torch.full((2,), 7.0)  # what the step lends
    thread = threading.Thread(target=run_accumulators, args=({leaf: torch.ones(2)},))
    thread.start()
    wait_until(lambda: lending._changed._waiters, 10.0, "that the hooks wait for the step")  # type: ignore[attr-defined]
    assert leaf.grad.tolist() == [7.0, 7.0]
    step.release()
    thread.join(10.0)
    assert seen == [2.0]
    unrelated.release()


def test_a_claim_is_reentrant_and_times_out_for_others() -> None:
    one, two, three = make_leaf(), make_leaf(), make_leaf()
    outer, inner = GradClaim([one, two]), GradClaim([two, three])
    assert outer.acquire(blocking=False)
    assert inner.is_nested
    assert inner.acquire(blocking=False)
    inner.release()
    results: list[bool] = []

    def try_both() -> None:
        results.append(GradClaim([three]).acquire(blocking=False))
        results.append(GradClaim([two]).acquire(timeout=0.05))

    thread = threading.Thread(target=try_both)
    thread.start()
    thread.join(10.0)
    assert results == [True, False]
    outer.release()


def test_the_error_names_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.autograd.local_engine._WAIT_S", 0.05)
    leaf = hooked_leaf(lambda _: None)
    claim = GradClaim([leaf])
    thread = threading.Thread(target=claim.acquire)
    thread.start()
    thread.join(10.0)
    with pytest.raises(AutogradError, match=r"waiting for the \.grad of a leaf with hooks"):
        run_accumulators({leaf: torch.ones(2)})
    claim.release()
