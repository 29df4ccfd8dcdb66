"""Several passes, contexts, threads and roots, and calls that end in other ways, on real workers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import gradwire as gw
from autograd import graphs, worlds
from autograd.graphs import FIRST, SECOND, THIRD, Graph
from gradwire import rpc
from gradwire.cluster.api import Cluster
from gradwire.errors import AutogradError
from gradwire.testing import wait_until

Tensor = torch.Tensor

# -- several losses, several passes, several contexts ------------------------------------------------------------------


def _two_losses(x: Tensor, y: Tensor) -> list[Tensor]:
    trunk = worlds.call(FIRST, graphs.layer, x)
    return [
        worlds.call(SECOND, graphs.layer, trunk).sum(),
        (worlds.call(THIRD, graphs.combine, trunk, y) * trunk).sum(),
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_losses_that_share_a_trunk(cluster: Cluster, order: tuple[int, int]) -> None:
    expected = worlds.gradients_here(lambda x, y: torch.stack(_two_losses(x, y)).sum())
    x, y = worlds.make_inputs()
    with gw.autograd.context() as ctx:
        losses = _two_losses(x, y)
        ctx.backward(losses[order[0]], retain_graph=True)
        ctx.backward(losses[order[1]])
        assert worlds.difference(worlds.collect(ctx, x, y), expected) == ""


def test_several_roots_at_once_and_roots_with_gradients(cluster: Cluster) -> None:
    expected = worlds.gradients_here(lambda x, y: torch.stack(_two_losses(x, y)).sum())
    x, y = worlds.make_inputs()
    with gw.autograd.context() as ctx:
        ctx.backward(_two_losses(x, y))
        assert worlds.difference(worlds.collect(ctx, x, y), expected) == ""
    with gw.autograd.context() as ctx:
        hidden = worlds.call(FIRST, graphs.layer, x)
        gw.autograd.backward(ctx, hidden, gradients=y.detach())
        found = worlds.collect(ctx, x, y)
    direct = worlds.gradients_here(lambda x, y: (worlds.call(FIRST, graphs.layer, x) * y.detach()).sum())
    assert worlds.difference(found, direct) == ""


def test_passes_add_up_and_grad_stays_none(cluster: Cluster) -> None:
    x, y = worlds.make_inputs()
    expected = {name: 3 * gradient for name, gradient in worlds.gradients_here(graphs.skip).items()}
    with gw.autograd.context() as ctx:
        loss = graphs.skip(x, y)
        for number in range(3):
            ctx.backward(loss, retain_graph=number < 2)
        assert worlds.difference(worlds.collect(ctx, x, y), expected) == ""
        assert x.grad is None
        assert cluster.workers[0].call(_grads_are_none)


def _grads_are_none() -> bool:
    return all(weight.grad is None for weight in worlds._weights.values())


def test_a_second_pass_without_retain_graph_fails_as_local_autograd_does(cluster: Cluster) -> None:
    x, y = worlds.make_inputs()
    with gw.autograd.context() as ctx:
        loss = graphs.skip(x, y)
        ctx.backward(loss)
        before = worlds.collect(ctx, x, y)
        with pytest.raises(AutogradError, match=r"backward through the graph a second time"):
            ctx.backward(loss)
        assert worlds.difference(worlds.collect(ctx, x, y), before) == ""


def test_200_contexts_alive_at_once(cluster: Cluster) -> None:
    expected = worlds.gradients_here(graphs.skip)
    x, y = worlds.make_inputs()
    with ExitStack() as stack:
        alive = []
        for _ in range(200):
            ctx = stack.enter_context(gw.autograd.context())  # each inside the one before
            alive.append((ctx, graphs.skip(x, y)))
        assert worlds.count_contexts() == 200
        assert cluster.workers[0].call(worlds.count_contexts) == 200
        for ctx, loss in alive[::-2] + alive[::2]:
            ctx.backward(loss)
        for ctx, _ in alive[::40] + alive[1::40]:
            assert worlds.difference(worlds.collect(ctx, x, y), expected) == ""
    assert worlds.count_contexts() == 0


def test_16_threads_with_a_context_each(cluster: Cluster) -> None:
    mixed = [graphs.nested, graphs.unused_beside_skip, graphs.to_oneself, graphs.changed_in_place]
    expected = {graph: worlds.gradients_here(graph) for graph in mixed}
    start = threading.Barrier(16, timeout=20.0)

    def train(number: int) -> list[str]:
        start.wait()
        chosen = [mixed[(number + step) % len(mixed)] for step in range(6)]
        return [worlds.difference(worlds.gradients_there(graph), expected[graph]) for graph in chosen]

    with ThreadPoolExecutor(16) as pool:
        assert not any(problem for problems in pool.map(train, range(16)) for problem in problems)


# -- who calls backward -------------------------------------------------------------------------------------------------


def _loss_there(x: Tensor) -> Tensor:
    hidden = graphs.layer(x, "before")
    return (hidden + worlds.call(SECOND, graphs.pass_on, [THIRD], hidden)).sum()


def _forward_and_backward(x: Tensor) -> float:
    """A worker that finds itself in somebody else's context calls backward."""
    loss = _loss_there(x)
    gw.autograd.backward(gw.autograd._current_context()._context_id(), [loss])
    return loss.item()


