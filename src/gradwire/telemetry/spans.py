"""Spans of OpenTelemetry: one for each call at its caller and at its callee, and one for each backward pass on each worker.

    caller   CLIENT span ---- traceparent in the call's notes ----> callee   SERVER span, its child
    backward on each worker: INTERNAL span, linked to the spans of the calls of its context

Only the API of OpenTelemetry is used: the program brings SDK and exporter. Nothing is done until `enable_opentelemetry`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import torch

from gradwire._interrupts import interruptible
from gradwire.autograd.current_context import current_context_id
from gradwire.errors import ConfigurationError, NotInitialized
from gradwire.observe.events import Event, subscribe
from gradwire.observe.log import get_logger
from gradwire.rpc.agent import Agent, attachments
from gradwire.rpc.api import current_agent
from gradwire.rpc.call_events import context_id_in
from gradwire.rpc.connection import current_request
from gradwire.rpc.functions import Later
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.versions import GRADWIRE_VERSION

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, TracerProvider

_log = get_logger(__name__)

NOTE: Final = "opentelemetry"

_MOST_OPEN: Final = 65_536
_MOST_CONTEXTS: Final = 1_024
_MOST_LINKS: Final = 64


class TraceNote(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes with every call that has a span: the headers of W3C Trace Context."""

    traceparent: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")]
    tracestate: Annotated[str, msgspec.Meta(max_length=512, pattern=r"\A[\x20-\x7e]*\Z")] = ""


class _Guard:
    """Keeps errors of the program's samplers and span processors away from its calls. The first one is logged."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._has_logged = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._has_logged:
            self._has_logged = True
            text = "%s: OpenTelemetry failed; spans may be missing, and further errors are not logged"
            _log.error(text, self._worker, exc_info=error)
        return True


class SpanInterceptor(Interceptor):
    """Makes the spans of one worker's calls and backward passes."""

    name = NOTE
    note_type = TraceNote

    def __init__(self, agent: Agent, tracer_provider: TracerProvider | None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._tracer = trace.get_tracer("gradwire", GRADWIRE_VERSION, tracer_provider)
        self._propagator = TraceContextTextMapPropagator()
        self.agent = agent
        self._guard = _Guard(agent.info.name)
        self._lock = threading.Lock()  # guards the next two
        self._open: OrderedDict[int, Span] = OrderedDict()  # of calls under way, by their ids
        self._by_context: OrderedDict[int, list[SpanContext]] = OrderedDict()  # spans of calls in autograd contexts

    def outgoing(self, envelope: Envelope, tensors: Sequence[torch.Tensor]) -> TraceNote | None:
        """Begin the span of a call that leaves; replies have none."""
        if envelope.kind == "reply":
            return None
        with self._guard:
            return self._begin_call(envelope)
        return None

    def _begin_call(self, envelope: Envelope) -> TraceNote | None:
        kind = self._trace.SpanKind.CLIENT
        span = self._tracer.start_span(envelope.function, kind=kind, attributes=self._attributes(envelope.function))
        evicted = None
        with self._lock:
            self._open[envelope.call_id] = span
            if len(self._open) > _MOST_OPEN:
                _, evicted = self._open.popitem(last=False)
        if evicted is not None:
            self._end(evicted)
        span.set_attribute("server.address", envelope.peer.name)
        self._remember(current_context_id(), span)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        if "traceparent" not in carrier:  # no SDK is configured
            return None
        state = carrier.get("tracestate", "")
        return TraceNote(carrier["traceparent"], state if len(state) <= 512 else "")

    def around(self, envelope: Envelope, note: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """Run a called function inside a span, a child of the caller's."""
        message: TraceNote = note

        def run(*args: Any, **kwargs: Any) -> Any:
            span: Span | None = None
            with self._guard:
                span = self._begin_run(envelope, message)
            if span is None:
                return _call(function, args, kwargs)
            error: BaseException | None = None
            later: torch.futures.Future[Any] | None = None
            try:
                with self._trace.use_span(span, record_exception=False, set_status_on_exception=False):
                    value = _call(function, args, kwargs)
                found = value.future if type(value) is Later else value
                later = found if isinstance(found, torch.futures.Future) else None
                return value
            except BaseException as raised:  # of the user's function
                error = raised
                raise
            finally:
                if later is None:
                    self._end(span, error)
                else:
                    later.add_done_callback(lambda done: self._end(span, _error_of(done)))
                error = later = None  # the frame of an error would hold itself

        return run

    def _begin_run(self, envelope: Envelope, message: TraceNote) -> Span:
        carrier = {"traceparent": message.traceparent, "tracestate": message.tracestate}
        span = self._tracer.start_span(
            envelope.function,
            self._propagator.extract(carrier),
            self._trace.SpanKind.SERVER,
            {**self._attributes(envelope.function), "client.address": envelope.peer.name},
        )
        request = current_request()
        self._remember(0 if request is None else context_id_in(request.notes), span)
        return span

    def on_event(self, event: Event) -> None:
        """End the span of a call, or make the span of a backward pass."""
        if event.worker != self.agent.info.name:
            return
        if event.kind == "call":
            with self._lock:
                span = self._open.pop((event.details or {}).get("call_id", 0), None)
            if span is not None:
                with self._guard:
                    if event.outcome != "ok":
                        self._fail(span, event.outcome)
                self._end(span)
        elif event.kind == "backward":
            with self._guard:
                self._tell_backward(event)

    def _tell_backward(self, event: Event) -> None:
        from opentelemetry.context import Context

        details = event.details or {}
        offset_ns = time.time_ns() - time.monotonic_ns()
        with self._lock:
            linked = list(self._by_context.get(event.context_id, ()))
        is_root = details.get("role") == "root"
        span = self._tracer.start_span(
            "backward",
            # The thread of the root is in a span of the program; a thread of a participant may be in an unrelated one.
            None if is_root else Context(),
            self._trace.SpanKind.INTERNAL,
            {
                "gradwire.worker": event.worker,
                "gradwire.context_id": str(event.context_id),
                "gradwire.backward.mode": str(details.get("mode", "")),
                "gradwire.backward.role": "root" if is_root else "participant",
            },
            [self._trace.Link(item) for item in linked],
            event.start_ns + offset_ns,
        )
        if event.outcome != "ok":
            self._fail(span, event.outcome)
        span.end(event.end_ns + offset_ns)

    def end_open(self) -> None:
        """End the spans of calls that are still under way."""
        with self._lock:
            spans = list(self._open.values())
            self._open.clear()
        for span in spans:
            self._end(span)

    def _attributes(self, function: str) -> dict[str, str]:
        return {"rpc.system.name": "gradwire", "rpc.method": function, "gradwire.worker": self.agent.info.name}

    def _remember(self, context_id: int, span: Span) -> None:
        found = span.get_span_context()
        if not context_id or not found.is_valid:
            return
        with self._lock:
            spans = self._by_context.setdefault(context_id, [])
            self._by_context.move_to_end(context_id)
            if len(spans) < _MOST_LINKS:
                spans.append(found)
            if len(self._by_context) > _MOST_CONTEXTS:
                self._by_context.popitem(last=False)

    def _end(self, span: Span, error: BaseException | None = None) -> None:
        with self._guard:
            if error is not None:
                span.record_exception(error)
                self._fail(span, type(error).__name__, str(error))
        with self._guard:
            span.end()

    def _fail(self, span: Span, kind: str, text: str = "") -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, text or kind))


