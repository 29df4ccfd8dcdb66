"""Runs tests of several ranks, each a fork of this process, which has imported everything once.

The parent must have no threads and no gradwire worker: both do not survive a fork. It waits for its children by their
process descriptors, so a rank that hangs, crashes or leaves children behind costs the time limit and nothing else.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from conformance.suites import Case, make_rank, num_ranks

_SKIP_CODES = range(72, 91)
"""What torch's decorators exit with where a test does not fit the machine."""

_LOG_LINES = 60
_DUMP_BEFORE_S = 1.5
"""So long before the end of its time a rank writes down where its threads are."""


class Outcome(enum.Enum):
    """How a test ended."""

    PASSED = "passed"
    SKIPPED = "skipped"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class Result:
    """One test, run."""

    case: str
    outcome: Outcome
    seconds: float
    detail: str = ""

    @property
    def suite(self) -> str:
        """The class it belongs to."""
        return self.case.partition(".")[0]

    @property
    def is_good(self) -> bool:
        """Whether nothing went wrong."""
        return self.outcome in (Outcome.PASSED, Outcome.SKIPPED)


class Trial:
    """A test under way.

    Args:
        case: The test.
        limit_s: Seconds after which its ranks are killed.
    """

    def __init__(self, case: Case, limit_s: float) -> None:
        self._case = case
        self._path = Path(tempfile.mkdtemp(prefix="gwc-", dir="/tmp"))
        self._began = time.monotonic()
        self.deadline = self._began + limit_s
        self._pids = [self._fork(rank, limit_s) for rank in range(num_ranks(case))]
        self.waiting = {os.pidfd_open(pid): rank for rank, pid in enumerate(self._pids)}  # those that still run
        self._codes: dict[int, int] = {}

    def _fork(self, rank: int, limit_s: float) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _be_rank(self._case, rank, self._path, limit_s)
        return pid

    def on_ended(self, descriptor: int) -> None:
        """A rank's process is over."""
        rank = self.waiting.pop(descriptor)
        os.close(descriptor)
        self._codes[rank] = os.waitstatus_to_exitcode(os.waitpid(self._pids[rank], 0)[1])

    def finish(self) -> Result:
        """Ends what still runs and says how the test went."""
        late = sorted(self.waiting.values())
        for descriptor, rank in list(self.waiting.items()):
            os.kill(self._pids[rank], signal.SIGKILL)
            self.on_ended(descriptor)
        for pid in self._pids:  # what the ranks may have started; each led a group of its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        try:
            outcome, detail = self._judge(late)
        finally:
            shutil.rmtree(self._path, ignore_errors=True)
        return Result(self._case.name, outcome, time.monotonic() - self._began, detail)

    def _judge(self, late: list[int]) -> tuple[Outcome, str]:
        reports = {rank: self._report_of(rank) for rank in range(len(self._pids))}
        failed = {rank: text for rank, (outcome, text) in reports.items() if outcome is Outcome.FAILED}
        if late:
            where = "\n".join(f"-- rank {rank} did not end:\n{self._log_of(rank)}" for rank in late)
            return Outcome.TIMED_OUT, "\n".join([_by_rank(failed), where]).strip()
        if failed:
            return Outcome.FAILED, _by_rank(failed)
        if any(outcome is Outcome.SKIPPED for outcome, _ in reports.values()):
            return Outcome.SKIPPED, next(text for _, text in reports.values() if text)
        return Outcome.PASSED, ""

    def _report_of(self, rank: int) -> tuple[Outcome, str]:
        if rank not in self._codes:
            return Outcome.TIMED_OUT, ""
        path = self._path / f"{rank}.json"
        if not path.exists():
            ending = f"the process ended with code {self._codes[rank]} before the test did\n{self._log_of(rank)}"
            return (Outcome.PASSED, "") if self._codes[rank] == -signal.SIGKILL else (Outcome.FAILED, ending)
        outcome, text = json.loads(path.read_text())
        return Outcome(outcome), f"{text}\n{self._log_of(rank)}".strip() if outcome == "failed" else text

    def _log_of(self, rank: int) -> str:
        lines = (self._path / f"{rank}.log").read_text(errors="replace").splitlines()
        return "\n".join(f"   | {line}" for line in lines[-_LOG_LINES:])


def _by_rank(texts: dict[int, str]) -> str:
    """The texts, each once, with the ranks that it is from."""
    ranks: dict[str, list[str]] = {}
    for rank, text in sorted(texts.items()):
        ranks.setdefault(text, []).append(str(rank))
    return "\n".join(f"-- rank {', '.join(found)}:\n{text}" for text, found in ranks.items())


def run_cases(cases: Iterable[Case], limit_s: float, num_jobs: int = 1) -> Iterator[Result]:
    """Runs tests, `num_jobs` at a time; yields each result as it is there. A test may have a limit of its own."""
    todo = iter(cases)
    trials: list[Trial] = []
    while True:
        while len(trials) < num_jobs and (case := next(todo, None)) is not None:
            trials.append(Trial(case, getattr(getattr(case.suite, case.method), "limit_s", limit_s)))
        if not trials:
            return
        _wait_for_any(trials)
        for trial in [item for item in trials if not item.waiting or item.deadline <= time.monotonic()]:
            trials.remove(trial)
            yield trial.finish()


def _wait_for_any(trials: list[Trial]) -> None:
    """Returns when a rank has ended or a deadline has passed."""
    poll = select.poll()
    owners = {descriptor: trial for trial in trials for descriptor in trial.waiting}
    for descriptor in owners:
        poll.register(descriptor, select.POLLIN)
    left_s = min(trial.deadline for trial in trials) - time.monotonic()
    for descriptor, _ in poll.poll(max(0, int(left_s * 1000) + 1)):
        owners[descriptor].on_ended(descriptor)


def _be_rank(case: Case, rank: int, folder: Path, limit_s: float) -> None:
    """The life of a forked child; does not return."""
    os.setpgid(0, 0)
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.dump_traceback_later(max(0.1, limit_s - _DUMP_BEFORE_S), file=2)
    torch.set_num_threads(1)
    made = make_rank(case, rank, str(folder / "meeting"))
    outcome, text = _outcome_of(getattr(made, case.method))
    part = folder / f"{rank}.part"
    part.write_text(json.dumps([outcome.value, text]))
    part.rename(folder / f"{rank}.json")
    atexit._run_exitfuncs()  # as at the end of any program, but without unwinding into the parent's frames
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _outcome_of(test: Callable[[], object]) -> tuple[Outcome, str]:
    try:
        test()
    except unittest.SkipTest as skip:
        return Outcome.SKIPPED, str(skip)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if code in _SKIP_CODES:
            return Outcome.SKIPPED, f"does not fit this machine (code {code})"
        return (Outcome.PASSED, "") if not end.code else (Outcome.FAILED, f"exit code {end.code}")
    except BaseException:
        return Outcome.FAILED, traceback.format_exc()
    return Outcome.PASSED, ""
