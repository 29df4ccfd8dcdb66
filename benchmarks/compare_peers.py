"""gradwire, torch.distributed.rpc, Ray and Monarch in turns: calls between two processes of this machine.

`make bench-peers` runs it where Ray and Monarch are installed. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import signal
import sys
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # works without an installed package, too

from cases import CASES, Case, time_round
from gradwire.versions import GRADWIRE_VERSION
from processes import adopt_orphans, end_descendants, with_descendants
from rows import duration, ratio_of
from turns import Systems

CASE_NAMES = ("no-op", "64 B", "256 KiB")


@dataclass(frozen=True)
class Compared:
    """One row of the table.

    Attributes:
        title: What the reader knows it by.
        peer: Name of its class in `peers.PEERS`.
        distribution: What pip installs for it.
        has_gradients: Whether a backward pass goes through its calls.
    """

    title: str
    peer: str
    distribution: str
    has_gradients: bool

    @property
    def version(self) -> str | None:
        """Which one is installed; None if it is not."""
        if self.distribution == "gradwire":
            return GRADWIRE_VERSION  # that of this checkout, installed or not
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return None


OURS = Compared("gradwire", "Gradwire", "gradwire", True)
COMPARED = (
    OURS,
    Compared("torch.distributed.rpc", "TorchRpc", "torch", True),
    Compared("Ray compiled graph", "RayGraph", "ray", False),
    Compared("Ray actor", "RayActor", "ray", False),
    Compared("Monarch actor endpoint", "MonarchActor", "torchmonarch", False),
)


def measure(systems: Systems, case: Case, names: list[str], num_rounds: int) -> dict[str, list[float]]:
    """Return seconds per call of each round, by system."""
    rounds = systems.take_turns(names, num_rounds, lambda name, number: systems.run(name, time_round, case, number))
    return {name: times for name, times in rounds.items() if len(times) == num_rounds}


def make_rows(found: dict[str, dict[str, list[float]]], failures: dict[str, str]) -> list[dict[str, Any]]:
    """Make the rows of the table from the rounds of each case.

    A ratio is that system's time divided by gradwire's in the same round; the median of these is shown.
    """
    rows = []
    for compared in COMPARED:
        row: dict[str, Any] = {
            "system": compared.title,
            "version": compared.version,
            "gradients": compared.has_gradients,
        }
        if compared.version is None:
            row["missing"] = "not installed"
        elif compared.peer in failures:
            row |= {"missing": "failed", "failure": failures[compared.peer]}
        else:
            row["seconds"] = {name: median(rounds[compared.peer]) for name, rounds in found.items()}
            row["rounds"] = {name: rounds[compared.peer] for name, rounds in found.items()}
            row["ratios"] = {
                name: ratio_of(rounds[compared.peer], rounds[OURS.peer])
                for name, rounds in found.items()
                if OURS.peer in rounds
            }
        rows.append(row)
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row as text: times, and in brackets how many times as long as gradwire's."""
    if "missing" in row:
        times = [row["missing"], *("-" for _ in CASE_NAMES[1:])]
    else:
        times = [
            duration(row["seconds"][name])
            + (f" ({row['ratios'][name]:.1f}x)" if row["system"] != OURS.title and name in row["ratios"] else "")
            for name in CASE_NAMES
        ]
    return [f"{row['system']} {row['version'] or ''}".strip(), *times, "yes" if row["gradients"] else "no"]


def report(rows: list[dict[str, Any]], num_rounds: int, arguments: argparse.Namespace) -> None:
    columns = ("system", *CASE_NAMES, "gradients through it")
    title = f"median time of a call there and back, {num_rounds} rounds in turns; in brackets: times gradwire's"
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*cells(row))
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for row in rows:
        if "failure" in row:
            console.print(f"{row['system']} failed:\n{row['failure']}", style="red", markup=False)
    if arguments.json:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about = {"date": now, "python": platform.python_version(), "cpus": os.cpu_count(), "num_rounds": num_rounds}
        arguments.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    if arguments.markdown:
        lines = [columns, ["---"] * len(columns), *map(cells, rows)]
        arguments.markdown.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, metavar="N", help="rounds of each case (11)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the systems are closed then, too
    adopt_orphans()
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    ours = set(with_descendants([os.getpid()]))
    systems = Systems()
    names = [compared.peer for compared in COMPARED if compared.version is not None]
    found = {}
    try:
        for case in (case for case in CASES if case.name in CASE_NAMES):
            found[case.name] = measure(systems, case, names, arguments.rounds)
    finally:
        systems.close()
        for name in end_descendants(keep=ours):
            print(f"still running at the end, and killed: {name}", file=sys.stderr)
    report(make_rows(found, systems.failures), arguments.rounds, arguments)
    return 1 if systems.failures else 0


if __name__ == "__main__":
    sys.exit(main())
