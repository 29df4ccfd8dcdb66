"""What workers tell of calls, passes, steps, references, checkpoints and connections."""

from __future__ import annotations

import itertools
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from closeness import assert_close
from gradwire import autograd, checkpoint, observe, rpc
from gradwire.errors import CannotSend, WorkerLost
from gradwire.observe import Event, events
from gradwire.optim import DistributedOptimizer
from gradwire.rpc import Agent, set_current_agent
from gradwire.testing import wait_until

MakeAgents = Callable[..., list[Agent]]


class Told(list[Event]):
    """Events, by kind."""

    def of(self, kind: str, worker: str | None = None) -> list[Event]:
        return [event for event in list(self) if event.kind == kind and worker in (None, event.worker)]

    def one(self, kind: str, worker: str) -> Event:
        """The only event of that kind on a worker; it may be told a moment after its effect is seen elsewhere."""
        wait_until(lambda: self.of(kind, worker), what=f"an event {kind} of {worker}")
        (found,) = self.of(kind, worker)
        return found


@pytest.fixture
def agents(make_agents: MakeAgents) -> Iterator[list[Agent]]:
    found = make_agents(3)
    set_current_agent(found[0])
    found[0].call("b", abs, (1,))  # connected: what is told below is about one call
    found[0].call("c", abs, (1,))
    yield found
    set_current_agent(None)


@pytest.fixture
def told(agents: list[Agent]) -> Iterator[Told]:
    found = Told()
    unsubscribe = observe.subscribe(found.append)
    yield found
    unsubscribe()
    assert events.sink is None


def double(value: torch.Tensor) -> torch.Tensor:
    return value * 2


root_waits = threading.Event()


def double_when_root_waits(value: torch.Tensor) -> torch.Tensor:
    """Like `double`, but the gradient comes only when the worker that called backward waits for it."""
    result = value * 2
    result.register_hook(lambda _: assert_set(root_waits))
    return result


def assert_set(event: threading.Event) -> None:
    assert event.wait(30.0)


def fail() -> None:
    raise KeyError("no such thing")


def scale_by_weight(value: torch.Tensor, weight: rpc.RRef[torch.Tensor]) -> torch.Tensor:
    return value * weight.local_value()


def make_weight() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def in_order(*found: Event) -> bool:
    return all(first.end_ns <= second.start_ns for first, second in itertools.pairwise(found))


def test_call_has_its_parts_at_both_ends(agents: list[Agent], told: Told) -> None:
    value = torch.ones(1000)
    rpc.rpc_sync("b", double, args=(value,))
    call = told.one("call", "a")
    assert (call.peer, call.outcome, call.thread) == ("b", "ok", threading.get_native_id())
    packed, sent, loaded = told.one("serialize", "a"), told.one("wire", "a"), told.one("deserialize", "a")
    assert in_order(packed, sent, loaded)
    assert call.start_ns <= packed.start_ns
    assert loaded.end_ns <= call.end_ns
    queued, read = told.one("queue", "b"), told.one("deserialize", "b")
    ran, answered, replied = told.one("run", "b"), told.one("serialize", "b"), told.one("wire", "b")
    assert in_order(queued, read, ran, answered, replied)
    assert sent.start_ns <= queued.start_ns
    assert {event.peer for event in (queued, read, ran, answered, replied)} == {"a"}
    assert len({event.thread for event in (read, ran, answered, replied)}) == 1
    assert queued.thread == 0
    assert {event.name for event in told} == {call.name}
    assert sent.num_bytes == replied.num_bytes == loaded.num_bytes == 4000, "the tensor, and nothing beside it"


def test_arrows_join_both_ends(agents: list[Agent], told: Told) -> None:
    rpc.rpc_sync("b", double, args=(torch.ones(2),))
    sent, replied = told.one("wire", "a"), told.one("wire", "b")
    assert sent.flow_out == told.one("deserialize", "b").flow_in
    assert replied.flow_out == told.one("deserialize", "a").flow_in
    assert sent.flow_out != replied.flow_out


def test_call_to_itself(agents: list[Agent], told: Told) -> None:
    rpc.rpc_sync("a", double, args=(torch.ones(2),))
    wait_until(lambda: len(told.of("wire")) == 2)
    out = {flow for event in told for flow in event.flow_out}
    assert out == {flow for event in told for flow in event.flow_in}
    assert len(out) == 2


