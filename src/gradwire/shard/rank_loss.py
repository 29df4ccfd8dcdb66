"""Turns a failed operation of a process group into an error that names the lost rank, on every rank at once.

Gloo reports a broken connection only to the ranks that exchange data with the lost one. A rank that waits for one of those
would learn of the loss when the group times out:

    rank 0 ---- waits for ----> rank 2 ---- waits for ----> rank 1, lost

So a rank whose operation fails leaves the group: it reports in the group's store which connections it found broken, and then
closes its own, which fails the ranks that wait for it. A rank at a broken connection is therefore lost only if it has not
reported; otherwise its report says where to look next.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gradwire._torch import store_of_group
from gradwire.errors import WorkerLost

T = TypeVar("T")

_REPORT_S = 1.0
"""How long to wait for a report: gloo closes the connections of a rank that has timed out before that rank can report."""

_STORE_S = 3.0  # for all that is asked of the store at once; the process that serves it may be the lost one

# No operation uses these tags, so none takes a probe for its own data. Probes are not received, and nothing is sent with the
# other tag.
_PROBE_TAG, _LEAVE_TAG = 0x67771, 0x67772


@contextlib.contextmanager
def collective(group: Any, what: str) -> Iterator[None]:
    """Turn the errors of a collective operation into `WorkerLost` if they come from a lost rank.

    The group cannot be used after that: with gloo, this rank has closed its connections.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorkerLost):
            raise
        is_late = "timed out" in str(error).lower()
        is_gloo = dist.get_backend(group) == dist.Backend.GLOO
        broken = _find_broken(group) if is_gloo and not is_late else []
        if not broken and not is_late:
            raise
        lost = _leave(group, broken) if is_gloo else []
        names = " and ".join(f"rank {rank}" for rank in lost) or "a rank"
        happened = "did not join in time (check that all ranks make the same calls in the same order)"
        if lost:
            happened = "is gone" if len(lost) == 1 else "are gone"
        raise WorkerLost(
            f"{names} of the process group {happened} ({what}, seen by rank {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}). The group can no longer be used: restart from a checkpoint. Backend "
            f"error: {error}",
            names,
        ) from error


def _others(group: Any) -> list[int]:
    return [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]


def _find_broken(group: Any) -> list[int]:
    """Return the ranks to which nothing can be sent."""
    broken = []
    for rank in _others(group):
        try:
            dist.isend(torch.zeros(1), group=group, group_dst=rank, tag=_PROBE_TAG)
        except RuntimeError:
            broken.append(rank)
    return broken


def _leave(group: Any, broken: list[int]) -> list[int]:
    """Report, close all connections, and return the ranks that are lost: none if a rank was only late."""
    store, own = store_of_group(group), dist.get_rank(group)

    def report() -> list[int]:
        # The first report stays: after it, this rank's own connections are all closed.
        first: list[int] = json.loads(store.compare_set(_key(own), "", json.dumps(broken)))
        return first

    broken = _ask_store(report, broken)
    _close_connections(group)
    return _ask_store(lambda: _find_lost(store, broken), broken)


def _close_connections(group: Any) -> None:
    """Close this rank's connections: gloo does so when an operation times out, and offers nothing else."""
    for rank in _others(group):
        with contextlib.suppress(RuntimeError):  # that it timed out, or that the connection is closed already
            request = dist.irecv(torch.empty(1), group=group, group_src=rank, tag=_LEAVE_TAG)
            request.wait(timedelta(milliseconds=1))


def _find_lost(store: Any, broken: list[int]) -> list[int]:
    """Follow the reports from broken connection to broken connection, to the ranks that have not reported."""
    deadline = time.monotonic() + _REPORT_S
    found, lost = list(broken), []
    for rank in found:  # grows
        try:
            remaining_s = max(deadline - time.monotonic(), 0.001)
            store.wait([_key(rank)], timedelta(seconds=remaining_s))
        except RuntimeError:
            lost.append(rank)
            continue
        found += [other for other in json.loads(store.get(_key(rank))) if other not in found]
    return sorted(lost)


def _key(rank: int) -> str:
    return f"gradwire/left/{rank}"


def _ask_store(ask: Callable[[], T], default: T) -> T:
    """Return what `ask` finds in the store, or `default` if the store fails or does not answer."""
    answers = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(ask())

    thread = threading.Thread(target=run, name="gradwire-store", daemon=True)
    thread.start()
    thread.join(_STORE_S)
    return answers[0] if answers else default
