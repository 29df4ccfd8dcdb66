"""Sharded tensors of what each rank has already, and what is said of local shards: PyTorch's private names.

Programs that keep their shards themselves (embedding libraries, trainers) call these as class methods of `ShardedTensor`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.shard.creation import _device, _flat, _size, share_references
from gradwire.shard.engines import Engine, Part
from gradwire.shard.group_engine import GroupEngine, NoGroupEngine
from gradwire.shard.layouts import Layout
from gradwire.shard.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from gradwire.shard.placing import _parse_and_validate_remote_device as _parse_and_validate_remote_device
from gradwire.shard.placing import engine_for, layout_of
from gradwire.shard.sharding_spec import ShardingSpec, check_tensor, infer_sharding_spec, validate_shards
from gradwire.shard.shards import Shard
from gradwire.shard.tensor import ShardedTensor, ShardedTensorBase


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """A sharded tensor of the shards that each rank has.

    Args:
        local_shards: Those of this rank; may be empty.
        global_size: Of the whole. With ``None`` for a length that is not known, shards are taken to be consecutive rows, in
            the order of the ranks; size and offsets are found from that, and written to the metadata of the shards.
        process_group: The ranks; None for the default group.
        init_rrefs: Whether ranks make references to their shards for each other; see `share_references`.

    Raises:
        ValueError: The shards of all ranks do not make up a tensor of that size, or ranks say different things. Every rank
            raises it, also if only one is to blame.
    """
    engine = GroupEngine(process_group)
    is_stacked = None in _flat(global_size)
    size = _size([0 if item is None else item for item in _flat(global_size)])
    problem = next(filter(None, (find_problem(shard, dist.get_rank()) for shard in local_shards)), "")
    told = (list(size), [(s.metadata, TensorProperties.create_from_tensor(s.tensor)) for s in local_shards])
    said = engine.gather_objects((problem, told))
    for text, _ in said:
        if text:
            raise ValueError(text)
    metadata = _agree([items for _, items in said], is_stacked)
    if is_stacked:
        own = (item for item in metadata.shards_metadata if _rank_of(item) == dist.get_rank())
        for shard, found in zip(local_shards, own, strict=True):
            shard.metadata = found
    made = _from_own_shards(engine, metadata, local_shards, infer_sharding_spec(metadata.shards_metadata))
    if init_rrefs:
        share_references(made)
    return made


def find_problem(shard: Shard, rank: int) -> str:
    """Why a shard cannot be one of that rank's (among all ranks); empty if it can."""
    tensor, placement = shard.tensor, shard.metadata.placement
    if tensor.layout != torch.strided:
        return f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{rank}!"
    if not tensor.is_contiguous():
        return f"Only torch.contiguous_format memory_format is currently supported! A shard of rank:{rank} has another"
    if placement is None or placement.rank() != rank:
        return (
            f"Local shard metadata's rank does not match with the rank in its process group! Found current rank in the "
            f"process group: {rank}, local ShardMetadata placement: {placement}"
        )
    return ""


def _agree(
    said: Sequence[tuple[list[int], list[tuple[ShardMetadata, TensorProperties]]]], is_stacked: bool
) -> ShardedTensorMetadata:
    """What all ranks together say of the tensor; all get the same, and so all raise the same.

    Args:
        said: By rank: the size of the whole, and the shards that it has, with what is known of each.
        is_stacked: Whether shards are consecutive rows, and neither offsets nor the size are known yet.
    """
    size = said[0][0]
    for rank, (other, _) in enumerate(said):
        if other != size:
            raise ValueError(
                f"ShardedTensor global_size property does not match from different ranks! Found "
                f"global_size={size} on rank:0, and global_size={other} on rank:{rank}"
            )
    shards, properties, first_rank = [], None, 0
    for rank, (_, items) in enumerate(said):
        for metadata, found in items:
            if properties is None:
                properties, first_rank = found, rank
            for name in ("dtype", "layout", "requires_grad", "pin_memory"):
                if getattr(found, name) != getattr(properties, name):
                    raise ValueError(
                        f"ShardedTensor {name} property does not match from different ranks! Found {name}="
                        f"{getattr(properties, name)} on rank:{first_rank}, and {name}={getattr(found, name)} on rank:{rank}"
                    )
            shards.append(metadata)
    if properties is None:
        raise ValueError("a ShardedTensor would have no local shards on all ranks; it needs at least one shard")
    if is_stacked:
        size = stack_shards(shards, 0)
    validate_shards(shards)
    check_tensor(shards, size)
    return ShardedTensorMetadata(shards, torch.Size(size), properties)


