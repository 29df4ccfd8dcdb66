"""Named points in the course of a save, where a test can let the process stop or die.

driver    locked  announced  described                     files-written  index-written  index-renamed  cleaned
owner                                   opened  half  synced
"""

from __future__ import annotations

from collections.abc import Callable

hook: Callable[[str], None] | None = None
"""Called with the name of every point that is passed, if set. For tests."""


def passed(point: str) -> None:
    """The save has come that far."""
    if hook is not None:
        hook(point)