def test_error_is_the_outcome_at_both_ends(agents: list[Agent], told: Told) -> None:
    with pytest.raises(KeyError):
        rpc.rpc_sync("b", fail)
    assert told.one("call", "a").outcome == "KeyError"
    assert told.one("run", "b").outcome == "KeyError"
    assert told.one("wire", "b").flow_out == told.one("deserialize", "a").flow_in


def test_calls_that_fail_before_they_are_sent(agents: list[Agent], told: Told) -> None:
    with pytest.raises(CannotSend):
        rpc.rpc_sync("b", double, args=(threading.Lock(),))
    call = told.one("call", "a")
    assert (call.name, call.peer, call.outcome, call.thread) == ("double", "b", "CannotSend", threading.get_native_id())
    agents[1].close()
    wait_until(lambda: "b" not in agents[0].peers.by_name or not agents[0].peers.by_name["b"].lanes)
    told.clear()
    for _ in range(2):
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("b", double, args=(torch.ones(2),))
    assert [(event.peer, event.outcome) for event in told.of("call", "a")] == [("b", "WorkerLost")] * 2
    assert told.of("wire", "a") == []


def test_calls_that_no_thread_waits_for(agents: list[Agent], told: Told) -> None:
    futures = [rpc.rpc_async("b", double, args=(torch.ones(2),)) for _ in range(5)]
    torch.futures.wait_all(futures)
    wait_until(lambda: len(told.of("wire", "b")) == 5)
    assert [event.thread for event in told.of("call", "a")] == [0] * 5
    out = [flow for event in told for flow in event.flow_out]
    assert len(set(out)) == len(out) == 10
    assert set(out) == {flow for event in told for flow in event.flow_in}


