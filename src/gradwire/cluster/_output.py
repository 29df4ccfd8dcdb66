"""What workers print, in the driver's own output: whole lines, each with the worker's name in front.

`LineBuffer` cuts a stream of bytes into lines and does nothing else. `WorkerOutput` adds the name and writes. Until a
worker is ready its lines are kept back: either it gets ready and they are written, or they become part of the error
that says why it did not.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from collections.abc import Iterable
from typing import Literal

Stream = Literal["stdout", "stderr"]

_MAX_LINE_BYTES = 1 << 16
_KEPT_LINES = 200
_COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)  # cyan first; red is left to errors


class LineBuffer:
    """Bytes in, whole lines out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that this data completes, without their ends.

        A line longer than 64 KiB comes in pieces, so that a worker which never ends a line costs no memory.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > _MAX_LINE_BYTES:
            lines.append(self._rest[:_MAX_LINE_BYTES])
            self._rest = self._rest[_MAX_LINE_BYTES:]
        return [_as_shown(line) for line in lines]

    def finish(self) -> list[str]:
        """Returns what has no line end and never will."""
        rest, self._rest = self._rest, b""
        return [_as_shown(rest)] if rest else []


def _as_shown(line: bytes) -> str:
    """A line as a terminal would leave it: a progress bar that rewrites itself is its last state."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class WorkerOutput:
    """The two streams of one worker. Used by the supervisor's thread alone, but for `kept`."""

    def __init__(self, name: str, rank: int) -> None:
        self._name = name
        self._colour = _COLOURS[rank % len(_COLOURS)]
        self._buffers: dict[Stream, LineBuffer] = {"stdout": LineBuffer(), "stderr": LineBuffer()}
        self._kept: deque[tuple[Stream, str]] | None = deque(maxlen=_KEPT_LINES)

    def feed(self, stream: Stream, data: bytes) -> None:
        """Takes what arrived from the worker; empty data means that its stream has ended."""
        buffer = self._buffers[stream]
        lines = buffer.feed(data) if data else buffer.finish()
        if self._kept is None:
            self._write(stream, lines)
        else:
            self._kept.extend((stream, line) for line in lines)

    def release(self) -> None:
        """Writes what was kept back, and from now on every line as it comes."""
        kept, self._kept = self._kept or (), None
        for stream, line in kept:
            self._write(stream, [line])

    def kept(self) -> str:
        """What was printed so far by a worker that did not get ready."""
        return "\n".join(line for _, line in self._kept or ())

    def _write(self, stream: Stream, lines: Iterable[str]) -> None:
        target = sys.stdout if stream == "stdout" else sys.stderr  # looked up each time: people redirect them
        if target is None:
            return
        # The program may have closed its output, or its reader may be gone: no reason to stop supervising.
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
