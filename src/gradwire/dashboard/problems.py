"""The errors that the page lists: each kind once, with how often it was seen. No threads, no clocks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from gradwire.observe.events import Event

_MOST = 100
_MOST_CHARS = 2_000


def describe_failure(event: Event) -> str:
    """Return what the page shows after the kind of an event."""
    if event.kind == "connection":
        return f"to {event.peer} lost" + (f": {event.outcome}" if event.outcome != "ConnectionLost" else "")
    peer = f" {'on' if event.kind == 'call' else 'for'} {event.peer}" if event.peer else ""
    return f"{event.name}{peer} failed: {event.outcome}"


class Problems:
    """What went wrong, the latest last."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[str, str, str], dict[str, Any]] = OrderedDict()

    def add(self, worker: str, kind: str, text: str, now: float, level: str = "error") -> None:
        """Note a problem; the same one again only counts."""
        key = (worker, kind, text[:_MOST_CHARS])
        item = self._items.pop(key, None)
        if item is None:
            item = {"worker": worker, "kind": kind, "text": key[2], "level": level, "count": 0, "first_at": now}
        self._items[key] = {**item, "count": item["count"] + 1, "last_at": now}
        while len(self._items) > _MOST:
            self._items.popitem(last=False)

    def as_data(self) -> list[dict[str, Any]]:
        """Return all of them, the latest first."""
        return list(reversed(self._items.values()))
