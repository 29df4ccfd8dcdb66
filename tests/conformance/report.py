"""What is printed: a line for each test that needs a look, and a table at the end."""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conformance.expected import LIMITS, OPEN, SHARD_LIMITS, reason_of
from conformance.running import Outcome, Result


class Verdict(enum.Enum):
    """A result, held against the list of expected ones."""

    PASSED = "passed"
    SKIPPED = "skipped"
    LIMIT = "old limit"
    OPEN = "open"
    FAILED = "failed"
    STALE = "stale"

    @property
    def is_unexpected(self) -> bool:
        """Whether somebody has to look at it."""
        return self in (Verdict.FAILED, Verdict.STALE)


def judge(result: Result) -> Verdict:
    """What to make of a result."""
    is_listed = reason_of(result.case) is not None
    if result.is_good:
        if is_listed:
            return Verdict.STALE
        return Verdict.SKIPPED if result.outcome is Outcome.SKIPPED else Verdict.PASSED
    if not is_listed:
        return Verdict.FAILED
    return Verdict.OPEN if result.case in OPEN else Verdict.LIMIT


class Report:
    """Gathers results and prints them.

    Args:
        console: Where to.
        is_verbose: Whether tests that went as expected are named, too.
    """

    def __init__(self, console: Console, is_verbose: bool) -> None:
        self._console = console
        self._is_verbose = is_verbose
        self._results: list[tuple[Result, Verdict]] = []

    def add(self, result: Result) -> None:
        """Another test has ended."""
        verdict = judge(result)
        self._results.append((result, verdict))
        if verdict.is_unexpected or self._is_verbose:
            text = f"{result.seconds:6.1f} s  {verdict.value:<9}  {result.case}"
            self._print(text, style="red" if verdict.is_unexpected else None)
        if verdict is Verdict.FAILED:
            self._print(f"{result.outcome.value}\n{result.detail}")

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    @property
    def num_unexpected(self) -> int:
        """Failures that are not listed, and listed ones that are none."""
        return sum(verdict.is_unexpected for _, verdict in self._results)

    def find_unknown(self) -> list[str]:
        """Tests that are listed, of a suite that was run, and were not run; after a run of all, torch has them no more."""
        known = {result.case for result, _ in self._results}
        suites = {result.suite for result, _ in self._results}
        listed = (*LIMITS, *SHARD_LIMITS, *OPEN)
        return [name for name in listed if name not in known and name.partition(".")[0] in suites]

    def print_summary(self) -> None:
        """The table, and what is left with its reason."""
        table = Table(title="PyTorch's own tests, on gradwire")
        table.add_column("suite")
        for verdict in Verdict:
            table.add_column(verdict.value, justify="right")
        table.add_column("seconds", justify="right")
        suites = list(dict.fromkeys(result.suite for result, _ in self._results))
        for suite in suites:
            table.add_row(suite, *_numbers([item for item in self._results if item[0].suite == suite]))
        if len(suites) > 1:
            table.add_section()
            table.add_row("all", *_numbers(self._results))
        for result, verdict in self._results:
            if verdict in (Verdict.OPEN, Verdict.LIMIT):
                self._print(f"{verdict.value:<9}  {result.case}: {reason_of(result.case)}")
        self._console.print(table)

    def write_json(self, path: Path) -> None:
        """The same for programs."""
        rows = [
            {"case": result.case, "verdict": verdict.value, "outcome": result.outcome.value, "detail": result.detail}
            for result, verdict in self._results
        ]
        path.write_text(json.dumps(rows, indent=1))


def _numbers(results: Iterable[tuple[Result, Verdict]]) -> list[str]:
    found = list(results)
    counts = Counter(verdict for _, verdict in found)
    return [*(str(counts[verdict]) for verdict in Verdict), f"{sum(result.seconds for result, _ in found):.0f}"]
