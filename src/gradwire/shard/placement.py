"""Placements, such as ``"rank:0/cpu"`` or ``"worker0/cpu"``, and the backend that reaches them."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist

from gradwire import rpc
from gradwire._torch import RemoteDevice
from gradwire.errors import ConfigurationError, GradwireError
from gradwire.shard.backend import Backend
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import Layout, Place
from gradwire.shard.metadata import ShardMetadata
from gradwire.shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec, as_placement
from gradwire.shard.worker_backend import WorkerBackend
from gradwire.types import WorkerInfo

current_process_group: ContextVar[Any] = ContextVar("gradwire_shard_process_group", default=None)
"""Set by `load_with_process_group`."""


def backend_for(shards: Sequence[ShardMetadata], process_group: Any = None) -> Backend:
    kinds = {_kind(shard.placement) for shard in shards}
    if len(kinds) > 1:
        raise ValueError(
            f"placements name either ranks ('rank:0/cpu') or RPC workers ('worker0/cpu'), not both: "
            f"{[str(shard.placement) for shard in shards]}"
        )
    if kinds == {"worker"}:
        if process_group is not None:
            raise ValueError("a process group was given, but the placements name RPC workers")
        _check_rpc(shards[0].placement)
        here = rpc._get_current_rpc_agent()
        names = [shard.placement.worker_name() for shard in shards if shard.placement is not None]
        if here.trust == "data" and any(name != here.info.name for name in names):
            raise ConfigurationError(
                'sharded tensors over RPC workers need trust="code": their operations run functions of torch where the '
                "shards are. Use a process group, or remote modules with exposed functions"
            )
        return WorkerBackend()
    if not dist.is_initialized():
        raise RuntimeError("placements name ranks, but there is no process group; call init_process_group first")
    return GroupBackend(process_group if process_group is not None else current_process_group.get())


def _kind(placement: RemoteDevice | None) -> str:
    if placement is None:
        raise ValueError("a shard has no placement; give it one, such as 'rank:0/cpu' or 'worker0/cpu'")
    if placement.rank() is not None:
        return "rank"
    if placement.worker_name() is not None:
        return "worker"
    raise ValueError(
        f"placement {placement} names only a device; name its worker, too: 'rank:0/{placement}' or "
        f"'worker0/{placement}'"
    )


def layout_of(shards: Sequence[ShardMetadata], backend: Backend) -> Layout:
    placements: list[Any] = [shard.placement for shard in shards]
    places: list[Place]
    if isinstance(backend, GroupBackend):
        places = [_group_rank(item.rank(), backend) for item in placements]
    else:
        places = [_find_worker(item).name for item in placements]
    return backend.complete(Layout(tuple(shard.box for shard in shards), tuple(places)))


def _find_worker(placement: RemoteDevice) -> WorkerInfo:
    _check_rpc(placement)
    name = placement.worker_name()
    assert name is not None  # the caller has looked
    try:
        return rpc.get_worker_info(name)
    except GradwireError as error:
        raise ValueError(f"Invalid worker name {name!r} in placement {placement}: {error}") from error


def _check_rpc(placement: RemoteDevice | None) -> None:
    if not rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            f"RPC framework needs to be initialized for placements with worker names, such as {placement}; call "
            "gradwire.rpc.init_rpc first"
        )


def _group_rank(rank: int, backend: GroupBackend) -> int:
    """Return the rank in the group; outside the group, where its members are not known, the rank among all."""
    if not backend.is_member:
        return rank
    members = dist.get_process_group_ranks(backend._group)
    if rank not in members:
        raise ValueError(f"Global rank {rank} does not exist in input process group: it has {members}")
    return members.index(rank)


def placement_of(place: Place, device: Any, backend: Backend) -> RemoteDevice:
    if isinstance(place, str):
        return RemoteDevice(f"{place}/{device}")
    assert isinstance(backend, GroupBackend)
    is_local = backend.group is not None and backend.is_member
    rank = dist.get_global_rank(backend.group, place) if is_local else place
    return RemoteDevice(f"rank:{rank}/{device}")


def _parse_and_validate_remote_device(pg: Any, remote_device: RemoteDevice | None) -> tuple[int | None, torch.device]:
    """Return the rank and the device that a placement names: PyTorch's private name.

    The rank is that among all ranks, or that of the RPC worker; None if the placement names neither.
    """
    if remote_device is None:
        raise ValueError("remote device is None; give the shard one, such as 'rank:0/cpu' or 'worker0/cpu'")
    device: torch.device = remote_device.device()
    if remote_device.worker_name() is not None:
        return _find_worker(remote_device).id, device
    rank = remote_device.rank()
    if rank is not None:
        _group_rank(rank, GroupBackend(pg))
    return rank, device


def placements_of(spec: Any) -> list[Any]:
    """Return the placements of a spec, where they are known without a tensor."""
    if isinstance(spec, ChunkShardingSpec):
        return list(spec.placements)
    return [shard.placement for shard in spec.shards] if isinstance(spec, EnumerableShardingSpec) else []


def find_group(specs: Sequence[ShardingSpec], process_group: Any) -> GroupBackend | None:
    """Return the ranks that must agree; None over RPC workers, where one worker decides."""
    group = process_group if process_group is not None else current_process_group.get()
    names = [as_placement(item) for spec in specs for item in placements_of(spec) if item is not None]
    has_ranks = any(item.rank() is not None for item in names)
    has_workers = any(item.rank() is None and item.worker_name() is not None for item in names)
    if not dist.is_initialized() or (has_workers and not has_ranks):
        return None
    if group is None and not has_ranks and rpc._is_current_rpc_agent_set():
        return None  # no placements, as of Sharders only: what an RPC worker does need not be done by all ranks
    found = GroupBackend(group)
    if not found.is_member:
        raise RuntimeError("this rank is not in the process group; only its members can shard with it")
    return found
