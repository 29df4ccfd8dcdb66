"""Sharded tensors in messages and in pickles.

Over RPC workers a sharded tensor may be an argument or a result of a call, on its own or inside another value: its parts are
references, so only they travel, and the receiver can use the tensor like its sender. Parts that are on the sender become
references, too.

    sender                                                   receiver
    metadata, spec, [tensor, reference to b, ...]  ------>   metadata, spec, [reference to sender, reference to b, ...]

In a process group every rank has its own parts and nothing else. Such a tensor cannot be sent; it can be pickled, for
``torch.save``, and loaded by the same rank of a group of the same size.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist

from gradwire import rpc
from gradwire._torch import RemoteDevice
from gradwire.errors import CannotSend
from gradwire.rpc import codec
from gradwire.rref import RRef, context
from gradwire.shard.backend import Part
from gradwire.shard.creation import init_from_local_shards_and_metadata, share_references
from gradwire.shard.dispatch import implements
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.layout import Layout, everywhere
from gradwire.shard.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from gradwire.shard.placement import current_process_group, layout_of
from gradwire.shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    check_tensor,
    validate_shards,
)
from gradwire.shard.tensor import ShardedTensor
from gradwire.shard.worker_backend import WorkerBackend
from gradwire.wire.serialization import register_plain_type

_MOST_DIMS = 64
_MOST_SHARDS = 4096  # looking for overlaps takes time with more


def describe(tensor: ShardedTensor) -> tuple[Any, ...]:
    """Return metadata and spec of a tensor: lists, numbers and texts, unless the spec is of a program's own class."""
    metadata, spec = tensor._metadata, tensor._sharding_spec
    properties = metadata.tensor_properties
    shards = [(item.shard_offsets, item.shard_sizes, str(item.placement)) for item in metadata.shards_metadata]
    described: Any = None if type(spec) is EnumerableShardingSpec else spec
    if type(spec) is ChunkShardingSpec:
        described = [spec.dim, [str(item) for item in spec.placements]]
    return list(metadata.size), shards, properties.dtype, tensor.requires_grad, properties.pin_memory, described


def restore(described: Any) -> tuple[ShardedTensorMetadata, ShardingSpec]:
    """Return the metadata and the spec that `describe` was given."""
    size, shards, dtype, requires_grad, pin_memory, spec = described
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected a dtype, not {dtype!r}")
    if not isinstance(size, Sequence) or len(size) > _MOST_DIMS or len(shards) > _MOST_SHARDS:
        raise ValueError(f"a size of at most {_MOST_DIMS} dimensions and at most {_MOST_SHARDS} shards are needed")
    found = [
        ShardMetadata(offsets, sizes, None if placement == "None" else RemoteDevice(placement))
        for offsets, sizes, placement in shards
    ]
    validate_shards(found)
    check_tensor(found, size)
    properties = TensorProperties(dtype, requires_grad=bool(requires_grad), pin_memory=bool(pin_memory))
    if isinstance(spec, list):
        spec = ChunkShardingSpec(*spec)
        if not -len(size) <= spec.dim < len(size):
            raise ValueError(f"dimension {spec.dim} is out of range for a tensor of {len(size)} dimensions")
    spec = EnumerableShardingSpec(found) if spec is None else spec
    return ShardedTensorMetadata(found, torch.Size(size), properties), spec


def _pack(tensor: ShardedTensor) -> tuple[Any, ...]:
    if not isinstance(tensor._backend, WorkerBackend):
        raise CannotSend(
            f"{tensor!r} cannot be sent: it belongs to a process group, and every rank holds its own shards. Send "
            f"local_tensor() or full_tensor(), or shard it over RPC workers (placements such as 'worker0/cpu')"
        )
    batch = tensor._batch.boxes[0].sizes if tensor._batch is not None else None
    return describe(tensor), _references(tensor), tensor._is_result, batch, tensor._is_param


def _references(tensor: ShardedTensor) -> list[RRef[Any]]:
    """Return references to all parts. Keep those to parts that are here: a message may be packed twice before it leaves."""
    known: list[RRef[Any]] = tensor.__dict__.get("_references", [])
    now = context.here()  # another one than then, if this process has become another worker
    by_part = {id(rref.local_value()): rref for rref in known if rref._known is now}
    own = {id(part): by_part.get(id(part)) or RRef(part) for part in tensor._parts if isinstance(part, torch.Tensor)}
    tensor.__dict__["_references"] = list(own.values())
    return [own[id(part)] if isinstance(part, torch.Tensor) else part for part in tensor._parts]


