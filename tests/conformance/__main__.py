"""Runs PyTorch's tests on gradwire: ``python -m conformance``, or ``make conformance``."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from conformance.checkout import load_checkout
from conformance.suites import SUITES, Case, load_cases


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 if everything went as `conformance.expected` says."""
    options = _parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_PRINT_REPRO_ON_FAILURE", "0")  # the advice is for torch's own test programs
    if not options.on_torch:
        from gradwire import compat

        compat.install()
    cases = load_checkout(options.pytorch) if options.pytorch else load_cases(tuple(options.suite or SUITES))
    chosen = [case for case in cases if re.search(options.keyword, case.name)]
    if options.list:
        print("\n".join(case.name for case in chosen))
        return 0
    return _run(options, chosen)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("-k", dest="keyword", default="", help="only tests whose name matches this expression")
    parser.add_argument("--suite", action="append", help="module:class instead of torch's suites")
    parser.add_argument("--pytorch", type=Path, help="a checkout of PyTorch's sources: run its tests of _shard instead")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for each test")
    parser.add_argument("--jobs", type=int, default=1, help="tests that run at once")
    parser.add_argument("--json", type=Path, help="write the results there, too")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--on-torch", action="store_true", help="run on torch itself, to see what the machine does")
    parser.add_argument("-v", "--verbose", action="store_true", help="name every test")
    return parser.parse_args(arguments)


def _run(options: argparse.Namespace, chosen: list[Case]) -> int:
    from conformance.report import Report
    from conformance.running import run_cases

    console = Console(width=None if sys.stdout.isatty() else 120)
    report = Report(console, options.verbose)
    with Progress(console=console, disable=not console.is_terminal, auto_refresh=False) as progress:
        task = progress.add_task("tests", total=len(chosen))
        for result in run_cases(chosen, options.limit, options.jobs):
            report.add(result)
            progress.advance(task)
            progress.refresh()  # by hand: a thread that does it would not survive the forks
    report.print_summary()
    if options.json is not None:
        report.write_json(options.json)
    unknown = report.find_unknown() if not (options.keyword or options.suite) else []
    if unknown:
        console.print(f"listed in expected.py, but not among torch's tests: {', '.join(unknown)}")
    return 1 if report.num_unexpected or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
