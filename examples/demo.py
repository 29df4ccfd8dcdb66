"""Three workers on this machine, a few remote computations, and a table of latencies. This is what `make demo` runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gradwire as gw
from gradwire import rpc

console = Console(soft_wrap=True)


def monte_carlo_pi(seed: int, num_points: int = 400_000) -> float:
    """An estimate of pi from random points."""
    points = torch.rand(num_points, 2, generator=torch.Generator().manual_seed(seed))
    return float((points.square().sum(1) <= 1).double().mean() * 4)


def block_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """One block of a matrix product."""
    return left @ right


def ask_neighbour(neighbour: str, depth: int) -> list[str]:
    """Two workers that call each other, nested; the names of all that took part."""
    me = rpc.get_worker_info().name
    return [me] if depth == 0 else [me, *rpc.rpc_sync(neighbour, ask_neighbour, (me, depth - 1))]


def divide(a: float, b: float) -> float:
    """Raises where it runs, and again where it was called from."""
    return a / b


def echo(value: Any) -> Any:
    """Returns what it gets."""
    return value


def show_computations(cluster: gw.Cluster) -> None:
    """Remote functions: spread over workers, with tensors, nested, and with an error."""
    workers = cluster.workers

    estimates = cluster.map(monte_carlo_pi, range(12))
    console.print(f"pi from 12 x 400,000 points on {len(workers)} workers: [bold]{statistics.mean(estimates):.4f}[/]")

    a, b = torch.randn(600, 300), torch.randn(300, 400)
    parts = [worker.submit(block_product, part, b) for worker, part in zip(workers, a.chunk(len(workers)), strict=True)]
    product = torch.cat([part.wait() for part in parts])
    torch.testing.assert_close(product, a @ b)
    console.print(f"a 600 x 300 x 400 matrix product in {len(parts)} blocks: [bold]equal to one process[/]")

    chain = workers[0].call(ask_neighbour, workers[1].name, 6)
    console.print(f"calls nested six deep: [bold]{' > '.join(chain)}[/]")

    try:
        workers[2].call(divide, 1.0, 0.0)
    except ZeroDivisionError as error:
        where = getattr(error.__cause__, "worker", "?")
        console.print(f"an error on {where} arrives as itself: [bold]{error!r}[/]")


def measure(call: Callable[[], Any], repeat: int) -> list[float]:
    """Seconds of each of `repeat` calls, after a warm-up."""
    for _ in range(max(3, repeat // 10)):
        call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)


def show_latencies(cluster: gw.Cluster) -> None:
    """How long a call takes, there and back."""
    worker = cluster.workers[0]
    table = Table(title="there and back, one caller", title_justify="left")
    for column in ("call", "median", "fastest", "slowest of 95 %"):
        table.add_column(column, justify="left" if column == "call" else "right")

    def add(name: str, call: Callable[[], Any], repeat: int) -> None:
        times = measure(call, repeat)
        chosen = (statistics.median(times), times[0], times[int(len(times) * 0.95)])
        table.add_row(name, *(f"{seconds * 1e6:,.0f} us" for seconds in chosen))

    add("no arguments", lambda: worker.call(time.monotonic), 1000)
    for label, size in (
        ("64 B", 16),
        ("4 KiB", 1 << 10),
        ("256 KiB", 1 << 16),
        ("4 MiB", 1 << 20),
        ("64 MiB", 1 << 24),
    ):
        tensor = torch.zeros(size)
        add(f"{label} tensor", lambda tensor=tensor: worker.call(torch.detach, tensor), 300 if size < 1 << 20 else 20)
    console.print(table)

    start = time.perf_counter()
    futures = [worker.submit(time.monotonic) for _ in range(5000)]
    for future in futures:
        future.wait()
    console.print(f"calls without waiting in between: [bold]{5000 / (time.perf_counter() - start):,.0f} per second[/]")


def main() -> None:
    """Starts the cluster, shows what it can do, and ends it."""
    start = time.perf_counter()
    with gw.Cluster.local(3) as cluster:
        console.print(f"three workers after {time.perf_counter() - start:.1f} s")
        show_computations(cluster)
        show_latencies(cluster)
        console.print(cluster.status())
    console.print("[green]all workers have ended[/]")


if __name__ == "__main__":
    main()
