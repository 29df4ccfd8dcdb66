"""Conversion to and from `torch.distributed.tensor.DTensor`, where that can express the layout, without copies.

A DTensor is cut along each axis of a mesh of ranks as `torch.chunk` cuts, one part for each rank:

    mesh of 4, [Shard(0)]            chunks of rows, one for each rank: a ChunkShardingSpec
    mesh of 2 x 2, [Shard(0), Shard(1)]    blocks: an EnumerableShardingSpec

Other layouts (uneven ones, several shards of a rank) can be redistributed first. Both share the memory of the parts, and
gradients go through the conversion.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import Box, whole
from gradwire.shard.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from gradwire.shard.placement import layout_of
from gradwire.shard.sharding_spec import get_chunked_dim_size, get_split_size, infer_sharding_spec
from gradwire.shard.tensor import ShardedTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def to_dtensor(tensor: ShardedTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Return the same tensor as a `DTensor`; every rank of its group calls it.

    Args:
        tensor: A sharded tensor of a process group.
        device_mesh: The mesh; by default all ranks of the group in order.

    Raises:
        ValueError: It belongs to RPC workers, or its sharding cannot be expressed by a DTensor on that mesh.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    backend = tensor._backend
    if not isinstance(backend, GroupBackend):
        raise ValueError(
            "a DTensor is sharded over the ranks of a process group, but this tensor is sharded over RPC workers"
        )
    mesh = device_mesh if device_mesh is not None else DeviceMesh.from_group(backend._group, tensor.device.type)
    dims = _find_dims(tensor, backend, mesh)
    if dims is None:
        raise ValueError(
            f"{tensor!r} is sharded in a way that a DTensor on {mesh} cannot express: each rank must have one chunk, "
            f"as torch.chunk makes them, in the order of the mesh. redistribute() it by such a spec first"
        )
    local = _local_part(tensor, _boxes_on(mesh, dims, tensor.size())[dist.get_rank()])
    stride = torch.empty(tensor.size(), device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(dim) for dim in dims], run_check=False, shape=tensor.size(), stride=stride
    )


def _find_dims(tensor: ShardedTensor, backend: GroupBackend, mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Return the dimension that each axis of the mesh cuts, if there are such."""
    members = dist.get_process_group_ranks(backend._group)
    if sorted(mesh.mesh.flatten().tolist()) != sorted(members):
        return None
    owned: dict[int, list[Box]] = {rank: [] for rank in members}
    for box, place in zip(tensor._layout.boxes, tensor._layout.places, strict=True):
        if box.num_elements:
            owned[members[int(place)]].append(box)
    for dims in itertools.product(range(tensor.dim()), repeat=mesh.ndim):
        wanted = _boxes_on(mesh, dims, tensor.size())
        if all(owned[rank] == ([box] if box.num_elements else []) for rank, box in wanted.items()):
            return dims
    return None


def _boxes_on(mesh: DeviceMesh, dims: Sequence[int], size: Sequence[int]) -> dict[int, Box]:
    """Return the box of each rank of a mesh, if each axis of it cuts one dimension."""
    found = {}
    for where in itertools.product(*(range(length) for length in mesh.shape)):
        box = whole(size)
        for dim, position, num_chunks in zip(dims, where, mesh.shape, strict=True):
            offset, length = box.ranges[dim]
            split = get_split_size(length, num_chunks)
            box = box.with_range(dim, offset + split * position, get_chunked_dim_size(length, split, position))
        found[int(mesh.mesh[where])] = box
    return found


def _local_part(tensor: ShardedTensor, box: Box) -> torch.Tensor:
    """Return the part that is that box; an empty one may be so along another dimension."""
    parts = [part for part in tensor._parts if isinstance(part, torch.Tensor)]
    if not box.num_elements:
        return parts[0].reshape(box.sizes)
    return next(part for part in parts if part.numel())


def from_dtensor(dtensor: DTensor) -> ShardedTensor:
    """Return the same tensor as a `ShardedTensor`; every rank of its mesh calls it.

    Args:
        dtensor: Sharded along every axis of its mesh that has more than one rank.

    Raises:
        ValueError: It is replicated or a sum along an axis, or its mesh is not all ranks of a process group.
    """
    mesh, placements = dtensor.device_mesh, dtensor.placements
    dims = _dims_of(dtensor)
    group = _group_of(mesh)
    boxes = _boxes_on(mesh, dims, dtensor.size())
    shards = [
        ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/{_device(dtensor, rank)}") for rank, box in boxes.items()
    ]
    local = dtensor.to_local()
    if tuple(local.size()) != boxes[dist.get_rank()].sizes:
        raise ValueError(
            f"this rank's part of the DTensor has size {list(local.size())}, but {placements} on {mesh} require "
            f"{list(boxes[dist.get_rank()].sizes)}"
        )
    properties = TensorProperties(dtensor.dtype, requires_grad=local.requires_grad)
    metadata = ShardedTensorMetadata(shards, torch.Size(dtensor.size()), properties)
    backend = GroupBackend(group)
    made = ShardedTensor._make(backend, infer_sharding_spec(shards), metadata, [local], layout_of(shards, backend))
    made._is_result = not local.is_leaf
    return made


def _dims_of(dtensor: DTensor) -> list[int]:
    """Return the dimension that each axis of the mesh cuts; any for an axis of one rank."""
    from torch.distributed.tensor import Shard

    dims = []
    for axis, placement in enumerate(dtensor.placements):
        if type(placement) is Shard:
            dims.append(placement.dim % dtensor.dim())
        elif dtensor.device_mesh.size(axis) == 1 and dtensor.dim() and not placement.is_partial():
            dims.append(0)
        else:
            raise ValueError(
                f"a DTensor that is {placement} along axis {axis} of its mesh cannot be a ShardedTensor, which has "
                f"each element once; redistribute it to Shard(...) first"
            )
    return dims


def _group_of(mesh: DeviceMesh) -> Any:
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() == dist.get_world_size():
        return dist.group.WORLD
    raise ValueError(
        f"{mesh} has {mesh.ndim} axes and does not cover all ranks, so no process group has exactly its ranks; use a mesh "
        "of all ranks, or of one axis"
    )


def _device(dtensor: DTensor, rank: int) -> str:
    """Return the device of a rank's part; meshes tell only the kind of device."""
    kind = dtensor.device_mesh.device_type
    return kind if kind == "cpu" else f"{kind}:{rank % max(1, getattr(torch, kind).device_count())}"
