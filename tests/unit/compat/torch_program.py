"""A program written for torch, with two ranks, one of them in a fresh interpreter: calls, references, gradients, a step."""

from __future__ import annotations

import sys

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef, remote


class Server:
    """Holds one parameter."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    def parameter(self) -> RRef:  # type: ignore[type-arg]
        return RRef(self.weight)


def forward(server: RRef, x: torch.Tensor) -> torch.Tensor:  # type: ignore[type-arg]
    return server.local_value().forward(x)


def train() -> None:
    server = remote("worker1", Server)
    optimizer = DistributedOptimizer(torch.optim.SGD, [server.rpc_sync().parameter()], lr=0.5)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", forward, args=(server, torch.tensor([3.0]))).sum()
        dist_autograd.backward(context_id, [loss])
        optimizer.step(context_id)
    print(f"{rpc.rpc_sync.__module__} weight {server.to_here().weight.item()}", flush=True)


def run(rank: int, path: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    other = mp.spawn(run, args=(sys.argv[1],), nprocs=1, join=False)
    run(1, sys.argv[1])
    while not other.join():
        pass
