"""The dashboard of a cluster, and what workers tell it.

Nothing here is imported before a page is opened, `worker_report` aside, which every worker of a cluster serves.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.dashboard.web_server import Dashboard

__all__ = ["Dashboard"]


def __getattr__(name: str) -> Any:
    if name == "Dashboard":
        return importlib.import_module("gradwire.dashboard.web_server").Dashboard
    raise AttributeError(f"module 'gradwire.dashboard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
