"""A program in the style of `torch.distributed.rpc`: every process runs this file and calls `init_rpc`.

    python examples/torch_style.py

The workers meet in a file (`file://`). On several machines they would meet at rank 0 (`tcp://host:port`), or where
`torchrun` says (`env://`, the default). Rank 0 gives out work; the others wait in `shutdown` until everybody is done.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from gradwire import rpc

WORLD_SIZE = 3


def partial_sum(rows: torch.Tensor) -> torch.Tensor:
    """Runs on ranks 1 and 2."""
    return rows.sum(dim=0)


def whole_sum(matrix: torch.Tensor) -> torch.Tensor:
    """Calls all other workers at once and waits for their answers."""
    chunks = matrix.chunk(WORLD_SIZE - 1)
    futures = [rpc.rpc_async(f"worker{rank}", partial_sum, args=(rows,)) for rank, rows in enumerate(chunks, start=1)]
    return torch.stack(torch.futures.wait_all(futures)).sum(dim=0)


def run(rank: int, meeting_file: str) -> None:
    """The life of one worker."""
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{meeting_file}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    if rank == 0:
        matrix = torch.arange(12.0).view(6, 2)
        total = whole_sum(matrix)
        here, there = rpc.get_worker_info(), rpc.get_worker_info("worker2")
        print(f"{here} and {there} are of one cluster")
        print(f"torch_style: the sum is {total.tolist()}, expected {matrix.sum(dim=0).tolist()}")
    rpc.shutdown()


def main() -> None:
    """Starts one process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(str(Path(folder, "meeting")),), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
