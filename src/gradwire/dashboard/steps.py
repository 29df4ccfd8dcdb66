"""The steps that the page shows: contexts with their graph and their spans. No threads, no sockets, no clocks.

A training loop makes many contexts in a second. The page has the graph of about one of them each second, taken just before
it was released, and of every context that stays open for long: these may be stalled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from gradwire.autograd.distributed_graph import DistributedGraph, assemble
from gradwire.autograd.worker_views import PassView, WorkerView, find_settlers
from gradwire.observe.events import Event

_MOST_STEPS = 30
_MOST_MESSAGES = 200  # in a graph on the page
_MOST_CONTEXTS = 300  # whose spans are kept, because a graph may come for them
_MOST_SPANS = 600  # of one context
_ORDER = ("waits", "passes on", "computes")
OUTSIDE = 0
"""Stands for all that does not belong to a context."""


class StepRecord:
    """One context on the page."""

    def __init__(self, context_id: int, maker: str, seen_at: float) -> None:
        self.context_id = context_id
        self.maker = maker
        self.seen_at = seen_at  # seconds of the epoch
        self.updated_at = seen_at
        self.is_open = True
        self.graph: DistributedGraph | None = None
        self.waits: list[dict[str, Any]] = []
        self.spans: list[Event] = []

    @property
    def is_stalled(self) -> bool:
        """Whether a pass of it has waited for gradients for so long that the page has noticed."""
        return self.is_open and bool(self.waits)

    def duration_s(self) -> float | None:
        if not self.spans:
            return None
        return (max(item.end_ns for item in self.spans) - min(item.start_ns for item in self.spans)) / 1e9

    def summary(self) -> dict[str, Any]:
        """Return its line in the list of steps."""
        return {
            "id": str(self.context_id),  # JavaScript's numbers have 53 bits
            "maker": self.maker,
            "seen_at": self.seen_at,
            "updated_at": self.updated_at,
            "is_open": self.is_open,
            "is_stalled": self.is_stalled,
            "num_messages": 0 if self.graph is None else self.graph.num_messages,
            "duration_s": self.duration_s(),
        }

    def as_data(self) -> dict[str, Any]:
        """Return all of it, for the page."""
        graph = None if self.graph is None else self.graph.first(_MOST_MESSAGES)
        return {
            **self.summary(),
            "graph": None if graph is None else _graph_data(graph),
            "waits": self.waits,
            "spans": _relative(self.spans),
        }


def _graph_data(graph: DistributedGraph) -> dict[str, Any]:
    data: dict[str, Any] = msgspec.to_builtins(graph)
    messages = [{**item, "message_id": str(item["message_id"])} for item in data["messages"]]
    return {**data, "context_id": str(graph.context_id), "messages": messages, "notes": graph.notes}


class Steps:
    """The latest steps, and the spans of contexts that may become steps."""

    def __init__(self) -> None:
        self._records: OrderedDict[int, StepRecord] = OrderedDict()
        self._spans: OrderedDict[int, list[Event]] = OrderedDict()

    def on_step(
        self, context_id: int, maker: str, views: Sequence[WorkerView], now: float, clocks: Mapping[str, int]
    ) -> None:
        """Take the graph of a context that was released."""
        record = self._record(context_id, maker, now)
        record.is_open = False
        self._fill(record, views, now, clocks)
        record.waits = []

    def on_open(
        self, context_id: int, maker: str, views: Sequence[WorkerView], now: float, clocks: Mapping[str, int]
    ) -> None:
        """Take the graph of a context that stays open."""
        self._fill(self._record(context_id, maker, now), views, now, clocks)

    def on_contexts(self, open_ids: Iterable[int]) -> None:
        """Note which contexts are open; all others have ended."""
        known = set(open_ids)
        for record in self._records.values():
            if record.context_id not in known:
                record.is_open, record.waits = False, []

    def on_events(self, events: Iterable[Event], offset_ns: int) -> None:
        """Take events of a worker whose clock is behind the driver's by `offset_ns`."""
        for span in events:
            kept = self._spans.get(span.context_id)
            if kept is None:
                kept = self._spans[span.context_id] = []
                record = self._records.get(span.context_id)
                if record is not None:
                    record.spans = kept
                while len(self._spans) > _MOST_CONTEXTS:
                    self._spans.popitem(last=False)
            elif len(kept) >= _MOST_SPANS:
                if span.context_id != OUTSIDE:
                    continue
                del kept[: _MOST_SPANS // 2]
            start_ns, end_ns = span.start_ns + offset_ns, span.end_ns + offset_ns
            kept.append(msgspec.structs.replace(span, start_ns=start_ns, end_ns=max(start_ns, end_ns)))

    def summaries(self) -> list[dict[str, Any]]:
        """Return the list of steps, the latest first."""
        return [record.summary() for record in self._in_order()]

    def choose(self, context_id: int | None) -> dict[str, Any] | None:
        """Return one step; without an id the one to look at first: one that is stalled, or else the latest."""
        latest = next(iter(self._in_order()), None) if context_id is None else self._records.get(context_id)
        if latest is not None:
            return latest.as_data()
        outside = self._spans.get(OUTSIDE)
        if context_id is None and outside:
            return {"id": None, "graph": None, "waits": [], "spans": _relative(outside)}
        return None

    def _in_order(self) -> list[StepRecord]:
        return sorted(self._records.values(), key=lambda item: (item.is_stalled, item.updated_at), reverse=True)

    def _record(self, context_id: int, maker: str, now: float) -> StepRecord:
        record = self._records.get(context_id)
        if record is None:
            record = self._records[context_id] = StepRecord(context_id, maker, now)
            record.spans = self._spans.get(context_id, record.spans)
            while len(self._records) > _MOST_STEPS:
                self._records.popitem(last=False)
        return record

    def _fill(self, record: StepRecord, views: Sequence[WorkerView], now: float, clocks: Mapping[str, int]) -> None:
        record.graph = assemble(record.context_id, views, clocks)
        record.waits = find_waits(views)
        record.updated_at = now


def find_waits(views: Sequence[WorkerView]) -> list[dict[str, Any]]:
    """Return who waits for whom in the running passes of a context, as `explain` tells it."""
    settlers = find_settlers(views)
    found = [item for view in views for current in view.passes for item in _waits_of(view.worker, current, settlers)]
    return sorted(found, key=lambda item: _ORDER.index(item["kind"]))


def _waits_of(worker: str, current: PassView, settlers: Mapping[int, str]) -> Iterable[dict[str, Any]]:
    if current.num_running:
        yield {"worker": worker, "kind": "computes", "for": "", "function": "", "site": "", "via": ""}
    for send in current.waiting:
        settler = settlers[send.message_id]
        yield {
            "worker": worker,
            "kind": "waits",
            "for": settler,
            "function": send.function,
            "site": send.site,
            "via": send.peer if settler != send.peer else "",
        }
    for offer in current.offered:
        if settlers.get(offer.message_id) == worker:  # the shortcut was not taken
            yield {"worker": worker, "kind": "passes on", "for": offer.peer, "function": "", "site": "", "via": ""}


def _relative(spans: Sequence[Event]) -> list[dict[str, Any]]:
    """Return spans with times in milliseconds since the first one."""
    first_ns = min((item.start_ns for item in spans), default=0)
    return [
        {
            "worker": item.worker,
            "kind": item.kind,
            "name": item.name,
            "start_ms": (item.start_ns - first_ns) / 1e6,
            "end_ms": (item.end_ns - first_ns) / 1e6,
            "thread": item.thread,
            "peer": item.peer,
            "num_bytes": item.num_bytes,
            "outcome": item.outcome,
            "flow_out": [f"{flow:x}" for flow in item.flow_out],
            "flow_in": [f"{flow:x}" for flow in item.flow_in],
        }
        for item in sorted(spans, key=lambda item: (item.start_ns, -item.end_ns))
    ]