def stack_shards(shards: Sequence[ShardMetadata], dim: int) -> list[int]:
    """Gives shards, in place, the offsets that they have one after the other along a dimension, in the order of ranks.

    Returns:
        The size of the whole.

    Raises:
        AssertionError: A shard names no rank.
    """
    start = 0
    for shard in sorted(shards, key=_rank_of):
        shard.shard_offsets = [start if number == dim else 0 for number in range(len(shard.shard_sizes))]
        start += shard.shard_sizes[dim]
    return [start if number == dim else length for number, length in enumerate(shards[0].shard_sizes)]


def _rank_of(shard: ShardMetadata) -> int:
    rank = shard.placement.rank() if shard.placement is not None else None
    if rank is None:
        raise AssertionError(f"every shard must say which rank has it, unlike {shard}")
    return rank


def _from_own_shards(
    engine: Engine,
    metadata: ShardedTensorMetadata,
    local_shards: Sequence[Shard],
    spec: ShardingSpec,
    layout: Layout | None = None,
) -> ShardedTensor:
    layout = layout if layout is not None else layout_of(metadata.shards_metadata, engine)
    tensors = {
        tuple(shard.metadata.shard_offsets) + tuple(shard.metadata.shard_sizes): shard.tensor for shard in local_shards
    }
    parts: list[Part] = []
    for number in engine.numbers(layout):
        if number < len(metadata.shards_metadata):
            box = layout.boxes[number]
            if box.offsets + box.sizes not in tensors:
                raise ValueError(f"this rank has no tensor for its shard {metadata.shards_metadata[number]}")
            parts.append(tensors[box.offsets + box.sizes])
        else:
            parts.append(_nothing(metadata, layout.num_dims))
    return ShardedTensor._make(engine, spec, metadata, parts, layout)


def _nothing(metadata: ShardedTensorMetadata, num_dims: int) -> torch.Tensor:
    properties = metadata.tensor_properties
    device = _device(metadata, len(metadata.shards_metadata))
    return torch.empty([0] * num_dims, dtype=properties.dtype, requires_grad=properties.requires_grad, device=device)


def init_from_local_shards_and_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: Any = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """The same, if every rank knows the metadata already: nothing is exchanged.

    Raises:
        ValueError: The metadata is not that of a tensor, or this rank's shards are others.
        RuntimeError: This rank has more or fewer shards than the metadata says.
    """
    shards = sharded_tensor_metadata.shards_metadata
    spec = _check_metadata(sharded_tensor_metadata, sharding_spec)
    engine = engine_for(shards, process_group)
    if isinstance(engine, GroupEngine):
        rank = dist.get_rank()
        expected = [shard for shard in shards if _rank_of(shard) == rank]
        if len(local_shards) != len(expected):
            raise RuntimeError(
                f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata in "
                f"sharded_tensor_metadata ({len(expected)}) on rank ({rank})"
            )
        for shard in local_shards:
            _check_properties(shard, sharded_tensor_metadata.tensor_properties, rank)
    made = _from_own_shards(engine, sharded_tensor_metadata, local_shards, spec)
    if init_rrefs:
        share_references(made)
    return made


def _check_metadata(metadata: ShardedTensorMetadata, spec: ShardingSpec | None) -> ShardingSpec:
    """The spec, if the metadata is that of a tensor."""
    shards = metadata.shards_metadata
    if not shards:
        raise ValueError("shards_metadata must not be empty!")
    if metadata.tensor_properties.layout != torch.strided:
        raise ValueError("Only torch.strided layout is currently supported")
    validate_shards(shards)
    check_tensor(shards, metadata.size)
    return spec if spec is not None else infer_sharding_spec(shards)


def _check_properties(shard: Shard, wanted: TensorProperties, rank: int) -> None:
    found = TensorProperties.create_from_tensor(shard.tensor)
    for name in ("layout", "dtype", "requires_grad", "pin_memory"):
        if getattr(found, name) != getattr(wanted, name):
            raise ValueError(
                f"Local shards' tensor {name} property is incompatible with tensor property on rank {rank}: tensor "
                f"property {name}={getattr(wanted, name)}, local shard tensor {name}={getattr(found, name)}"
            )
    problem = find_problem(shard, rank)
    if problem:
        raise ValueError(problem)


