"""The operators of torch that a worker runs, as events: `torch.profiler` in all threads of its process."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch.profiler

from gradwire._torch import is_profiler_enabled, profile_all_threads
from gradwire.errors import ConfigurationError
from gradwire.observe.events import Event
from gradwire.observe.timeline import OPERATOR

_MAX_FILE_BYTES = 2 << 30
_QUIET = "99"  # the profiler writes lines about itself to stderr otherwise


class _Entry(msgspec.Struct):
    ph: str = ""
    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


class _File(msgspec.Struct):
    traceEvents: list[_Entry]  # the name in the file
    baseTimeNanoseconds: int = 0


class OperatorProfile:
    """Records the operators of this process.

    Raises:
        ConfigurationError: A profiler is active in this process already.
    """

    def __init__(self) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", _QUIET)
        profiler: Any = torch.profiler
        self._profile = profiler.profile(
            activities=profiler.supported_activities(), experimental_config=profile_all_threads()
        )
        self._is_on = False

    def start(self) -> None:
        """Begin to record."""
        if is_profiler_enabled():  # it would lose what it has recorded
            raise ConfigurationError(
                "torch.profiler is active in this process, and a second one cannot record; end it, or omit profile=True"
            )
        try:
            self._profile.start()
        except RuntimeError as error:
            raise ConfigurationError(
                f"torch.profiler cannot be started in this process; it may be active already: {error}"
            ) from error
        self._is_on = True

    def close(self) -> None:
        """Stop recording, and forget what was recorded. Idempotent."""
        if self._is_on:
            self._is_on = False
            self._profile.stop()

    def stop(self, worker: str, max_events: int) -> tuple[list[Event], int]:
        """Stop recording; return the last operators as events of that worker, and the number of those left out.

        Raises:
            ConfigurationError: There are too many to read.
        """
        self.close()
        folder = tempfile.mkdtemp(prefix="gradwire-profile-")
        try:
            path = Path(folder, "profile.json")
            self._profile.export_chrome_trace(str(path))
            num_bytes = path.stat().st_size
            if num_bytes > _MAX_FILE_BYTES:
                raise ConfigurationError(
                    f"all operators of torch are missing: their profile has {num_bytes:,} bytes, and at most "
                    f"{_MAX_FILE_BYTES:,} can be read; record a shorter time"
                )
            found = msgspec.json.decode(path.read_bytes(), type=_File)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        to_monotonic_ns = found.baseTimeNanoseconds + time.monotonic_ns() - time.time_ns()
        events = [
            _event_of(entry, worker, to_monotonic_ns)
            for entry in found.traceEvents
            if entry.ph == "X" and isinstance(entry.tid, int) and entry.cat != "Trace"
        ]
        events.sort(key=lambda event: event.end_ns)
        return events[-max_events:], max(0, len(events) - max_events)


def _event_of(entry: _Entry, worker: str, to_monotonic_ns: int) -> Event:
    start_ns = round(entry.ts * 1000) + to_monotonic_ns
    details: dict[str, Any] | None = None if entry.cat == "cpu_op" else {"category": entry.cat}
    thread = entry.tid if isinstance(entry.tid, int) else 0
    return Event(
        OPERATOR, entry.name, worker, start_ns, start_ns + round(entry.dur * 1000), max(0, thread), details=details
    )
