"""
Start every rank yourself, as with torch.distributed.rpc
========================================================

Every process runs this file and calls ``init_rpc``. Rank 0 hands out work; the other ranks wait in ``shutdown`` until
all ranks are done.

Run it::

    python examples/torch_style.py

Here the ranks find each other through a file (``file://``). On several machines they would meet at rank 0
(``tcp://host:port``) or where torchrun says (``env://``, the default). If one program starts all the workers, use
``gradwire.Cluster`` instead: it is shorter.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from gradwire import rpc

WORLD_SIZE = 3

# %%
# Work for ranks 1 and 2
# ----------------------
# ``rpc_async`` returns a future, so that both ranks work at the same time.


def partial_sum(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum(dim=0)


def distributed_sum(matrix: torch.Tensor) -> torch.Tensor:
    chunks = matrix.chunk(WORLD_SIZE - 1)
    futures = [rpc.rpc_async(f"worker{rank}", partial_sum, args=(rows,)) for rank, rows in enumerate(chunks, start=1)]
    return torch.stack(torch.futures.wait_all(futures)).sum(dim=0)


# %%
# One rank
# --------
# Only rank 0 does something between ``init_rpc`` and ``shutdown``. The others serve its calls.


def run(rank: int, rendezvous_file: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, init_method=f"file://{rendezvous_file}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)
    if rank == 0:
        print(f"{WORLD_SIZE} ranks are up; this is {rpc.get_worker_info()}")
        matrix = torch.arange(12.0).view(6, 2)
        total, expected = distributed_sum(matrix), matrix.sum(dim=0)
        if not torch.equal(total, expected):
            raise SystemExit(f"torch_style: the sum is {total.tolist()}, expected {expected.tolist()}")
        print(f"torch_style: two ranks added up the rows of a matrix: {total.tolist()}, as expected")
    rpc.shutdown()


# %%
# Start all ranks
# ---------------


def main() -> None:
    print(f"starting {WORLD_SIZE} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(str(Path(folder, "rendezvous")),), nprocs=WORLD_SIZE)


if __name__ == "__main__":
    main()
