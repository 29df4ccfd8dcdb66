"""gradwire and torch.distributed.rpc in turns, as ratios. See README.md beside this file."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # works without an installed package, too

from autograd_cases import AUTOGRAD_CASES, AutogradCase, Side, time_steps
from cases import CASES, MIB, Case, echo_memory, idle_peers, reference_memory, time_round
from checkpoint_cases import checkpoint_row, time_save, time_save_file
from many_workers_cases import MANY_WORKERS_CASES, time_many_workers
from optimizer_cases import OPTIMIZER_CASES, time_optimizer
from rows import autograd_row, call_row
from shard_cases import shard_rows
from turns import Systems

COLUMNS = ("case", "torch", "gradwire", "ratio", "bar", "met", "beside")
FLAT_BYTES = 8 * MIB  # growth that an allocator may show without a leak
IDLE_BYTES = 100 * MIB
REFERENCES_BYTES = 10 * MIB


class Bench(Systems):
    """Measures the cases, each as a row of the table."""

    def __init__(self, is_quick: bool) -> None:
        super().__init__()
        self.is_quick = is_quick

    def measure(self, case: Case) -> dict[str, Any]:
        """Calls, in turns."""
        # A round of small calls takes a quarter of a second, and the machine's mood lasts for several.
        num_rounds = 3 if self.is_quick else 21 if case.num_bytes < MIB else 7
        rounds = self.take_turns(case.peers, num_rounds, lambda name, number: self.run(name, time_round, case, number))
        return call_row(case, rounds)

    def measure_autograd(self, case: AutogradCase, time_works: Callable[..., list[float]]) -> dict[str, Any]:
        """The same for autograd, where a system may have two works to compare."""
        rounds: dict[Side, list[float]] = {side: [] for side in case.sides}
        works = case.works_by_peer()
        for round_no in range(3 if self.is_quick else 7):
            for name in list(works)[:: -1 if round_no % 2 else 1]:
                seconds = self.run(name, time_works, works[name], case.num_steps, round_no)
                for work, value in zip(works[name], seconds or (), strict=False):
                    rounds[Side(name, work)].append(value)
        return autograd_row(case, rounds)

    def measure_echo_memory(self) -> dict[str, Any]:
        """Whether many echoes of 1 MiB leave memory flat on both sides."""
        num_calls, num_warm = (1000, 200) if self.is_quick else (10_000, 1000)
        row = {"case": f"memory: {num_calls:,} x 1 MiB", "bar": f"+ < {FLAT_BYTES // MIB} MiB"}
        found = self.run("Gradwire", echo_memory, num_calls, num_warm)
        if found:
            row["bytes"] = found
            pairs = {key: (value, found["last"][key]) for key, value in found["first"].items()}
            row["met"] = all(last - first < FLAT_BYTES for first, last in pairs.values())
            row["beside"] = ", ".join(f"{key} {a / MIB:.0f} -> {b / MIB:.0f} MiB" for key, (a, b) in pairs.items())
        return row

    def measure_references(self) -> dict[str, Any]:
        """What 10,000 live references cost on each side."""
        row = {"case": "memory: 10,000 live RRefs", "bar": f"< {REFERENCES_BYTES // MIB} MiB"}
        found = self.run("Gradwire", reference_memory, 10_000)
        if found:
            row |= {"bytes": found, "met": max(found.values()) < REFERENCES_BYTES}
            row["beside"] = ", ".join(f"{side} {num_bytes / MIB:.1f} MiB" for side, num_bytes in found.items())
        return row

    def measure_checkpoint(self) -> dict[str, Any]:
        """A checkpoint over two owners against the safetensors library; the first round of each only warms up."""
        num_mib = 256 if self.is_quick else 1024
        ours, library = [], []
        for round_no in range(4 if self.is_quick else 8):
            for name in ("GradwirePair", "OneProcess")[:: -1 if round_no % 2 else 1]:
                if name == "GradwirePair":
                    ours.append(self.run(name, time_save, num_mib * MIB))
                else:
                    library.append(self.run(name, time_save_file, num_mib * MIB))
        pairs = [pair for pair in zip(ours[1:], library[1:], strict=True) if None not in pair]
        return checkpoint_row(f"checkpoint: {num_mib} MiB, two owners", [a for a, _ in pairs], [b for _, b in pairs])

    def measure_idle_peers(self) -> dict[str, Any]:
        """What 1,000 open, unused connections cost."""
        row = {"case": "memory: 1,000 idle peers", "bar": f"< {IDLE_BYTES // MIB} MiB"}
        num_bytes = self.run("Floor", idle_peers, 1000)
        if num_bytes is not None:
            row |= {"bytes": num_bytes, "met": num_bytes < IDLE_BYTES}
            row |= {"beside": f"{num_bytes / MIB:.1f} MiB for both ends of each"}
        return row


def _cells(row: dict[str, Any]) -> list[str]:
    met = {True: "yes", False: "NO"}
    return [met.get(row.get(name), "-") if name == "met" else row.get(name, "-") for name in COLUMNS]


def _report(rows: list[dict[str, Any]], failures: dict[str, str], arguments: argparse.Namespace) -> None:
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(*COLUMNS, title="rounds in turns: median times; ratio = median of torch / gradwire in each round")
    for row in rows:
        table.add_row(*_cells(row), style={True: "green", False: "red"}.get(row.get("met")))
    console.print(table)
    for failure in failures.values():
        console.print("\n".join(failure.strip().splitlines()[-4:]), style="red", markup=False)
    if arguments.json:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        report = {"date": now, "torch": torch.__version__, "python": platform.python_version(), "cpus": os.cpu_count()}
        report |= {"quick": arguments.quick, "rows": rows, "failures": failures}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    if arguments.markdown:
        lines = [COLUMNS, ["---"] * len(COLUMNS), *map(_cells, rows)]
        arguments.markdown.write_text("".join(f"| {' | '.join(line)} |\n" for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and calls: a look, not a result")
    parser.add_argument("--only", metavar="NAME", default="", help='cases whose name contains this: "tcp", "64 MiB"')
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round here")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the systems are closed then, too
    bench = Bench(arguments.quick)
    rows = []
    try:
        rows += [bench.measure(case) for case in CASES if arguments.only in case.name]
        for cases, time_works in (
            (AUTOGRAD_CASES, time_steps),
            (OPTIMIZER_CASES, time_optimizer),
            (MANY_WORKERS_CASES, time_many_workers),
        ):
            rows += [bench.measure_autograd(case, time_works) for case in cases if arguments.only in case.name]
        if arguments.only in "sharding":
            rows += shard_rows(arguments.quick, bench.failures)
        if arguments.only in "checkpoint":
            rows.append(bench.measure_checkpoint())
        if arguments.only in "memory":
            rows += [bench.measure_echo_memory(), bench.measure_idle_peers(), bench.measure_references()]
    finally:
        bench.close()
    _report(rows, bench.failures, arguments)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
