"""How long clusters take to start, and killed workers to come back; calls from each of 64 workers to each of the others.

    python benchmarks/clusters.py [--quick] [--ray]

Starts are measured in a fresh process each time, in turns with four bare processes that import torch: no program that
computes with torch in four processes starts faster than those. `host_cases.py` measures how long it takes until the loss of
a worker is known.
"""

from __future__ import annotations

import argparse
import logging
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # works without an installed package, too

import gradwire as gw

SOURCE = str(Path(__file__).resolve().parents[1] / "src")
NUM_WORKERS = 4
NUM_MANY = 64
LIFE_S = 6.0  # longer than the time after which a restart is not delayed
IMPORT_TORCH = "import torch"
START_LOCAL = f"""
import sys; sys.path.insert(0, {SOURCE!r})
import gradwire
with gradwire.Cluster.local({NUM_WORKERS}) as cluster:
    assert [worker.call(abs, -1) for worker in cluster.workers] == [1] * {NUM_WORKERS}
"""
START_RAY = f"""
import sys, time; sys.path.insert(0, {SOURCE!r})
import ray
if "up" in sys.argv:
    ray.init(num_cpus={NUM_WORKERS}, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
import gradwire
begun = time.monotonic()
with gradwire.Cluster.ray({NUM_WORKERS}, resources={{"CPU": 0.25}}) as cluster:
    assert [worker.call(abs, -1) for worker in cluster.workers] == [1] * {NUM_WORKERS}
    print("seconds", time.monotonic() - begun)
"""


def run(program: str, *args: str) -> str:
    command = [sys.executable, "-c", program, *args]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    if done.returncode:
        sys.exit(f"a program of the benchmark exited with {done.returncode}; its error is above")
    return done.stdout


def time_local() -> float:
    begun = time.perf_counter()
    run(START_LOCAL)
    return time.perf_counter() - begun


def time_bare() -> float:
    """Four processes at once that import torch, and end."""
    begun = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", IMPORT_TORCH]) for _ in range(NUM_WORKERS)]
    for process in processes:
        process.wait(300)
    return time.perf_counter() - begun


def time_ray(*args: str) -> float:
    """From `Cluster.ray` to the first results; importing ray and torch is not part of it."""
    return float(run(START_RAY, *args).split("seconds ")[1].split()[0])


def in_turns(num_rounds: int, *timers: Callable[[], float]) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in timers]
    for round_no in range(num_rounds):
        for index in range(len(timers))[:: -1 if round_no % 2 else 1]:
            times[index].append(timers[index]())
    return times


def call_all(names: list[str]) -> int:
    """Run on each worker: one call to each of the others, all at once."""
    own = gw.rpc.get_worker_info().name
    futures = [gw.rpc.rpc_async(name, abs, args=(-1,)) for name in names if name != own]
    return sum(future.wait() for future in futures)


def time_all_to_all(num_rounds: int) -> tuple[float, float, float]:
    """Return seconds to start, for the first round, which connects every pair, and for one of the later rounds."""
    begun = time.perf_counter()
    with gw.Cluster.local(NUM_MANY, rpc_timeout=300) as cluster:
        started = time.perf_counter() - begun
        names, rounds = [worker.name for worker in cluster.workers], []
        for _ in range(num_rounds + 1):
            begun = time.perf_counter()
            futures = [worker.submit(call_all, names) for worker in cluster.workers]
            assert sum(future.wait() for future in futures) == NUM_MANY * (NUM_MANY - 1)
            rounds.append(time.perf_counter() - begun)
    return started, rounds[0], median(rounds[1:])


def time_restarts(num_kills: int) -> list[float]:
    """Return seconds from each SIGKILL until the worker serves calls again."""
    logging.getLogger("gradwire").setLevel(logging.ERROR)  # each loss is logged as a warning
    times = []
    with gw.Cluster.local(NUM_WORKERS, restart="on-loss", max_restarts=num_kills) as cluster:
        events: queue.SimpleQueue[gw.cluster.MembershipEvent] = queue.SimpleQueue()
        cluster.on_membership(events.put)
        for number in range(num_kills):
            time.sleep(LIFE_S / NUM_WORKERS)
            begun = time.perf_counter()
            os.kill(cluster.workers[number % NUM_WORKERS].pid or 0, signal.SIGKILL)
            while events.get(timeout=60).kind != "restarted":
                pass
            times.append(time.perf_counter() - begun)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a result")
    parser.add_argument("--ray", action="store_true", help="also the start of Cluster.ray, which takes a minute")
    arguments = parser.parse_args()
    num_rounds = 3 if arguments.quick else 9
    table = Table("what", "time", "against", title="clusters")
    local, bare = in_turns(num_rounds, time_local, time_bare)
    ratio = median(a / b for a, b in zip(local, bare, strict=True))
    table.add_row(
        f"program with Cluster.local({NUM_WORKERS}), from start to end",
        f"{median(local):.2f} s",
        f"four processes that import torch: {median(bare):.2f} s, {ratio:.2f}x",
    )
    if arguments.ray:
        up, alone = in_turns(3, lambda: time_ray("up"), time_ray)
        table.add_row(f"Cluster.ray({NUM_WORKERS}), Ray is up", f"{median(up):.2f} s", "")
        table.add_row(f"Cluster.ray({NUM_WORKERS}), Ray starts with it", f"{median(alone):.2f} s", "")
    back = time_restarts(8 if arguments.quick else 50)
    table.add_row(
        'Cluster.local(restart="on-loss"): from SIGKILL until the worker is back',
        f"{median(back):.2f} s",
        f"{len(back)} kills, longest {max(back):.2f} s",
    )
    started, first, later = time_all_to_all(3 if arguments.quick else 10)
    num_calls = NUM_MANY * (NUM_MANY - 1)
    table.add_row(f"Cluster.local({NUM_MANY}), not the first cluster of the process", f"{started:.2f} s", "")
    table.add_row(
        f"first call from each of {NUM_MANY} workers to each of the others",
        f"{first:.2f} s",
        f"{num_calls:,} pairs connected",
    )
    table.add_row("one more such round", f"{later:.2f} s", f"{num_calls / later:,.0f} calls/s")
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    main()