def test_the_root_is_on_another_worker(cluster: Cluster) -> None:
    x, y = worlds.make_inputs()
    expected = worlds.gradients_here(lambda x, _: worlds.call(FIRST, _loss_there, x))
    with gw.autograd.context() as ctx:
        cluster.workers[0].call(_forward_and_backward, x)
        assert worlds.difference(worlds.collect(ctx, x, y), expected) == ""


@pytest.mark.parametrize(
    "graph", [graphs.nested_diamond, graphs.unused_beside_skip, graphs.chain_of_30], ids=lambda graph: graph.__name__
)
def test_a_worker_makes_the_context(cluster: Cluster, graph: Graph) -> None:
    found = cluster.workers[2].call(worlds.gradients_there, graph)
    assert worlds.difference(found, worlds.gradients_here(graph, THIRD)) == ""


# -- what is not recorded -----------------------------------------------------------------------------------------------


def _recorded() -> tuple[int, int]:
    context = gw.autograd._current_context()
    return len(context._send_functions()), len(context._recv_functions())


def test_no_grad_records_nothing(cluster: Cluster) -> None:
    x, _ = worlds.make_inputs()
    with gw.autograd.context() as ctx:
        with torch.no_grad():
            result = cluster.workers[0].call(graphs.layer, x).detach()
        assert _recorded() == (0, 0)
        cluster.workers[0].call(graphs.layer, x.detach() * 2)
        assert cluster.workers[0].call(_recorded) == (1, 0)  # only the result, of a parameter there
        assert _recorded() == (0, 1)
        ctx.backward((x * result).sum())
        assert torch.equal(ctx.gradients()[x], result)


def test_one_node_for_each_message(cluster: Cluster) -> None:
    x, y = worlds.make_inputs()
    with gw.autograd.context():
        results = cluster.workers[0].call(graphs.echo, [x, y, x * y])
        assert _recorded() == (1, 1)
        assert cluster.workers[0].call(_recorded) == (1, 1)
        assert len({item.grad_fn for item in results}) == 1
        assert not any(item.is_leaf for item in results)


# -- calls that end in another way ----------------------------------------------------------------------------------------


_gate = threading.Event()  # on a worker: functions that wait for it are under way


def _layer_behind_gate(x: Tensor) -> Tensor:
    result = graphs.layer(worlds.call(SECOND, graphs.layer, x))
    assert _gate.wait(30.0)
    return result


def _open_gate() -> None:
    _gate.set()


def _close_gate() -> None:
    _gate.clear()


def _fail_after_calling(x: Tensor) -> Tensor:
    worlds.call(SECOND, graphs.layer, graphs.layer(x))
    raise ValueError("on purpose")


_started: list[Any] = []  # on a worker: futures that another one asks about


def _is_started_done() -> bool:
    return bool(_started[0].done())


def _open_gate_and_wait_until_done(asker: str) -> None:
    _gate.set()
    wait_until(lambda: rpc.rpc_sync(asker, _is_started_done), 20.0)


def _callback_under_no_grad() -> int:
    """Returns how many of two inputs have a gradient."""
    x, y = worlds.make_inputs()
    with gw.autograd.context() as ctx:
        _started[:] = [rpc.rpc_async(FIRST, _layer_behind_gate, args=(x,))]
        hidden = _started[0].then(lambda done: done.wait() * y)
        with torch.no_grad():
            rpc.rpc_sync(FIRST, _open_gate_and_wait_until_done, args=(THIRD,))
        ctx.backward(hidden.wait().sum())
        return len(ctx.gradients())


def test_a_callback_records_also_in_a_thread_that_waits_under_no_grad(cluster: Cluster) -> None:
    """A worker's thread that waits for a call reads the answers to others, too, and runs their callbacks."""
    rpc.rpc_sync(FIRST, _close_gate)
    assert rpc.rpc_sync(THIRD, _callback_under_no_grad) == 2


def test_a_call_that_fails_does_not_hold_the_pass_up(cluster: Cluster) -> None:
    def graph(x: Tensor, y: Tensor) -> Tensor:
        hidden = x * worlds.weight("w")
        if not worlds.is_oracle():
            with pytest.raises(ValueError, match="on purpose"):
                cluster.workers[0].call(_fail_after_calling, hidden)
        return (hidden + worlds.call(SECOND, graphs.layer, hidden) * y).sum()

    assert worlds.difference(worlds.gradients_there(graph), worlds.gradients_here(graph)) == ""


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_call_under_way_does_not_hold_the_pass_up(cluster: Cluster, is_cancelled: bool) -> None:
    rpc.rpc_sync(FIRST, _close_gate)
    pending = []

    def graph(x: Tensor, y: Tensor) -> Tensor:
        hidden = x * worlds.weight("w")
        if not worlds.is_oracle():
            pending.append(rpc.rpc_async(FIRST, _layer_behind_gate, args=(hidden,)))
            if is_cancelled:
                assert pending[0].cancel()
        return (hidden + worlds.call(SECOND, graphs.layer, hidden) * y).sum()

    try:
        assert worlds.difference(worlds.gradients_there(graph), worlds.gradients_here(graph)) == ""
    finally:
        rpc.rpc_sync(FIRST, _open_gate)
    if not is_cancelled:
        assert pending[0].wait() is not None
