"""Turns a failed operation of a process group into an error that names the lost rank, on every rank.

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
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist

from gradwire._torch import is_gloo_group, store_of_group
from gradwire.errors import WorkerLost

_REPORT_S = 1.0
"""How long to wait for a report: gloo closes the connections of a rank that has timed out before that rank can report."""

_STORE_S = 3.0  # limit of one call of `_ask_store`; the lost process may be the one that serves the store
_POLL_S = 0.01

# First tags of messages that no operation uses, so that none takes a probe for its own data.
_PROBE_TAG, _LEAVE_TAG = 0x677700, 0x677800

_OWN_TIMEOUT = "application timeout caused pair closure"  # gloo's words for a connection that this rank has closed

_failures: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""What happened to the groups that this rank has left: a group that has failed once fails for the same reason again."""


class Report(TypedDict):
    """What a rank tells the others when it leaves."""

    broken: list[int]  # ranks to which nothing can be sent
    is_late: bool  # whether the operation timed out


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
        group = dist.group.WORLD if group is None else group
        happened = _failures.get(group) or _explain(group, str(error).lower())
        if happened is None:
            raise
        _failures[group] = happened
        raise WorkerLost(
            f"{happened} ({what}, seen by rank {dist.get_rank(group)} of {dist.get_world_size(group)}). The group can no "
            f"longer be used: restart from a checkpoint. Backend error: {error}",
            happened.partition(" of the process group")[0],
        ) from error


def _explain(group: Any, error: str) -> str | None:
    """Leave the group and return what happened to it; None if the error has to do with neither a loss nor a timeout."""
    is_late = "timed out" in error or _OWN_TIMEOUT in error
    is_gloo = is_gloo_group(group)
    report: Report = {"broken": _find_broken(group) if is_gloo else [], "is_late": is_late}
    if not report["broken"] and not is_late:
        return None
    lost, is_late = _leave(group, report) if is_gloo else ([], is_late)
    if lost:
        return f"{_name(lost)} of the process group {'is' if len(lost) == 1 else 'are'} gone"
    if is_late:
        advice = "check that all ranks make the same calls in the same order"
        return f"a rank of the process group did not join in time ({advice})"
    return f"{_name(report['broken'])} of the process group cannot be reached, although no process has died"


def _name(ranks: Sequence[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks)


def _others(group: Any) -> list[int]:
    return [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]


def _tags(first: int) -> range:
    """Return a tag for each network interface that gloo uses: each has its own connections, and the tag chooses."""
    return range(first, first + len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))


def _find_broken(group: Any) -> list[int]:
    """Return the ranks to which nothing can be sent, unless because this rank itself has closed its connections."""
    broken = []
    for rank in _others(group):
        try:
            for tag in _tags(_PROBE_TAG):
                dist.isend(torch.zeros(1, device="cpu"), group=group, group_dst=rank, tag=tag)
        except RuntimeError as error:
            if _OWN_TIMEOUT not in str(error).lower():
                broken.append(rank)
    return broken


def _leave(group: Any, report: Report) -> tuple[list[int], bool]:
    """Report, close all connections, and return the ranks that are lost, and whether a rank timed out."""
    store, own = store_of_group(group), dist.get_rank(group)
    answers = _ask_store(lambda: store.set(_key(own), json.dumps(report)))
    _close_connections(group)
    if answers:
        answers = _ask_store(lambda: find_lost(store, own, report))
    found: tuple[list[int], bool] = answers[0] if answers else (report["broken"], report["is_late"])
    return found


def _close_connections(group: Any) -> None:
    """Close this rank's connections: gloo does so when an operation times out, and offers nothing else."""
    for rank in _others(group):
        for tag in _tags(_LEAVE_TAG):
            with contextlib.suppress(RuntimeError):  # that it timed out, or that the connection is closed already
                request: Any = dist.irecv(torch.empty(1, device="cpu"), group=group, group_src=rank, tag=tag)
                request.wait(timedelta(milliseconds=1))


def find_lost(store: Any, own: int, report: Report) -> tuple[list[int], bool]:
    """Follow the reports from broken connection to broken connection.

    Returns:
        The ranks that were found and have not reported in time, and whether a rank has reported that it timed out.
    """
    deadline = time.monotonic() + _REPORT_S
    reports = {own: report}
    while True:
        found = {rank for known in reports.values() for rank in known["broken"]}
        missing = sorted(found - reports.keys())
        reported = [rank for rank in missing if store.check([_key(rank)])]
        reports.update((rank, json.loads(store.get(_key(rank)))) for rank in reported)
        if not reported:
            if not missing or time.monotonic() > deadline:
                return missing, any(known["is_late"] for known in reports.values())
            time.sleep(_POLL_S)


def _key(rank: int) -> str:
    return f"gradwire/left/{rank}"


def _ask_store(ask: Callable[[], Any]) -> list[Any]:
    """Return what `ask` returns, or nothing if the store fails or does not answer."""
    answers = []

    def run() -> None:
        with contextlib.suppress(Exception):  # stores have many; without one, the own findings have to do
            answers.append(ask())

    thread = threading.Thread(target=run, name="gradwire-store", daemon=True)
    thread.start()
    thread.join(_STORE_S)
    return answers
