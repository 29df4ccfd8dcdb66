"""How much memory the source of a module needs at most while `shard_module` shards it.

    python benchmarks/shard_memory.py                  # 512 MiB over four ranks, and over four RPC workers
    python benchmarks/shard_memory.py --mib 64         # a look

The figure is the peak of resident memory during the call, less what the process had before it made the module, by the size
of the module. 1.0 is the module itself; the bar is 1.3. What shared memory a process has touched counts as its own.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.shard import ChunkShardingSpec, ShardingPlan, shard_module

NUM_PLACES = 4
BAR = 1.3
MIB = 2**20


def make_layers(num_bytes: int) -> nn.Module:
    """Sixteen layers, the usual case."""
    width = 1024
    return nn.Sequential(*(nn.Linear(num_bytes // 16 // 4 // width, width, bias=False) for _ in range(16)))


def make_table(num_bytes: int) -> nn.Module:
    """One parameter that is all of the module."""
    return nn.Sequential(nn.Embedding(num_bytes // 4 // 64, 64))


CASES: dict[str, tuple[Callable[[int], nn.Module], int]] = {
    "16 layers, by rows": (make_layers, 0),
    "16 layers, by columns": (make_layers, 1),
    "one table, by rows": (make_table, 0),
    "one table, by columns": (make_table, 1),
}


def resident(kind: str) -> int:
    """Bytes of resident memory of this process: ``VmRSS`` now, ``VmHWM`` at the peak."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {kind} in /proc/self/status")


def measure(case: str, placements: list[str], num_bytes: int, is_source: bool) -> dict[str, float]:
    """Shards a module; what it took this process, by the size of the module.

    Raises:
        AssertionError: What was sharded is not what the module had.
    """
    make, dim = CASES[case]
    before = resident("VmRSS")
    if is_source:
        module = make(num_bytes)
    else:
        with torch.device("meta"):
            module = make(num_bytes)
    names = [name for name, _ in module.named_parameters()]
    first = module.get_parameter(names[0])[0, :3].tolist() if is_source else None
    if dist.is_initialized():
        dist.barrier()  # to make a module without data may take longer than to make one
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    start = time.perf_counter()
    shard_module(module, ShardingPlan(dict.fromkeys(names, ChunkShardingSpec(dim, list(placements)))))
    seconds = time.perf_counter() - start
    peak, after = resident("VmHWM") - before, resident("VmRSS") - before
    found = module.get_parameter(names[0]).gather()
    if is_source and found[0, :3].tolist() != first:
        raise AssertionError(f"{case}: the shards are not what was sharded")
    return {"peak": peak / num_bytes, "after": after / num_bytes, "seconds": seconds}


def on_rank(case: str, rank: int, store: str, num_bytes: int) -> dict[str, float]:
    """One rank of a process group; rank 0 is the source, the others have no data."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_PLACES)
    try:
        return measure(case, [f"rank:{number}/cpu" for number in range(NUM_PLACES)], num_bytes, rank == 0)
    finally:
        dist.destroy_process_group()


def on_workers(case: str, num_bytes: int) -> dict[str, float]:
    """A worker that shards a module over four others."""
    torch.set_num_threads(1)
    return measure(case, [f"worker{number}/cpu" for number in range(1, NUM_PLACES + 1)], num_bytes, True)


def run_case(case: str, num_bytes: int) -> list[dict[str, Any]]:
    """Both ways, each in processes that have done nothing else."""
    with gw.Cluster.local(NUM_PLACES) as cluster, tempfile.TemporaryDirectory() as folder:
        futures = [
            worker.submit(on_rank, case, rank, str(Path(folder) / "store"), num_bytes)
            for rank, worker in enumerate(cluster.workers)
        ]
        source, *others = [future.wait() for future in futures]
    with gw.Cluster.local(NUM_PLACES + 1) as cluster:
        driver = cluster.workers[0].submit(on_workers, case, num_bytes).wait()
    highest = max(item["peak"] for item in others)
    return [
        {"case": case, "world": "ranks", **source, "others_peak": highest},
        {"case": case, "world": "workers", **driver},
    ]


def main() -> None:
    """Prints a line for each case; exits with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description="Peak memory of the source while a module is sharded.")
    parser.add_argument("--mib", type=int, default=512, help="size of the module")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    rows = [row for case in CASES if arguments.only in case for row in run_case(case, arguments.mib * MIB)]
    for row in rows:
        print(
            f"{row['case']:22} over {NUM_PLACES} {row['world']:8} peak {row['peak']:.2f}x (bar {BAR}x), afterwards "
            f"{row['after']:.2f}x, {row['seconds']:.1f} s"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if any(row["peak"] > BAR for row in rows):
        raise SystemExit("a peak is above the bar")


if __name__ == "__main__":
    main()
