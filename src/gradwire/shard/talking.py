"""Says which rank of a process group is gone when talking to the others fails.

The backend knows that a connection broke, not whose it was. A group with a broken connection is of no use any more, so
each rank may try the others again, one by one, to find out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gradwire.errors import WorkerLost


@contextlib.contextmanager
def talking(group: Any, what: str) -> Iterator[None]:
    """Around whatever concerns all ranks of a group.

    Args:
        group: The process group; None for the default one.
        what: What is being done, for the error.

    Raises:
        WorkerLost: A rank is gone, or did not take part in time.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorkerLost):
            raise
        is_late = "timed out" in str(error).lower()  # all connections count as broken then
        lost = [] if is_late else _find_lost(group)
        if not lost and not is_late:
            raise
        names = " and ".join(f"rank {rank}" for rank in lost) or "a rank"
        happened = (
            "is gone" if lost else "did not take part in time; do all ranks make the same calls in the same order"
        )
        raise WorkerLost(
            f"{names} of the process group {happened} ({what}, seen by rank {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}). The group is of no use any more: start again from a checkpoint. "
            f"The backend says: {error}",
            names,
        ) from error


def _find_lost(group: Any) -> list[int]:
    """Ranks to which nothing can be sent; for backends that tell at once."""
    if dist.get_backend(group) != dist.Backend.GLOO:
        return []
    own, lost = dist.get_rank(group), []
    for rank in range(dist.get_world_size(group)):
        if rank != own:
            try:
                dist.isend(torch.zeros(1), group=group, group_dst=rank)
            except RuntimeError:
                lost.append(rank)
    return lost