def _rebuild(fields: Sequence[Any]) -> ShardedTensor:
    """Make a tensor that came in a message. The fields are foreign data."""
    described, parts, is_result, batch, is_parameter = fields
    if not isinstance(parts, list) or not all(isinstance(part, RRef) for part in parts):
        raise TypeError("expected a list of references, one for each shard")
    metadata, spec = restore(described)
    shards = metadata.shards_metadata
    places = [item.placement.worker_name() or "" if item.placement else "" for item in shards]
    if not all(places) or not isinstance(spec, ShardingSpec):
        raise ValueError("not a tensor that is sharded over RPC workers")
    if [part.owner_name() for part in parts] != places:
        raise ValueError(f"expected {len(places)} references, one for each shard, owned by the worker of the shard")
    layout = Layout(tuple(item.box for item in shards), tuple(places))
    dtype = metadata.tensor_properties.dtype
    found = [_unwrap(part, item, dtype) for part, item in zip(parts, shards, strict=True)]
    made = ShardedTensor._make(WorkerBackend(), spec, metadata, found, layout)
    made._is_result = bool(is_result)
    if batch is not None:  # the worker that runs the program has all rows
        size = tuple(torch.Size(batch))
        if len(size) > _MOST_DIMS or any(length < 0 for length in size):
            raise ValueError(f"{size} is not a valid tensor size")
        made._batch = everywhere(size, [rpc.get_worker_info().name])
    made._is_param = bool(is_parameter)
    return made


def _unwrap(part: RRef[Any], shard: ShardMetadata, dtype: torch.dtype) -> Part:
    """Return a part that is here as the tensor itself, unless it is still being made: no thread waits to read a message.

    One that could not be made stays a reference, which raises its error when it is used.
    """
    if not part.is_owner() or not part._state.is_done or part._state.error is not None:
        return part
    value = part.local_value()
    if not isinstance(value, torch.Tensor) or list(value.shape) != shard.shard_sizes or value.dtype != dtype:
        raise ValueError(f"the reference to shard {shard} refers to another value")
    return value


register_plain_type(ShardedTensor, "gradwire.ShardedTensor", _pack, _rebuild)


@dataclass
class ProcessGroupState:
    """The rank that pickled a tensor: only the same rank of a group of the same size can load it."""

    local_rank: int
    global_rank: int
    local_world_size: int
    global_world_size: int

    @classmethod
    def current(cls, group: Any) -> ProcessGroupState:
        return cls(dist.get_rank(group), dist.get_rank(), dist.get_world_size(group), dist.get_world_size())

    def check(self, group: Any) -> None:
        """Check that this process is the one that pickled the tensor."""
        for (name, then), now in zip(vars(self).items(), vars(ProcessGroupState.current(group)).values(), strict=True):
            if then != now:
                raise RuntimeError(
                    f"{name.replace('_', ' ').capitalize()} at save time was {then}, but at load time was {now}. To "
                    f"load on other ranks, save with gradwire.checkpoint"
                )


ShardedTensor.ProcessGroupState = ProcessGroupState  # type: ignore[attr-defined]


@implements(torch.Tensor.__reduce_ex__)
def _reduce(func: Any, tensor: ShardedTensor, protocol: Any = None) -> Any:
    """Prepare a tensor for a message or a pickle."""
    if codec.transfers.outgoing is not None:
        return _rebuild, (_pack(tensor),)
    backend = tensor._backend
    if not isinstance(backend, GroupBackend):
        raise pickle.PicklingError(
            f"{tensor!r} cannot be pickled: its shards are on other workers. Pass it in the arguments or the result of "
            f"a call, save it with gradwire.checkpoint, or pickle full_tensor()"
        )
    state = astuple(ProcessGroupState.current(backend.group))
    with torch.no_grad():
        parts = [part.detach() for part in tensor._parts if isinstance(part, torch.Tensor)]
    return load_pickled, (describe(tensor), parts, state, tensor._init_rrefs, tensor._is_param)


def _check_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "Need to initialize default process group (init_process_group) before loading a pickled ShardedTensor"
        )


def load_pickled(
    described: Any,
    parts: list[torch.Tensor],
    state: tuple[int, int, int, int],
    has_references: bool,
    is_parameter: bool,
) -> ShardedTensor:
    """Make a tensor of a process group that comes from a pickle; the group is that of `load_with_process_group`."""
    _check_group()
    backend = GroupBackend(current_process_group.get())
    ProcessGroupState(*state).check(backend.group)
    metadata, spec = restore(described)
    requires_grad = metadata.tensor_properties.requires_grad
    layout = layout_of(metadata.shards_metadata, backend)
    made = ShardedTensor._make(backend, spec, metadata, [part.requires_grad_(requires_grad) for part in parts], layout)
    made._is_param = is_parameter
    return share_references(made) if has_references else made


def _set_state(self: ShardedTensor, state: tuple[Any, ...]) -> None:
    """Load what PyTorch's own class has put into a pickle; gradwire's pickles do not come here."""
    shards, metadata, pickled_by, spec, has_references = state
    _check_group()
    group = current_process_group.get()
    pickled_by.check(group)
    made = init_from_local_shards_and_metadata(shards, metadata, group, has_references, spec)
    self._take_over(made)
    self._remote_shards = made._remote_shards


ShardedTensor.__setstate__ = _set_state  # type: ignore[method-assign, assignment]
