"""Output of workers in the driver: whole lines, prefixed with the worker's name."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections import deque
from collections.abc import Iterable
from typing import Literal

Stream = Literal["stdout", "stderr"]

_MAX_LINE_BYTES = 1 << 16
_KEPT_LINES = 200
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # cyan first; red is left to errors
_CURSOR_UP = b"\x1b[A"
_CURSOR_MOVES = re.compile(r"\x1b\[[0-9;?]*[@-ln-~]")  # all control sequences but those for colours, which end in "m"
_FIRST_REFRESH_S = 1.0
_LONGEST_REFRESH_S = 10.0


class LineBuffer:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._rest = b""
        self.progress = ""  # the state of a line that rewrites itself and has not ended; empty if there is none

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that this data completes, without their ends.

        A line longer than 64 KiB comes in pieces, so that a worker which never ends a line costs no memory.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        whole = []
        for line in lines:
            if line.rstrip(b"\r").endswith(_CURSOR_UP):  # one of several bars below each other: it will be rewritten
                self.progress = _as_shown(line)
            else:
                self.progress = ""
                whole.append(line)
        if b"\r" in self._rest:
            _, begin, state = self._rest.rstrip(b"\r").rpartition(b"\r")  # what was there before is gone for good
            self._rest = begin + state + (b"\r" if self._rest.endswith(b"\r") else b"")
            self.progress = _as_shown(state).rstrip()
        while len(self._rest) > _MAX_LINE_BYTES:
            whole.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        return [_as_shown(line) for line in whole]

    def finish(self) -> list[str]:
        """Return the last line, which has no line end."""
        rest, self._rest, self.progress = self._rest, b"", ""
        shown = _as_shown(rest)
        return [shown] if (shown.strip() if b"\r" in rest else shown) else []  # a bar may have been wiped out


def _as_shown(line: bytes) -> str:
    """Return a line as a terminal would leave it: of a progress bar that rewrites itself, the last state."""
    return _CURSOR_MOVES.sub("", line.decode(errors="replace").rstrip("\r").rpartition("\r")[2])


class _Progress:
    """Decides when the state of a stream's progress bar is shown."""

    def __init__(self) -> None:
        self.shown = ""
        self.due_at: float | None = None
        self._interval_s = _FIRST_REFRESH_S

    def on_state(self, state: str, now: float) -> None:
        """Note the state of the bar, which is empty if there is none."""
        if state in ("", self.shown):
            self.due_at = None
        elif self.due_at is None:
            self.due_at = now + self._interval_s

    def on_shown(self, state: str) -> None:
        self.shown, self.due_at = state, None
        self._interval_s = min(2 * self._interval_s, _LONGEST_REFRESH_S)


class WorkerOutput:
    """The two streams of one worker. Used by one thread alone, but for `kept`."""

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._colour = _COLOURS[rank % len(_COLOURS)]
        self._buffers: dict[Stream, LineBuffer] = {"stdout": LineBuffer(), "stderr": LineBuffer()}
        self._progress: dict[Stream, _Progress] = {"stdout": _Progress(), "stderr": _Progress()}
        self._kept: deque[tuple[Stream, str]] | None = deque(maxlen=_KEPT_LINES)

    def feed(self, stream: Stream, data: bytes, now: float) -> None:
        """Handle output received from the worker; empty data means the end of its stream."""
        buffer, progress = self._buffers[stream], self._progress[stream]
        lines = buffer.feed(data) if data else buffer.finish()
        if self._kept is not None:
            self._kept.extend((stream, line) for line in lines)
            return
        if lines:
            self._write(stream, lines[1:] if lines[0].rstrip() == progress.shown != "" else lines)
            self._progress[stream] = progress = _Progress()
        progress.on_state(buffer.progress, now)

    @property
    def refresh_at(self) -> float | None:
        """When to call `refresh`; None if there is nothing to show."""
        return min((item.due_at for item in self._progress.values() if item.due_at is not None), default=None)

    def refresh(self, now: float) -> None:
        """Write the states of progress bars for which it is time."""
        for stream, progress in self._progress.items():
            if progress.due_at is not None and progress.due_at <= now:
                progress.on_shown(self._buffers[stream].progress)
                self._write(stream, [progress.shown])

    def release(self) -> None:
        """Write the output held so far, and from now on every line as it arrives."""
        kept, self._kept = self._kept or (), None
        for stream, line in kept:
            self._write(stream, [line])

    def kept(self) -> str:
        """Return the output so far of a worker that did not become ready."""
        return "\n".join(line for _, line in self._kept or ())

    def _write(self, stream: Stream, lines: Iterable[str]) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr  # looked up each time: programs redirect them
        if target is None:
            return
        # The program may have closed its output, or its reader may have exited; neither stops the caller.
        with contextlib.suppress(OSError, ValueError):
            prefix = self._prefix(target.isatty())
            text = "".join(f"{prefix}{line}\n" for line in lines)
            if text:
                target.write(text)
                target.flush()

    def _prefix(self, is_terminal: bool) -> str:
        if is_terminal and not os.environ.get("NO_COLOR"):
            return f"\x1b[{self._colour}m[{self._name}]\x1b[0m "
        return f"[{self._name}] "
