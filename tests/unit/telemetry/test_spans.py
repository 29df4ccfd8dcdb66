"""Spans of calls and backward passes, read back from an exporter in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

import gradwire as gw
from conftest import MakeAgents
from gradwire import rpc, telemetry
from gradwire.errors import ConfigurationError, DecodeError
from gradwire.observe import events
from gradwire.rpc import Agent, set_current_agent
from gradwire.telemetry.spans import NOTE, SpanInterceptor, TraceNote
from gradwire.testing import wait_until
from gradwire.wire.messages import read_note


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.enable_opentelemetry(provider)
    yield exporter
    telemetry.disable_opentelemetry()
    assert events.sink is None
    provider.shutdown()


@pytest.fixture
def pair(exporter: InMemorySpanExporter, make_agents: MakeAgents) -> Iterator[list[Agent]]:
    agents = make_agents(2)
    set_current_agent(agents[0])
    yield agents
    set_current_agent(None)


def wait_for(exporter: InMemorySpanExporter, count: int) -> list[ReadableSpan]:
    wait_until(lambda: len(exporter.get_finished_spans()) >= count, 10.0, f"{count} spans")
    return sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


def _double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def _fail() -> None:
    raise ValueError("no such thing")


def _call_back() -> str:
    rpc.rpc_sync("a", max, args=(1, 2))
    return f"{get_current_span().get_span_context().trace_id:x}"


@rpc.functions.async_execution
def _later() -> Any:
    return rpc.rpc_async("a", max, args=(1, 2))


def test_a_call_has_a_span_at_both_ends_in_one_trace(exporter: InMemorySpanExporter, pair: list[Agent]) -> None:
    rpc.rpc_sync("b", _double, args=(torch.ones(2),))
    client, server = wait_for(exporter, 2)
    assert (client.kind, server.kind) == (SpanKind.CLIENT, SpanKind.SERVER)
    assert client.name == server.name
    assert client.name.endswith("_double")
    assert client.context is not None
    assert server.parent is not None
    assert server.parent.span_id == client.context.span_id
    assert server.parent.is_remote
    assert dict(client.attributes or {}) == {
        "rpc.system.name": "gradwire",
        "rpc.method": client.name,
        "gradwire.worker": "a",
        "server.address": "b",
    }
    assert (server.attributes or {})["client.address"] == "a"
    assert client.status.status_code is server.status.status_code is StatusCode.UNSET


def test_an_error_is_seen_at_both_ends(exporter: InMemorySpanExporter, pair: list[Agent]) -> None:
    with pytest.raises(ValueError, match="no such thing"):
        rpc.rpc_sync("b", _fail)
    for span in wait_for(exporter, 2):
        assert span.status.status_code is StatusCode.ERROR
        assert (span.attributes or {})["error.type"] == "ValueError"
    (recorded,) = [event for span in exporter.get_finished_spans() for event in span.events]
    assert (recorded.attributes or {})["exception.message"] == "no such thing"


def test_a_call_made_by_a_called_function_is_its_child(exporter: InMemorySpanExporter, pair: list[Agent]) -> None:
    set_current_agent(None)
    set_current_agent(pair[1])
    trace_id = pair[0].call("b", _call_back)
    spans = wait_for(exporter, 4)
    assert {f"{span.context.trace_id:x}" for span in spans if span.context} == {trace_id}
    assert [span.kind for span in spans] == [SpanKind.CLIENT, SpanKind.SERVER, SpanKind.CLIENT, SpanKind.SERVER]
    assert spans[2].parent is not None
    assert spans[1].context is not None
    assert spans[2].parent.span_id == spans[1].context.span_id


def test_the_span_of_an_async_function_ends_with_its_future(exporter: InMemorySpanExporter, pair: list[Agent]) -> None:
    set_current_agent(None)
    set_current_agent(pair[1])
    assert pair[0].call("b", _later) == 2
    spans = wait_for(exporter, 4)
    outer, inner = spans[1], spans[3]
    assert outer.kind is inner.kind is SpanKind.SERVER
    assert (outer.end_time or 0) >= (inner.end_time or 0)


def test_spans_of_a_backward_pass_are_linked_to_the_calls(exporter: InMemorySpanExporter, pair: list[Agent]) -> None:
    x = torch.ones(3, requires_grad=True)
    with gw.autograd.context() as context_id:
        loss = rpc.rpc_sync("b", _double, args=(x,)).sum()
        gw.autograd.backward(context_id, [loss])
        assert torch.equal(gw.autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))
    spans = wait_for(exporter, 4)
    calls = {span.kind: span.context.span_id for span in spans if span.context and span.kind is not SpanKind.INTERNAL}
    passes = {(span.attributes or {})["gradwire.worker"]: span for span in spans if span.name == "backward"}
    assert passes.keys() == {"a", "b"}
    assert [link.context.span_id for link in passes["a"].links] == [calls[SpanKind.CLIENT]]
    assert [link.context.span_id for link in passes["b"].links] == [calls[SpanKind.SERVER]]
    assert (passes["a"].attributes or {})["gradwire.backward.role"] == "root"
    assert (passes["b"].attributes or {})["gradwire.context_id"] == str(int(context_id))
    assert 0 < (passes["a"].end_time or 0) - (passes["a"].start_time or 0) < 60 * 10**9


def test_a_call_that_cannot_be_sent_ends_its_span(
    exporter: InMemorySpanExporter, pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    rpc.rpc_sync("b", max, args=(1, 2))
    wait_for(exporter, 2)

    def refuse(*_: object, **__: object) -> None:
        raise TimeoutError("no room")

    monkeypatch.setattr(pair[0].peers.by_name["b"].lanes["calls"].stream, "send", refuse)
    with pytest.raises(gw.errors.RpcTimeout):
        rpc.rpc_sync("b", max, args=(1, 2))
    *_, last = wait_for(exporter, 3)
    assert (last.attributes or {})["error.type"] == "RpcTimeout"


def test_when_switched_off_again_calls_have_no_notes(exporter: InMemorySpanExporter, pair: list[Agent]) -> None:
    telemetry.enable_opentelemetry()  # a second time
    assert [item.name for item in pair[0].interceptors].count(NOTE) == 1
    telemetry.disable_opentelemetry()
    assert NOTE not in [item.name for agent in pair for item in agent.interceptors]
    rpc.rpc_sync("b", max, args=(1, 2))
    assert exporter.get_finished_spans() == ()


class _Failing(SpanProcessor):
    """Fails at the start of spans, or at their end."""

    def __init__(self, where: str) -> None:
        self._where = where
        self.num_failed = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._fail("start")

    def on_end(self, span: ReadableSpan) -> None:
        self._fail("end")

    def _fail(self, where: str) -> None:
        if where == self._where:
            self.num_failed += 1
            raise ValueError(f"no {where}")


@pytest.mark.parametrize("where", ["start", "end"])
def test_calls_and_passes_go_on_when_opentelemetry_fails(
    make_agents: MakeAgents, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    processor = _Failing(where)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    telemetry.enable_opentelemetry(provider)
    try:
        a, b = make_agents(2)
        set_current_agent(a)
        x = torch.ones(3, requires_grad=True)
        for _ in range(2):
            before = processor.num_failed
            with gw.autograd.context() as context_id:
                loss = rpc.rpc_sync("b", _double, args=(x,)).sum()
                gw.autograd.backward(context_id, [loss])
                assert torch.equal(gw.autograd.get_gradients(context_id)[x], torch.full((3,), 2.0))
            # A call without a span has no note, so its callee begins none either.
            wait_until(lambda: processor.num_failed - before == (3 if where == "start" else 4), 10.0, "all spans")  # noqa: B023
        assert sorted(record.args[0] for record in caplog.records if "OpenTelemetry" in record.msg) == ["a", "b"]  # type: ignore[index]
        assert all(
            not item._open for agent in (a, b) for item in agent.interceptors if isinstance(item, SpanInterceptor)
        )
    finally:
        set_current_agent(None)
        telemetry.disable_opentelemetry()
    assert events.sink is None


def _exit() -> None:
    raise SystemExit("enough")


def test_a_function_that_exits_has_a_span_with_an_error(exporter: InMemorySpanExporter, pair: list[Agent]) -> None:
    with pytest.raises(Exception, match="enough"):
        rpc.rpc_sync("b", _exit)
    for span in wait_for(exporter, 2):
        assert span.status.status_code is StatusCode.ERROR
        assert str((span.attributes or {})["error.type"]) in ("SystemExit", "RemoteCallFailed")


def test_a_provider_that_fails_leaves_nothing_enabled(make_agents: MakeAgents) -> None:
    class Broken(TracerProvider):
        def get_tracer(self, *_: Any, **__: Any) -> Any:
            raise ValueError("no tracer")

    (a,) = make_agents(1)
    set_current_agent(a)
    try:
        with pytest.raises(ValueError, match="no tracer"):
            telemetry.enable_opentelemetry(Broken(shutdown_on_exit=False))
    finally:
        set_current_agent(None)
    assert events.sink is None
    make_agents(1)


def test_events_are_taken_before_the_first_span_begins(make_agents: MakeAgents) -> None:
    (a,) = make_agents(1)
    set_current_agent(a)
    seen: list[bool] = []

    class Provider(TracerProvider):
        def get_tracer(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(events.sink is not None)
            return super().get_tracer(*args, **kwargs)

    try:
        telemetry.enable_opentelemetry(Provider(shutdown_on_exit=False))
    finally:
        set_current_agent(None)
        telemetry.disable_opentelemetry()
    assert seen == [True]
    assert not [tell for tell in a.before_close if "end_open" in repr(tell)], "switched off, it leaves no callback"


_PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize(
    "note",
    [
        None,
        "00-x",
        [],
        [f"{_PARENT}\n", ""],
        [_PARENT.upper(), ""],
        [_PARENT, "x" * 513],
        [_PARENT, "\x1b[2J"],
        [_PARENT, "", 1],
    ],
)
def test_notes_of_peers_are_checked(note: Any) -> None:
    with pytest.raises(DecodeError):
        read_note(msgspec.Raw(msgspec.msgpack.encode(note)), TraceNote)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'gradwire\[otel\]'"):
        telemetry.enable_opentelemetry()
