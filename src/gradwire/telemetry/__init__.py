"""Metrics for Prometheus and spans for OpenTelemetry, from the events of `gradwire.observe`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.telemetry.metrics_server import MetricsServer, serve_metrics
    from gradwire.telemetry.spans import disable_opentelemetry, enable_opentelemetry

__all__ = ["MetricsServer", "disable_opentelemetry", "enable_opentelemetry", "serve_metrics"]

# Imported on first use: prometheus_client and opentelemetry are optional.
_HOMES = {
    "MetricsServer": "metrics_server",
    "disable_opentelemetry": "spans",
    "enable_opentelemetry": "spans",
    "serve_metrics": "metrics_server",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gradwire.telemetry.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gradwire.telemetry' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
