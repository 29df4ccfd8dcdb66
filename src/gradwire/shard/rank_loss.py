"""Turns a failed operation of a process group into an error that names the lost rank, on every rank.

Gloo reports a broken connection only to the ranks that exchange data with the lost one. A rank that waits for one of those
would learn of the loss when the group times out:

    rank 0 ---- waits for ----> rank 2 ---- waits for ----> rank 1, lost

So a rank whose operation fails leaves the group: it reports in the group's store which connections it found broken, and then
closes its own, which fails the ranks that wait for it. A rank at a broken connection is therefore lost only if it has not
reported; otherwise its report says where to look next.

Gloo does not tell a rank that is in the middle of a message, so a rank that leaves finishes the messages that it is sending.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist

from gradwire._torch import is_gloo_group, store_of_group
from gradwire.errors import WorkerLost
from gradwire.rpc.meeting_store import run_in_thread

_REPORT_S = 2.0
"""How long to wait for a report: gloo closes the connections of a rank that has timed out before that rank can report."""

_FINISH_S = 2.0  # limit for the messages that a rank is sending when it leaves; the receiver may be the lost rank
_STORE_S = 4.0  # limit of one question to the store, whose server may be the lost process
_POLL_S = 0.01

# First tags of messages that no operation uses, so that none takes a probe for its own data.
_PROBE_TAG, _LEAVE_TAG = 0x677700, 0x677800

_OWN_TIMEOUT = "application timeout caused pair closure"  # gloo's words for a connection that this rank has closed


class Report(TypedDict):
    """A rank's report to the others when it leaves."""

    broken: list[int]  # ranks to which nothing can be sent
    is_late: bool  # whether the operation timed out


class _Failure(NamedTuple):
    """Why a group failed."""

    ranks: str
    happened: str


_failures: weakref.WeakKeyDictionary[Any, _Failure] = weakref.WeakKeyDictionary()
"""Why each group failed that this rank has left; later operations of the group raise for the same reason."""


@contextlib.contextmanager
def collective(group: Any, what: str, sends: Iterable[Any] = ()) -> Iterator[None]:
    """Turn the errors of a collective operation into `WorkerLost` if they come from a lost rank.

    The group cannot be used after that: with gloo, this rank has closed its connections.

    Args:
        group: The process group; None for the default one.
        what: The operation, for the error.
        sends: Requests of messages that the operation has begun to send. They are finished first.
    """
    group = dist.group.WORLD if group is None else group  # now: the default group may be another one later
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, WorkerLost) or group is None:  # None: there is no default group either
            raise
        failure = _failures.get(group) or _explain(group, str(error).lower(), sends)
        if failure is None:
            raise
        _failures[group] = failure
        raise WorkerLost(
            f"{failure.ranks} of the process group {failure.happened} ({what}, seen by rank {dist.get_rank(group)} of "
            f"{dist.get_world_size(group)}). The group can no longer be used: restart from a checkpoint. Backend error: "
            f"{error}",
            failure.ranks,
        ) from error


def _explain(group: Any, error: str, sends: Iterable[Any]) -> _Failure | None:
    """Leave the group and return why it failed; None if the error has to do with neither a loss nor a timeout."""
    is_late = "timed out" in error or _OWN_TIMEOUT in error
    is_gloo = is_gloo_group(group)
    report: Report = {"broken": _find_broken(group) if is_gloo else [], "is_late": is_late}
    if not report["broken"] and not is_late:
        return None
    lost, is_late = _leave(group, report, sends) if is_gloo else ([], is_late)
    if lost:
        return _Failure(_name(lost), "is gone" if len(lost) == 1 else "are gone")
    if is_late:
        return _Failure("a rank", "did not join in time (check that all ranks make the same calls in the same order)")
    return _Failure(_name(report["broken"]), "cannot be reached, although every rank is still running")


def _name(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"


def _others(group: Any) -> list[int]:
    return [rank for rank in range(dist.get_world_size(group)) if rank != dist.get_rank(group)]


def _tags(first: int) -> range:
    """Return a tag for each network interface that gloo uses: each has its own connections, and the tag chooses."""
    return range(first, first + len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")))


def _find_broken(group: Any) -> list[int]:
    """Return the ranks to which nothing can be sent, except where this rank itself closed the connection."""
    broken = []
    for rank in _others(group):
        try:
            for tag in _tags(_PROBE_TAG):
                dist.isend(torch.zeros(1, device="cpu"), group=group, group_dst=rank, tag=tag)
        except RuntimeError as error:
            if _OWN_TIMEOUT not in str(error).lower():
                broken.append(rank)
    return broken


def _leave(group: Any, report: Report, sends: Iterable[Any]) -> tuple[list[int], bool]:
    """Report, finish sending, close all connections, and return the ranks that are lost, and whether a rank timed out."""
    store, own = store_of_group(group), dist.get_rank(group)
    found, has_reported = (report["broken"], report["is_late"]), False
    with contextlib.suppress(Exception):  # stores raise errors of many kinds; what this rank found itself is left then
        run_in_thread(lambda: store.set(_key(own), json.dumps(report)), time.monotonic() + _STORE_S)
        has_reported = True
    _finish(sends)
    _close_connections(group)
    if has_reported:
        with contextlib.suppress(Exception):
            found = run_in_thread(lambda: find_lost(store, own, report), time.monotonic() + _STORE_S)
    return found


def _finish(sends: Iterable[Any]) -> None:
    """Wait until messages have been sent, or cannot be."""
    deadline = time.monotonic() + _FINISH_S
    for request in sends:
        with contextlib.suppress(RuntimeError):  # gloo closes all connections if time is up: that comes next anyway
            request.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


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
