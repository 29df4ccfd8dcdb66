"""Sharded tensors on four ranks: `torch.distributed._shard` and gradwire in turns, on the same ranks and the same numbers.

Bags: forward and backward of `embedding_bag` on a table of 100,000 x 64; every rank has 512 bags of 20 ids. The first step
of both is compared. Other modes are not measured: row-sharded, torch's `max`, and its `mean` with `padding_idx` and offsets,
give wrong gradients (2.13), and it refuses `sparse`, `scale_grad_by_freq`, and weights of samples together with offsets.

Reshard: a tensor of 256 MiB, from rows to columns, against an all-gather of which each rank keeps its columns. What a rank
sends is counted, and must be what it has of the columns of others.
"""

from __future__ import annotations

import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from peers import CONTEXT
from rows import duration, ratio_of

NUM_RANKS = 4
NUM_ROWS, WIDTH, NUM_BAGS, BAG_SIZE = 100_000, 64, 512, 20
TIMEOUT_S = 600.0
MIB = 2**20

Step = Callable[[], Any]


@dataclass(frozen=True)
class BagCase:
    """A way to look up bags.

    Attributes:
        name: In the table.
        dim: Along which the table is cut.
        mode: Of the module.
        has_offsets: Whether the ids are one list with offsets, or rows.
    """

    name: str
    dim: int
    mode: str
    has_offsets: bool


BAG_CASES = [
    BagCase("sharding: embedding_bag by rows, sum", 0, "sum", False),
    BagCase("sharding: embedding_bag by rows, mean, offsets", 0, "mean", True),
    BagCase("sharding: embedding_bag by columns, sum", 1, "sum", False),
]


def _placements() -> list[Any]:
    return [f"rank:{rank}/cpu" for rank in range(NUM_RANKS)]


# -- on every rank -----------------------------------------------------------------------------------------------------


def _modules(case: BagCase) -> tuple[nn.EmbeddingBag, nn.EmbeddingBag]:
    """The same module, sharded by torch and by gradwire."""
    from torch.distributed._shard import shard_parameter as torch_shard_parameter
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as TorchChunkShardingSpec

    from gradwire.shard import ChunkShardingSpec, shard_parameter

    torch.manual_seed(0)
    theirs, ours = (nn.EmbeddingBag(NUM_ROWS, WIDTH, mode=case.mode) for _ in range(2))
    ours.load_state_dict(theirs.state_dict())
    torch_shard_parameter(theirs, "weight", TorchChunkShardingSpec(case.dim, _placements()))
    shard_parameter(ours, "weight", ChunkShardingSpec(case.dim, _placements()))
    return theirs, ours


def _bag_steps(case: BagCase, rank: int) -> tuple[Step, Step]:
    """A step of torch and one of gradwire, after both were compared."""
    modules = _modules(case)
    torch.manual_seed(rank)
    ids = torch.randint(NUM_ROWS, (NUM_BAGS, BAG_SIZE))
    inputs = (ids.view(-1), torch.arange(0, ids.numel(), BAG_SIZE)) if case.has_offsets else (ids,)
    factors = torch.randn(NUM_BAGS, WIDTH)
    parts = [module.weight.local_shards()[0].tensor for module in modules]  # type: ignore[operator,union-attr]

    def step(module: nn.EmbeddingBag, part: torch.Tensor) -> torch.Tensor:
        part.grad = None
        found: torch.Tensor = module(*inputs)
        found.backward(factors)
        return found.detach()

    theirs, ours = (lambda pair=pair: step(*pair) for pair in zip(modules, parts, strict=True))
    torch.testing.assert_close(ours(), theirs(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts[1].grad, parts[0].grad, rtol=1e-4, atol=1e-4)
    return theirs, ours


def _reshard_steps(rank: int, num_bytes: int) -> tuple[Step, Step]:
    from gradwire.shard import ChunkShardingSpec, sharded_tensor
    from gradwire.shard import redistribute as moving

    side = int((num_bytes // 4) ** 0.5)
    share = side // NUM_RANKS
    whole = sharded_tensor.rand(ChunkShardingSpec(0, _placements()), side, side)
    columns = ChunkShardingSpec(1, _placements())
    mine = whole.local_tensor()

    def theirs() -> torch.Tensor:
        everything = torch.empty(side, side)
        dist.all_gather_into_tensor(everything, mine)
        return everything[:, rank * share : (rank + 1) * share].contiguous()

    def ours() -> torch.Tensor:
        before = moving.traffic.num_bytes
        found = whole.redistribute(columns).local_tensor()
        sent, least = moving.traffic.num_bytes - before, mine.numel() * 4 * (NUM_RANKS - 1) // NUM_RANKS
        if sent != least:
            raise AssertionError(f"rank {rank} sent {sent} bytes, and had to send {least}")
        return found

    assert torch.equal(ours(), theirs())
    return theirs, ours


def _take_turns(steps: tuple[Step, Step], num_rounds: int, num_steps: int) -> list[list[float]]:
    """Seconds of each round of the one and of the other: median steps, from everybody's start to everybody's end."""
    rounds: list[list[float]] = [[], []]
    for round_no in range(num_rounds):
        for side in (0, 1)[:: -1 if round_no % 2 else 1]:
            times = []
            for _ in range(num_steps + 1):
                dist.barrier()
                start = time.perf_counter()
                steps[side]()
                dist.barrier()
                times.append(time.perf_counter() - start)
            rounds[side].append(median(times[1:]))
    return rounds


def _measure_on_rank(rank: int, folder: str, is_quick: bool, pipe: Connection) -> None:
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")  # torch's own deprecations
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
        num_rounds = 3 if is_quick else 7
        found = {case.name: _take_turns(_bag_steps(case, rank), num_rounds, 10) for case in BAG_CASES}
        num_mib = 64 if is_quick else 256
        name = f"sharding: reshard of {num_mib} MiB"
        found[name] = _take_turns(_reshard_steps(rank, num_mib * MIB), num_rounds, 2)
        dist.destroy_process_group()
        pipe.send(found)
    except Exception:
        pipe.send(traceback.format_exc())


# -- the rows ----------------------------------------------------------------------------------------------------------


def shard_rows(is_quick: bool, failures: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of the table; what goes wrong is noted in `failures`."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        pipes = [CONTEXT.Pipe(duplex=False) for _ in range(NUM_RANKS)]
        ranks = [
            CONTEXT.Process(target=_measure_on_rank, args=(rank, folder, is_quick, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for rank in ranks:
            rank.start()
        try:
            found = _first_answer(pipes[0][0])
        finally:
            for rank in ranks:
                rank.join(5)
                rank.kill()
    if isinstance(found, str):
        failures["sharding"] = found
        return []
    return [_row(name, *rounds) for name, rounds in found.items()]


def _first_answer(pipe: Connection) -> Any:
    return pipe.recv() if pipe.poll(TIMEOUT_S) else f"sharding: no answer within {TIMEOUT_S:.0f} s"


def _row(name: str, theirs: list[float], ours: list[float]) -> dict[str, Any]:
    ratio = ratio_of(theirs, ours)
    is_reshard = "reshard" in name
    return {
        "case": name,
        "torch": duration(median(theirs)),
        "gradwire": duration(median(ours)),
        "torch_ratio": ratio,
        "ratio": f"{ratio:.1f}x",
        "bar": ">= 1x",
        "met": ratio >= 1,
        "beside": "all-gather and slice; gradwire sends no byte twice" if is_reshard else "",
        "rounds": {"torch": theirs, "gradwire": ours},
    }
