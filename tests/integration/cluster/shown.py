"""What a driver shows, read while it is still coming.

pytest's ``capfd`` and ``capsys`` empty a file when they are read, and lose what another thread writes at that moment. They
are right for output that has come to its end; `Shown` is for output that a test waits for.
"""

from __future__ import annotations

import contextlib
import io


class Shown(contextlib.ExitStack):
    """Takes what this process writes to ``sys.stdout`` and ``sys.stderr`` while the block runs; reading leaves it there."""

    def __enter__(self) -> Shown:
        super().__enter__()
        self._out = self.enter_context(contextlib.redirect_stdout(io.StringIO()))
        self._err = self.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return self

    @property
    def out(self) -> str:
        return self._out.getvalue()

    @property
    def err(self) -> str:
        return self._err.getvalue()
