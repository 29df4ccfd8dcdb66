"""A suite that shows what the runner does with tests that fail, hang, crash and are skipped."""

from __future__ import annotations

import os
import signal
import threading
import unittest


class FakeTest:
    """Three ranks; each test goes wrong in a way of its own."""

    rank: int
    world_size = 3

    def test_passes(self) -> None:
        """All ranks are well."""
        assert self.rank < self.world_size

    def test_fails(self) -> None:
        """Rank 1 is not."""
        assert self.rank != 1, "on purpose"

    def test_hangs(self) -> None:
        """Rank 2 waits for something that does not come; the time limit ends it."""
        if self.rank == 2:
            threading.Event().wait()

    test_hangs.limit_s = 8.0  # type: ignore[attr-defined]  # the others have the time that the runner gives

    def test_crashes(self) -> None:
        """Rank 0 is gone before it can say anything."""
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGSEGV)

    def test_is_skipped(self) -> None:
        """Does not fit."""
        raise unittest.SkipTest("not here")

    def test_with_script_in_its_name(self) -> None:
        """Is left out."""
        raise AssertionError("should not run")
