"""A checkpoint written by two owners, and the same bytes written by `safetensors.torch.save_file` in one process.

Both write into an empty folder on the disk that temporary files are on, from memory that was touched before, and both have
everything on disk when the time is taken: gradwire always does that, for `save_file` the file is synced afterwards. How long
`save_file` takes without that is noted, too.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from rows import duration, ratio_of

NUM_TENSORS = 16
SERVERS = ("server", "server2")
BAR = 0.7


@functools.cache
def tensors(num_bytes: int, num_tensors: int) -> torch.nn.ParameterList:
    """What is saved; lives where it is first asked for."""
    size = num_bytes // num_tensors // 4
    return torch.nn.ParameterList([torch.empty(size).normal_() for _ in range(num_tensors)])


def time_save(peer: Any, num_bytes: int) -> float:
    """Seconds that a checkpoint takes.

    Raises:
        AssertionError: What was written is not what is on the servers.
    """
    from gradwire import checkpoint

    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        state = {name: _reference(peer, name, num_bytes) for name in SERVERS}
        start = time.perf_counter()
        summary = checkpoint.save(folder / "checkpoint", state, progress=False)
        seconds = time.perf_counter() - start
        if [file.worker for file in summary.files] != list(SERVERS) or summary.num_bytes < num_bytes:
            raise AssertionError(f"not everything was saved: {summary!r}")
        return seconds
    finally:
        shutil.rmtree(folder)


@functools.cache
def _reference(peer: Any, server: str, num_bytes: int) -> Any:
    found = peer.rpc.remote(server, tensors, args=(num_bytes // len(SERVERS), NUM_TENSORS // len(SERVERS)))
    found._get_type()  # is made, and its memory touched
    return found


def time_save_file(_peer: Any, num_bytes: int) -> tuple[float, float]:
    """Seconds that the library takes for the same bytes: until they are on disk, and until it returns."""
    state = tensors(num_bytes, NUM_TENSORS).state_dict()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        start = time.perf_counter()
        safetensors.torch.save_file(state, folder / "all.safetensors")
        returned = time.perf_counter() - start
        descriptor = os.open(folder / "all.safetensors", os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        return time.perf_counter() - start, returned
    finally:
        shutil.rmtree(folder)


def checkpoint_row(name: str, ours: list[float], library: list[tuple[float, float]]) -> dict[str, Any]:
    """A row of the table; the ratio is the speed of gradwire by that of the library, both with everything on disk."""
    row: dict[str, Any] = {"case": name, "bar": "-", "rounds": {"gradwire": ours, "safetensors": library}}
    if not ours or not library:
        return row
    synced, returned = ([times[kind] for times in library] for kind in (0, 1))
    row["gradwire"] = duration(sorted(ours)[len(ours) // 2])
    row["beside_ratio"], loose = ratio_of(synced, ours), ratio_of(returned, ours)
    row["beside"] = (
        f"save_file {duration(sorted(synced)[len(synced) // 2])}, gradwire at {row['beside_ratio']:.2f} of its speed"
    )
    row["beside"] += f" (bar >= {BAR}); {loose:.2f} if save_file need not reach the disk"
    row["met"] = row["beside_ratio"] >= BAR
    return row
