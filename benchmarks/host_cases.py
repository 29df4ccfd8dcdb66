"""Workers on several hosts: how long a lost one goes unnoticed, and what a call over TLS takes.

    python benchmarks/host_cases.py                 # 50 kills on one machine, 50 between hosts (root)
    python benchmarks/host_cases.py --kills 10      # a look

The hosts are network namespaces on this machine, which need root; without it, those rows are left out, with the reason. A
kill is a SIGKILL. The time is from the signal until the call that a worker waits for has raised `WorkerLost` there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "integration")]

from faults.network import Hosts, make_hosts  # noqa: E402
from gradwire.transports.tls import make_keys  # noqa: E402
from rpc.fixtures import init_source  # noqa: E402
from rpc.puppets import Nursery, Puppet  # noqa: E402

NUM_VICTIMS = 10  # in one cluster
ON_ONE_MACHINE_S, BETWEEN_HOSTS_S = 1.0, 5.0  # the bars for the slowest of the kills

_WAIT = """
def wait_lost(future):
    try:
        future.wait()
    except WorkerLost:
        return time.monotonic()
"""
_LATENCY = """
def measure(to, value, number):
    times = []
    for _ in range(number):
        began = time.perf_counter()
        rpc.rpc_sync(to, h.echo, args=(value,))
        times.append(time.perf_counter() - began)
    return sorted(times)
"""


@contextlib.contextmanager
def start(nursery: Nursery, folder: Path, num_workers: int, hosts: Hosts | None) -> Iterator[list[Puppet]]:
    """Start workers that have met: on this machine, or on hosts, where rank 0 has one of its own."""
    if hosts is None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            where, more = f"tcp://127.0.0.1:{probe.getsockname()[1]}", ""
    else:
        where, more = f"tcp://{hosts.addresses[0]}:29573", f"tls=keys_for({str(folder)!r}, 'worker'), "
    with contextlib.ExitStack() as stack:
        puppets = []
        for rank in range(num_workers):
            puppet = nursery.make()
            stack.callback(puppet.close)
            puppets.append(puppet)
            if hosts is not None:
                hosts.enter(0 if rank == 0 else 1 + rank % (len(hosts.names) - 1), puppet)
            puppet.do("from gradwire.transports.tls import keys_for")
            source = init_source(rank, num_workers, where, trust="code", init_timeout=60)
            puppet.start(source.replace("trust=", f"{more}trust="))
        for puppet in puppets:
            puppet.result(90.0)
        puppets[0].do(_WAIT)
        puppets[0].do(_LATENCY)
        yield puppets


def time_kills(nursery: Nursery, folder: Path, num_kills: int, hosts: Hosts | None) -> list[float]:
    """Return the time until each of so many killed workers was taken for lost."""
    seconds: list[float] = []
    while len(seconds) < num_kills:
        num_victims = min(NUM_VICTIMS, num_kills - len(seconds))
        with start(nursery, folder, 1 + num_victims, hosts) as (observer, *victims):
            for rank, victim in enumerate(victims, 1):
                observer.do(f"call = rpc.rpc_async('w{rank}', h.wait_gate, args=(60,), timeout=0)")
                victim.do("h.entered.acquire(timeout=10)")
                observer.start("wait_lost(call)")
                began = time.monotonic()  # one clock for all processes of this machine
                victim.signal(signal.SIGKILL)
                ended = observer.result(60.0)
                seconds.append((ended - began) if ended is not None else float("inf"))
    return seconds


def time_unplugged(nursery: Nursery, folder: Path, num_hosts: int) -> list[float]:
    """Return the time until each host whose cables were taken out was taken for lost."""
    with make_hosts(1 + num_hosts) as hosts, start(nursery, folder, 1 + num_hosts, hosts) as (observer, *victims):
        seconds = []
        for rank, victim in enumerate(victims, 1):
            observer.do(f"call = rpc.rpc_async('w{rank}', h.wait_gate, args=(60,), timeout=0)")
            victim.do("h.entered.acquire(timeout=10)")
            observer.start("wait_lost(call)")
            began = time.monotonic()
            hosts.unplug(1 + rank % num_hosts)
            ended = observer.result(60.0)
            seconds.append((ended - began) if ended is not None else float("inf"))
        return seconds


def time_calls(nursery: Nursery, folder: Path, hosts: Hosts | None, num_calls: int) -> dict[str, list[float]]:
    """Return the sorted times of calls with nothing and with a tensor of 1 MiB."""
    with start(nursery, folder, 2, hosts) as (first, _):
        first.do("measure('w1', None, 200)")
        return {
            "no arguments": first.do(f"measure('w1', None, {num_calls})", 120.0),
            "1 MiB each way": first.do(f"measure('w1', torch.randn(1 << 18), {max(20, num_calls // 10)})", 120.0),
        }


def loss_row(name: str, seconds: list[float], bar_s: float | None) -> dict[str, Any]:
    ordered = sorted(seconds)
    row = {"case": name, "number": len(ordered), "median_s": median(ordered), "largest_s": ordered[-1]}
    return {**row, "bar_s": bar_s, "met": bar_s is None or ordered[-1] <= bar_s, "seconds": seconds}


def call_rows(name: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    rows = []
    for what, ordered in times.items():
        row = {"case": f"call, {name}, {what}", "number": len(ordered), "median_s": median(ordered)}
        rows.append({**row, "p99_s": ordered[int(0.99 * len(ordered))], "met": True})
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | number | median | largest or p99 | bar | met |", "|---|---|---|---|---|---|"]
    for row in rows:
        worst = row["largest_s"] if "largest_s" in row else row["p99_s"]
        bar = f"{row['bar_s']:g} s" if row.get("bar_s") else "-"
        met = "yes" if row["met"] else "NO"
        lines.append(f"| {row['case']} | {row['number']} | {_time(row['median_s'])} | {_time(worst)} | {bar} | {met} |")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return (
        f"{seconds * 1e6:,.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:,.1f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gwb-") as path, contextlib.ExitStack() as stack:
        folder, nursery = Path(path) / "keys", Nursery()
        stack.callback(nursery.close)
        make_keys(folder)
        rows = [loss_row("kill, one machine", time_kills(nursery, folder, arguments.kills, None), ON_ONE_MACHINE_S)]
        rows += call_rows("one machine, Unix socket", time_calls(nursery, folder, None, arguments.calls))
        try:
            with make_hosts(3) as hosts:
                seconds = time_kills(nursery, folder, arguments.kills, hosts)
                rows.append(loss_row("kill, between hosts", seconds, BETWEEN_HOSTS_S))
                rows += call_rows("between hosts, TLS", time_calls(nursery, folder, hosts, arguments.calls))
            rows.append(loss_row("cables taken out", time_unplugged(nursery, folder, 3), None))
        except OSError as error:
            print(f"no rows between hosts: {error}", file=sys.stderr)
    print(show(rows))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