def test_backward_has_its_parts_on_every_worker(
    agents: list[Agent], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = agents[0].extensions["autograd"]
    wait_over = engine._wait_over
    monkeypatch.setattr(engine, "_wait_over", lambda current: (root_waits.set(), wait_over(current)))
    root_waits.clear()
    value = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("c", double_when_root_waits, args=(rpc.rpc_sync("b", double, args=(value,)),))
        autograd.backward(context_id, [result.sum()])
        assert_close(autograd.get_gradients(context_id)[value], torch.full((3,), 4.0))
        root = told.one("backward", "a")
        assert root.details is not None
        assert (root.outcome, root.details["role"], root.details["mode"]) == ("ok", "root", "smart")
        assert root.details["num_participants"] == 2
        parts = [*told.of("join", "a"), *told.of("local_engine", "a"), *told.of("commit", "a"), *told.of("wait", "a")]
        assert {event.kind for event in parts} == {"join", "local_engine", "commit", "wait"}
        assert all(root.start_ns <= event.start_ns <= event.end_ns <= root.end_ns for event in parts)
        assert {event.context_id for event in told if event.kind != "connection"} == {context_id}
    for worker in ("b", "c"):
        found = told.one("backward", worker)
        assert found.details is not None
        assert (found.outcome, found.details["role"], found.thread) == ("ok", "participant", 0)
        assert found.details["pass_id"] == root.details["pass_id"]
        assert told.of("join", worker)
        assert told.of("local_engine", worker)


def test_arrows_of_gradients_lead_back(agents: list[Agent], told: Told) -> None:
    value = torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("b", double, args=(value,))
        autograd.backward(context_id, [result.sum()])
        wait_until(lambda: len(told.of("gradients")) == 4)
    sent = {flow: event for event in told.of("gradients") for flow in event.flow_out}
    received = {flow: event for event in told.of("gradients") for flow in event.flow_in}
    assert sent.keys() == received.keys()
    ways = {(sent[flow].worker, sent[flow].peer, received[flow].worker, received[flow].peer) for flow in sent}
    assert ways == {("a", "b", "b", "a"), ("b", "a", "a", "b")}
    assert all(event.num_bytes == 12 for event in told.of("gradients"))


class Refuses(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ArithmeticError("not today")


def refuse(value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = Refuses.apply(value)
    return found


def test_pass_that_fails(agents: list[Agent], told: Told) -> None:
    with autograd.context() as context_id:
        result = rpc.rpc_sync("b", refuse, args=(torch.ones(3, requires_grad=True),))
        with pytest.raises(RuntimeError, match="not today"):
            autograd.backward(context_id, [result.sum()])
    assert told.one("backward", "a").outcome == "BackwardFailed"
    assert told.one("backward", "b").outcome == "BackwardFailed"
    assert told.of("commit") == []


def test_step_is_told_by_the_worker_that_asks_and_by_the_owner(agents: list[Agent], told: Told) -> None:
    weight = rpc.remote("b", make_weight)
    optimizer = DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
    with autograd.context() as context_id:
        result = rpc.rpc_sync("b", scale_by_weight, args=(torch.ones(3), weight))
        autograd.backward(context_id, [result.sum()])
        optimizer.step(context_id)
    asked, stepped = told.one("optimizer_step", "a"), told.one("optimizer_step", "b")
    assert asked.details == {"role": "asks", "num_owners": 1}
    assert stepped.details == {"role": "owner", "num_parameters": 1}
    assert asked.start_ns <= stepped.start_ns <= stepped.end_ns <= asked.end_ns
    assert asked.name == stepped.name == "SGD"


def test_references_are_created_fetched_and_freed(agents: list[Agent], told: Told) -> None:
    reference = rpc.remote("b", make_weight)
    reference.to_here()
    reference.close()
    wait_until(lambda: len(told.of("rref", "b")) == 2)
    made, freed = told.of("rref", "b")
    (fetched,) = told.of("rref", "a")
    assert (made.name, fetched.name, freed.name) == ("create", "fetch", "free")
    assert fetched.peer == "b"
    assert made.details is not None
    assert fetched.details is not None
    assert made.details == freed.details
    assert made.details["reference"] == fetched.details["reference"]


def test_checkpoints(agents: list[Agent], told: Told, tmp_path: Path) -> None:
    weight = rpc.remote("b", make_weight)
    checkpoint.save(tmp_path, {"weight": weight}, progress=False)
    checkpoint.load(tmp_path, {"weight": weight}, progress=False)
    assert [event.name for event in told.of("checkpoint", "a")] == ["write", "save", "fill", "load"]
    assert [event.name for event in told.of("checkpoint", "b")] == ["write", "fill"]
    saved = told.of("checkpoint", "a")[1]
    assert saved.details == {"path": str(tmp_path)}
    assert saved.num_bytes > 12
    assert told.of("checkpoint", "b")[0].num_bytes == 12


def test_connections_open_and_end(agents: list[Agent], told: Told) -> None:
    agents[1].call("c", abs, (1,))
    opened = [(event.name, event.peer) for event in told.of("connection", "b")]
    assert opened == [("open", "c"), ("open", "c"), ("connect", "c")]
    lanes = {event.details["lane"] for event in told.of("connection", "c") if event.details is not None}
    assert lanes == {"calls", "control"}
    agents[1].close()
    wait_until(lambda: [event for event in told.of("connection", "c") if event.name == "end"])
    ended = [event for event in told.of("connection", "c") if event.name == "end"]
    assert {(event.peer, event.outcome) for event in ended} == {("b", "ok")}


def test_nothing_is_told_when_no_subscriber_is_left(agents: list[Agent]) -> None:
    found = Told()
    observe.subscribe(found.append)()
    rpc.rpc_sync("b", double, args=(torch.ones(2),))
    assert found == []


def test_step_that_is_not_observed_takes_few_checks(agents: list[Agent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is an attribute and a comparison, 20 ns of a call of 60 us; both ends are counted."""
    checks = []

    class Counting(types.ModuleType):
        @property
        def sink(self) -> None:
            checks.append(1)

    def count(action: Callable[[], object]) -> float:
        action()
        monkeypatch.setattr(events, "__class__", Counting)
        checks.clear()
        for _ in range(10):
            action()
        found = len(checks) / 10
        monkeypatch.undo()
        return found

    def step() -> None:
        with autograd.context() as context_id:
            result = rpc.rpc_sync("b", double, args=(torch.ones(2, requires_grad=True),))
            autograd.backward(context_id, [result.sum()])

    assert 3 <= count(lambda: rpc.rpc_sync("b", abs, args=(-1,))) <= 5
    assert 10 <= count(step) <= 14
