"""How long it takes until the loss of a worker is known, and until it is back: over many kills on this machine.

    python benchmarks/kills.py --kills 50

Each kill hits a worker while the driver waits for a call on it. `WorkerLost` is when that call has failed, ``restarted``
when the new process serves calls. Workers live for longer than five seconds, so that no pause comes before a restart.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import statistics
import threading
import time

import gradwire as gw
from gradwire.cluster import MembershipEvent

NUM_WORKERS, LIFE_S = 4, 6.0


def wait_for_ever() -> None:
    threading.Event().wait(600.0)


def measure(cluster: gw.Cluster, worker: gw.cluster.Worker) -> tuple[float, float]:
    """Kill a worker; return the seconds until a pending call fails, and until the worker is back."""
    back: list[float] = []
    is_back = threading.Event()

    def on_event(event: MembershipEvent) -> None:
        if event.kind == "restarted":
            back.append(time.monotonic())
            is_back.set()

    unregister = cluster.on_membership(on_event)
    worker.call(int)  # connected
    future = worker.with_timeout(0).submit(wait_for_ever)
    began = time.monotonic()
    os.kill(worker.pid or 0, signal.SIGKILL)
    try:
        future.wait()
    except gw.errors.WorkerLost:
        lost = time.monotonic()
    if not is_back.wait(60.0):
        raise TimeoutError(f"{worker.name} is not back")
    unregister()
    return lost - began, back[0] - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    options = parser.parse_args()
    logging.getLogger("gradwire").setLevel(logging.ERROR)
    with gw.Cluster.local(NUM_WORKERS, restart="on-loss", max_restarts=options.kills) as cluster:
        times = []
        for number in range(options.kills):
            times.append(measure(cluster, cluster.workers[number % NUM_WORKERS]))
            time.sleep(LIFE_S / NUM_WORKERS)
    for what, seconds in zip(("WorkerLost", "restarted"), zip(*times, strict=True), strict=True):
        figures = {
            "median": statistics.median(seconds),
            "90 %": sorted(seconds)[len(seconds) * 9 // 10],
            "most": max(seconds),
        }
        print(f"{what:<10} after", ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in figures.items()))


if __name__ == "__main__":
    main()
