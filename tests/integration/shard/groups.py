"""Process groups for tests: the workers of a cluster on this machine are their ranks."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradwire.cluster.api import Cluster
from gradwire.errors import WorkerLost

TIMEOUT = timedelta(seconds=45)


def join_group(rank: int, world_size: int, store: str, timeout: timedelta = TIMEOUT) -> None:
    """Make the process group that `store` is for. All of its ranks have connected when any of them goes on.

    Gloo alone promises only one's own connections: a rank that leaves early would hang up on one that still connects.
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    try:
        dist.barrier()
    except BaseException:
        dist.destroy_process_group()
        raise


def _run_rank(function: Callable[..., Any], rank: int, world_size: int, store: str, args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    join_group(rank, world_size, store)
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()


class Ranks:
    """The ranks of a process group, as processes.

    Args:
        cluster: Its workers are the ranks.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.world_size = len(cluster.workers)

    def run(self, function: Callable[..., Any], *args: Any, num_ranks: int | None = None) -> list[Any]:
        """``function(rank, *args)`` on every rank, or on the first ones, in a fresh process group; results by rank."""
        workers = self._cluster.workers[:num_ranks]
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            futures = [
                worker.submit(_run_rank, function, number, len(workers), store, args)
                for number, worker in enumerate(workers)
            ]
            return _results(futures)


def _results(futures: Sequence[torch.futures.Future[Any]]) -> list[Any]:
    """What all ranks returned, once all have ended. Of what they raised, what one says of itself, not of another one."""
    found, errors = [], []
    for future in futures:
        try:
            found.append(future.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, WorkerLost))
    return found


@contextlib.contextmanager
def ranks(number: int) -> Iterator[Ranks]:
    """That many ranks."""
    with Cluster.local(number) as cluster:
        yield Ranks(cluster)