def describe_local_shards(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """The same without a process group, such as in a tool that reads the shards of all ranks: to be looked at only.

    Args:
        local_shards: Those that are here, of any ranks; they need not be contiguous.
        sharded_tensor_metadata: Of the whole.
        sharding_spec: How it is divided; if not given, it is found from the metadata.

    Raises:
        ValueError: The metadata is not that of a tensor, or a shard is not in it.
    """
    shards = sharded_tensor_metadata.shards_metadata
    spec = _check_metadata(sharded_tensor_metadata, sharding_spec)
    engine = NoGroupEngine()
    own = [shard.metadata.box for shard in local_shards]
    for shard, box in zip(local_shards, own, strict=True):
        if not any(box == item.box for item in shards):
            raise ValueError(f"the local shard {shard.metadata} is not in the metadata")
    boxes = tuple(item.box for item in shards)
    places = tuple(engine.here if box in own else _rank_of(item) for box, item in zip(boxes, shards, strict=True))
    return _from_own_shards(engine, sharded_tensor_metadata, local_shards, spec, Layout(boxes, places))


def init_from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """A sharded tensor of the one shard that each rank has, by a spec that everybody knows: nobody asks anybody.

    A rank that has no shard in the spec passes a tensor, too; only its dtype and `requires_grad` count.

    Args:
        local_tensor: The shard of this rank; it is used, not copied.
        sharding_spec: How the whole is divided.
        global_size: Of the whole.
        process_group: None for the default group.
        init_rrefs: Whether ranks make references to their shards for each other.

    Raises:
        ValueError: The tensor is not contiguous, is not of the size that the spec says, or the spec does not fit the size.
    """
    if not local_tensor.is_contiguous():
        raise ValueError("local_tensor is not a contiguous Tensor; pass local_tensor.contiguous()")
    properties = TensorProperties.create_from_tensor(local_tensor)
    metadata = sharding_spec.build_metadata(_size(global_size), properties)
    rank = dist.get_rank()
    own = [item for item in metadata.shards_metadata if item.placement is not None and item.placement.rank() == rank]
    if len(own) > 1:
        raise ValueError(f"rank {rank} has {len(own)} shards in {sharding_spec}; use init_from_local_shards")
    shards = [Shard(local_tensor, item) for item in own]
    return init_from_local_shards_and_metadata(shards, metadata, process_group, init_rrefs, sharding_spec)


ShardedTensorBase._init_from_local_shards_and_global_metadata = staticmethod(describe_local_shards)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_shards = staticmethod(init_from_local_shards)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_tensor = staticmethod(init_from_local_tensor)  # type: ignore[attr-defined]
ShardedTensor._init_from_local_shards_and_global_metadata = staticmethod(init_from_local_shards_and_metadata)  # type: ignore[attr-defined]


# -- what is said of local shards ----------------------------------------------------------------------------------------


def build_metadata_from_local_shards(
    local_shards: Sequence[Shard], global_size: torch.Size, current_rank: int, pg: Any
) -> ShardedTensorMetadata:
    """What one rank can say of a tensor.

    Args:
        local_shards: Those of this rank; at least one.
        global_size: Of the whole.
        current_rank: This process, among all.
        pg: Its process group.

    Raises:
        AssertionError: There are no shards.
        ValueError: They are not of one kind, or not this rank's.
    """
    if not local_shards:
        raise AssertionError("must have local shards!")
    first = TensorProperties.create_from_tensor(local_shards[0].tensor)
    for shard in local_shards:
        found = TensorProperties.create_from_tensor(shard.tensor)
        problem = find_problem(shard, current_rank)
        if not problem and found != first:
            problem = f"local shards of rank:{current_rank} differ: one is {first}, another {found}"
        if problem:
            raise ValueError(problem)
    return ShardedTensorMetadata([shard.metadata for shard in local_shards], torch.Size(global_size), first)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """What all ranks together say of a tensor.

    Args:
        gathered_metadatas: What each says, in order; None of ranks that have no shards.
        recalc_metadata: Whether ranks have consecutive rows, and their offsets are still to be found.

    Raises:
        ValueError: They contradict each other, or do not make up the tensor.
    """
    told = [copy.deepcopy(item) for item in gathered_metadatas if item is not None]
    if not told:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    return _agree(
        [(list(item.size), [(shard, item.tensor_properties) for shard in item.shards_metadata]) for item in told],
        recalc_metadata,
    )


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Finds offsets and size, in place, of shards that lie one after the other along a dimension, in the order of ranks.

    Raises:
        AssertionError: A shard names no rank.
    """
    size = stack_shards(global_sharded_tensor_metadata.shards_metadata, sharded_dim)
    global_sharded_tensor_metadata.size = torch.Size(size)