@interruptible  # a function of the user
def _call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def _error_of(done: torch.futures.Future[Any]) -> Exception | None:
    try:
        done.value()
    except Exception as error:
        return error
    return None


class _Switch:
    """Attaches interceptors to the workers of this process while spans are enabled."""

    def __init__(self, tracer_provider: TracerProvider | None) -> None:
        self._tracer_provider = tracer_provider
        self._lock = threading.Lock()  # guards changes of the next two
        self._interceptors: tuple[SpanInterceptor, ...] = ()
        self._is_closed = False
        # Before the first span begins: events end it.
        self._unsubscribe = subscribe(self._on_event)
        attachments.append(self._attach)
        try:
            with contextlib.suppress(NotInitialized):
                self._attach(current_agent())
        except Exception:  # of the tracer provider
            self.close()
            raise

    def _attach(self, agent: Agent) -> None:
        interceptor = SpanInterceptor(agent, self._tracer_provider)
        with self._lock:
            kept = tuple(item for item in self._interceptors if not item.agent.is_closed)
            if self._is_closed or any(item.agent is agent for item in kept):
                return
            self._interceptors = (*kept, interceptor)
            agent.before_close.append(interceptor.end_open)
            agent.interceptors.append(interceptor)  # behind all others: its span is around what they do

    def _on_event(self, event: Event) -> None:
        for interceptor in self._interceptors:
            interceptor.on_event(event)

    def close(self) -> None:
        attachments.remove(self._attach)
        self._unsubscribe()
        with self._lock:
            self._is_closed = True
            interceptors, self._interceptors = self._interceptors, ()
        for interceptor in interceptors:
            interceptor.agent.interceptors.remove(interceptor)
            interceptor.agent.before_close.remove(interceptor.end_open)
            interceptor.end_open()


_lock = threading.Lock()  # guards _switch
_switch: _Switch | None = None


def enable_opentelemetry(tracer_provider: TracerProvider | None = None) -> None:
    """Make spans for the calls and backward passes of the workers in this process, those that exist and later ones.

    A call has a CLIENT span at its caller and a SERVER span at its callee, in one trace, if this is called in both
    processes; workers of a cluster do it in a module of their ``imports``. A backward pass has a span on each worker that
    takes part, with links to the spans of the calls of its context. Calling it again changes nothing.

    Args:
        tracer_provider: Makes the tracers; the global provider of OpenTelemetry if not given.

    Raises:
        ConfigurationError: opentelemetry-api is not installed.
    """
    global _switch
    try:
        import opentelemetry.trace  # noqa: F401
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("opentelemetry"):
            raise
        raise ConfigurationError(
            "spans need opentelemetry-api, which is not installed: pip install 'gradwire[otel]'"
        ) from error
    with _lock:
        if _switch is None:
            _switch = _Switch(tracer_provider)


def disable_opentelemetry() -> None:
    """Undo `enable_opentelemetry`; spans of calls that are under way end now."""
    global _switch
    with _lock:
        switch, _switch = _switch, None
    if switch is not None:
        switch.close()
