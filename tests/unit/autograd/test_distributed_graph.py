"""The graph of a context, from workers of one process."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import rpc
from gradwire.autograd import DistributedGraph
from gradwire.autograd.distributed_graph import assemble
from gradwire.autograd.worker_views import MessageView, Segment, WorkerView
from gradwire.errors import AutogradError, ConfigurationError, UnknownContext
from gradwire.rpc import Agent
from gradwire.testing import wait_until
from unit.autograd.graph_samples import random_views
from unit.autograd.layers import context_of, engine_of, entered, gate, held_layer, layer, through


def way_of(graph: DistributedGraph) -> list[str]:
    """Messages as ``worker>worker function``."""
    worker = {node.id: node.worker for node in graph.nodes}
    return [f"{worker[m.source]}>{worker[m.target]} {m.function.rpartition(':')[2]}" for m in graph.messages]


def kinds_of(graph: DistributedGraph, worker: str) -> list[str]:
    return [node.kind for node in graph.nodes if node.worker == worker]


def test_nested_calls(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", through, args=(x, ["c"])).sum()
        graph = ctx.graph(loss)
    assert way_of(graph) == ["a>b through", "b>c through", "c>b through", "b>a through"]
    assert [message.is_result for message in graph.messages] == [False, False, True, True]
    assert [message.num_bytes for message in graph.messages] == [12] * 4
    assert "in test_nested_calls" in graph.messages[0].site
    assert (kinds_of(graph, "a"), kinds_of(graph, "b"), kinds_of(graph, "c")) == (
        ["segment", "roots"],
        ["segment", "segment"],
        ["segment"],
    )
    (computed,) = [node for node in graph.nodes if node.worker == "c"]
    assert (computed.operators, computed.num_leaves, computed.leaf_bytes) == (("mul", "tanh"), 1, 12)
    (passed_on,) = [node for node in graph.nodes if node.is_passed_on]  # b returns what c returned
    assert passed_on.worker == "b"
    assert str(graph) == "4 messages between a, b, c."
    assert [(w.name, w.num_sends, w.num_recvs, w.answered) for w in graph.workers] == [
        ("a", 1, 1, True),
        ("b", 2, 2, True),
        ("c", 1, 1, True),
    ]


def test_skip_connection_and_json(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        hidden = rpc.rpc_sync("b", layer, args=(x,))
        loss = (hidden + rpc.rpc_sync("c", layer, args=(hidden,))).sum()
        graph, without = gw.autograd.graph(ctx, [loss]), ctx.graph()
    assert way_of(graph) == ["a>b layer", "b>a layer", "a>c layer", "c>a layer"]
    kinds = {node.id: node.kind for node in graph.nodes}
    assert [(kinds[source], kinds[target]) for source, target in graph.links] == [
        ("received", "segment"),
        ("received", "roots"),
    ]
    assert kinds_of(without, "a") == ["segment", "segment", "received"]  # nothing says what the last one is used for
    found = json.loads(graph.to_json())
    assert found["context_id"] == ctx
    assert [message["num_bytes"] for message in found["messages"]] == [12] * 4
    assert len(found["nodes"]) == len(graph.nodes)


def test_gradients_are_counted(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        ctx.backward(rpc.rpc_sync("b", layer, args=(x,)).sum())
        context_of(trio[1], ctx).wait_gradients(5.0)
        graph = ctx.graph()
    assert [worker.num_gradients for worker in graph.workers] == [1, 1]


def test_message_whose_gradient_is_missing(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        loss = rpc.rpc_sync("b", held_layer, args=(x,)).sum()
        thread = threading.Thread(target=ctx.backward, args=(loss,), name="runs-backward")
        thread.start()
        assert entered.wait(10)
        graph = ctx.graph(loss)
        gate.set()
        thread.join(20)
    assert [message.waits_for for message in graph.messages] == ["b", ""]
    assert "Red: a backward pass waits for the gradient." in graph.to_svg()


def test_worker_that_is_gone(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", layer, args=(x,))
        trio[1].close()
        wait_until(lambda: 1 in engine_of(trio[0]).lost, 10.0, "that a notices it")
        graph = ctx.graph()
    assert [(worker.name, worker.answered) for worker in graph.workers] == [("a", True), ("b", False)]
    assert kinds_of(graph, "b") == ["unknown", "unknown"]
    assert [message.num_bytes for message in graph.messages] == [12, None]
    assert all(message.has_arrived for message in graph.messages)  # nothing says otherwise
    assert "b did not answer." in str(graph)


def test_worker_that_does_not_answer_in_time(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", through, args=(x, ["c"]))
        never = torch.futures.Future[Any]()
        monkeypatch.setitem(trio[1].server._control, "~autograd.explain", lambda *_: never)
        begin = time.monotonic()
        graph = ctx.graph(timeout=0.2)
        assert time.monotonic() - begin < 30.0
        never.set_result(None)
    assert "b did not answer." in graph.notes
    assert "no answer" in graph.to_svg()


@pytest.mark.parametrize("answer", [None, 5, {"worker": "b", "sends": "x"}, {"worker": "b" * 300}])
def test_answer_that_is_not_valid(trio: list[Agent], monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", layer, args=(x,))
        monkeypatch.setitem(trio[1].server._control, "~autograd.explain", lambda *_: answer)
        assert ctx.graph().notes == ("b did not answer.",)


def test_worker_is_not_called_what_it_says(trio: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", layer, args=(x,))
        monkeypatch.setitem(trio[1].server._control, "~autograd.explain", lambda *_: {"worker": "a"})
        graph = ctx.graph()
    assert [worker.name for worker in graph.workers] == ["a", "b"]


def test_large_context_is_shortened(trio: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as ctx:
        context = context_of(trio[0], ctx)
        for _ in range(10_000):
            context.record_send(engine_of(trio[0]).container.new_message_id(), 1, "m:f", [x])
        graph = ctx.graph()
    assert (len(graph.messages), graph.num_messages) == (2_000, 10_000)
    assert "Shortened: 2,000 of 10,000 messages are shown." in str(graph)
    assert "Shortened: 100 of 10,000 messages are shown." in graph.to_svg()


def test_message_that_has_not_arrived(trio: list[Agent]) -> None:
    with gw.autograd.context() as ctx:
        rpc.rpc_sync("b", layer, args=(torch.ones(3),))
        context = context_of(trio[0], ctx)
        leaf = torch.ones(3, requires_grad=True)
        context.record_send(engine_of(trio[0]).container.new_message_id(), 1, "m:lost", [leaf])
        graph = ctx.graph()
    (message,) = [item for item in graph.messages if item.function == "m:lost"]
    assert not message.has_arrived
    assert "Dashed arrows: the message has not arrived." in graph.to_svg()


def test_workers_that_do_not_share_code_keep_operators_to_themselves(make_agents: Any) -> None:
    agents: list[Agent] = make_agents(2, trust="data")
    rpc.set_current_agent(agents[0])
    try:
        x = torch.ones(3, requires_grad=True)
        with gw.autograd.context() as ctx:
            rpc.rpc_sync("b", "graph.layer", args=(x,))
            graph = ctx.graph()
    finally:
        rpc.set_current_agent(None)
    assert [(node.worker, node.operators, node.num_leaves) for node in graph.nodes if node.kind == "segment"] == [
        ("a", (), 0),
        ("b", (), 0),
    ]


rpc.expose(name="graph.layer")(layer)


@pytest.mark.parametrize("roots", [[torch.ones(2)], ["loss"]])
def test_roots_that_are_none(trio: list[Agent], roots: Any) -> None:
    with gw.autograd.context() as ctx, pytest.raises(AutogradError, match="roots must be tensors that require grad"):
        ctx.graph(roots)


def test_a_root_that_is_not_a_tensor_is_named(trio: list[Agent]) -> None:
    wrong: Any = 3
    with gw.autograd.context() as ctx:
        for function in (ctx.graph, ctx.backward):
            with pytest.raises(TypeError, match="roots must be a tensor or a sequence of tensors, not int"):
                function(wrong)


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None])
def test_a_number_of_messages_that_is_not_one_is_refused(wrong: Any) -> None:
    graph = DistributedGraph(7, ())
    for draw in (graph.to_dot, graph.to_mermaid, graph.to_svg):
        with pytest.raises(ConfigurationError, match=f"a whole number, 0 or more, not {wrong}"):
            draw(wrong)


@pytest.mark.parametrize("timeout", [0, -1, "soon"])
def test_timeout_that_is_none(trio: list[Agent], timeout: Any) -> None:
    with gw.autograd.context() as ctx, pytest.raises(ConfigurationError, match="positive number of seconds"):
        ctx.graph(timeout=timeout)


def test_context_that_is_over(trio: list[Agent]) -> None:
    with gw.autograd.context() as ctx:
        pass
    with pytest.raises(UnknownContext):
        ctx.graph()


def test_messages_that_lead_in_a_circle_are_left_out() -> None:
    def message(number: int, peer: str) -> MessageView:
        return MessageView(number, peer, "m:f")

    one = WorkerView("a", (), 0, 1, 1, (message(1, "b"),), (message(2, "b"),), (Segment(1, (2,)),))
    other = WorkerView("b", (), 0, 1, 1, (message(2, "a"),), (message(1, "a"),), (Segment(2, (1,)),))
    graph = assemble(7, [one, other])
    assert [(item.source, item.target) for item in graph.messages] == [("n0", "n1")]
    assert graph.notes == ("Shortened: 1 of 2 messages are shown.",)


def test_whatever_workers_say() -> None:
    for seed in range(300):
        graph = assemble(1, random_views(seed))
        place = {node.id: number for number, node in enumerate(graph.nodes)}
        workers = {worker.name for worker in graph.workers}
        assert {node.worker for node in graph.nodes} <= workers
        for source, target in [*graph.links, *((item.source, item.target) for item in graph.messages)]:
            assert place[source] < place[target]
        json.loads(graph.to_json())
        assert len(graph.first(1).messages) <= 1
        graph.to_dot()
        graph.to_mermaid()
