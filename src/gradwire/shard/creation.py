"""Sharded tensors from nothing, from shards that are here, and from tensors that are not sharded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

from gradwire import rpc
from gradwire.rref import RRef
from gradwire.shard.agreement import agree
from gradwire.shard.engines import Engine, Part
from gradwire.shard.group_engine import GroupEngine
from gradwire.shard.layouts import Place
from gradwire.shard.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from gradwire.shard.placing import engine_for, find_group, layout_of
from gradwire.shard.scattering import scatter
from gradwire.shard.sharding_spec import ShardingSpec, check_tensor, infer_sharding_spec, validate_shards
from gradwire.shard.shards import Shard
from gradwire.shard.tensor import ShardedTensor

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """What may be said of a sharded tensor besides its spec and size; `ShardedTensor` says what each means."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Any
    init_rrefs: bool


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor whose elements are whatever was in memory; options are those of `ShardedTensor`."""
    return _create("empty", sharding_spec, size, options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor of ones; options are those of `ShardedTensor`."""
    return _create("ones", sharding_spec, size, options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor of zeros; options are those of `ShardedTensor`."""
    return _create("zeros", sharding_spec, size, options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Uniform random numbers from [0, 1), drawn where each shard is; options are those of `ShardedTensor`."""
    return _create("rand", sharding_spec, size, options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Normal random numbers, drawn where each shard is; options are those of `ShardedTensor`."""
    return _create("randn", sharding_spec, size, options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Unpack[Options]) -> ShardedTensor:
    """A sharded tensor of one value; options are those of `ShardedTensor`."""
    if "dtype" not in options or options["dtype"] is None:
        options["dtype"] = torch.full((), fill_value).dtype
    return _create("full", sharding_spec, (size,), options, fill_value)


def _create(kind: str, spec: Any, size: tuple[Any, ...], options: Options, *more: Any) -> ShardedTensor:
    if not isinstance(spec, ShardingSpec):
        raise TypeError(f"a sharded tensor needs a ShardingSpec, not {type(spec).__name__}")
    group, init_rrefs, properties = _read(options)
    metadata = spec.build_metadata(_size(size), properties)
    engine = engine_for(metadata.shards_metadata, group)
    layout = layout_of(metadata.shards_metadata, engine)
    numbers = engine.numbers(layout)
    sizes = [list(layout.boxes[number].sizes) for number in numbers]
    devices = [str(_device(metadata, number)) for number in numbers]
    flags = {"dtype": properties.dtype, "pin_memory": properties.pin_memory, "requires_grad": properties.requires_grad}
    parts = engine.run(make_part, layout, [kind] * len(numbers), sizes, devices, more=list(more), flags=flags)
    made = ShardedTensor._make(engine, spec, metadata, parts, layout)
    if init_rrefs:
        share_references(made)
    return made


def make_part(kind: str, sizes: list[int], device: str, more: list[Any], flags: dict[str, Any]) -> torch.Tensor:
    """A shard, where it is to be."""
    made: torch.Tensor = getattr(torch, kind)(sizes, *more, device=device, **flags)
    return made


def _device(metadata: ShardedTensorMetadata, number: int) -> Any:
    """That of a shard; places without shards use the kind of the first."""
    shards = metadata.shards_metadata
    placement = shards[number if number < len(shards) else 0].placement
    assert placement is not None  # the engine was chosen by it
    device = placement.device()
    if number >= len(shards) and device.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())  # not that of another rank
    return device


def _read(options: Options) -> tuple[Any, bool, TensorProperties]:
    known = sorted(Options.__annotations__)
    for name in options:
        if name not in known:
            raise TypeError(f"a sharded tensor has no option {name!r}; it has {', '.join(known)}")
    if options.get("layout", torch.strided) != torch.strided:
        raise ValueError("Only torch.strided layout is currently supported")
    if options.get("memory_format", torch.contiguous_format) != torch.contiguous_format:
        raise ValueError("Only torch.contiguous_format memory_format is currently supported")
    properties = TensorProperties(
        options.get("dtype") or torch.get_default_dtype(),
        requires_grad=bool(options.get("requires_grad", False)),
        pin_memory=bool(options.get("pin_memory", False)),
    )
    return options.get("process_group"), bool(options.get("init_rrefs", False)), properties


def _size(size: Sequence[Any]) -> torch.Size:
    if len(size) == 1 and isinstance(size[0], list | tuple):
        size = size[0]
    for item in size:
        if type(item) is not int:
            raise TypeError(f"a size is made of integers, not {item!r}")
    return torch.Size(size)


# -- from shards that are here -----------------------------------------------------------------------------------------


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """A sharded tensor of the shards that each rank has.

    Args:
        local_shards: Those of this rank; may be empty.
        global_size: Of the whole.
        process_group: The ranks; None for the default group.
        init_rrefs: Whether ranks make references to their shards for each other.

    Raises:
        ValueError: The shards of all ranks do not make up a tensor of that size, or ranks say different things. Every rank
            raises it, whoever is to blame.
    """
    engine = GroupEngine(process_group)
    size = _size(global_size)
    problem = next(filter(None, (find_problem(shard, dist.get_rank()) for shard in local_shards)), "")
    told = (list(size), [(s.metadata, TensorProperties.create_from_tensor(s.tensor)) for s in local_shards])
    said = engine.gather_objects((problem, told))
    for text, _ in said:
        if text:
            raise ValueError(text)
    metadata = _agree([items for _, items in said])
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


def _agree(said: Sequence[tuple[list[int], list[tuple[ShardMetadata, TensorProperties]]]]) -> ShardedTensorMetadata:
    """What all ranks together say of the tensor; all get the same, and so all raise the same."""
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
        raise ValueError("Empty local shards on all ranks: a sharded tensor needs at least one shard")
    validate_shards(shards)
    check_tensor(shards, size)
    return ShardedTensorMetadata(shards, torch.Size(size), properties)


def _from_own_shards(
    engine: Engine, metadata: ShardedTensorMetadata, local_shards: Sequence[Shard], spec: ShardingSpec
) -> ShardedTensor:
    layout = layout_of(metadata.shards_metadata, engine)
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
    """The same, if every rank knows the metadata already: nobody asks anybody.

    Raises:
        ValueError: The metadata is not that of a tensor, or this rank's shards are others.
    """
    shards = sharded_tensor_metadata.shards_metadata
    if not shards:
        raise ValueError("shards_metadata must not be empty!")
    validate_shards(shards)
    check_tensor(shards, sharded_tensor_metadata.size)
    engine = engine_for(shards, process_group)
    spec = sharding_spec if sharding_spec is not None else infer_sharding_spec(shards)
    made = _from_own_shards(engine, sharded_tensor_metadata, local_shards, spec)
    if init_rrefs:
        share_references(made)
    return made


# -- from a tensor that is not sharded ---------------------------------------------------------------------------------


def shard_tensor(
    tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int = 0, process_group: Any = None
) -> ShardedTensor:
    """Divides a tensor. What it holds on one rank counts; over RPC workers, what it holds here.

    Every shard goes straight to its place; the source sends no more than all of them, and copies a few megabytes at a time.

    Args:
        tensor: On every rank a tensor of the same size and dtype. Only that of the source needs data: others may be on the
            ``meta`` device. If that of the source is, too, shards are whatever was in memory.
        sharding_spec: How to divide it.
        src_rank: The rank in the group whose tensor counts.
        process_group: None for the default group.

    Raises:
        TypeError: The spec is none.
        ValueError: It is not contiguous, cannot be divided like this, or is different on some ranks.
        RuntimeError: There is no process group, or this process is no RPC worker.
    """
    group = find_group([sharding_spec], process_group)
    if group is None:
        engine, _ = placed(tensor, sharding_spec, process_group)
        group = engine if isinstance(engine, GroupEngine) else None  # specs of other classes tell only now
    has_values = not tensor.is_meta
    if group is not None:
        has_values = _agree_on(group, tensor, sharding_spec, src_rank, process_group)
    engine, metadata = placed(tensor, sharding_spec, process_group)
    return divide_tensor(engine, tensor, sharding_spec, metadata, src_rank, has_values)


def placed(tensor: torch.Tensor, spec: ShardingSpec, process_group: Any) -> tuple[Engine, ShardedTensorMetadata]:
    """Who is to have what of a tensor, and the engine that gets it there. Nothing is moved, and nobody is asked.

    Raises:
        TypeError: The spec is none.
        ValueError: The tensor cannot be divided like this, or a placement names nobody.
        RuntimeError: There is no process group, or this process is no RPC worker.
    """
    if not isinstance(spec, ShardingSpec):
        raise TypeError(f"a tensor is divided by a ShardingSpec, not {type(spec).__name__}")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError("input tensor is not a contiguous Tensor; pass tensor.contiguous()")
    metadata = spec.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor))
    engine = engine_for(metadata.shards_metadata, process_group)
    layout_of(metadata.shards_metadata, engine)
    return engine, metadata


def divide_tensor(
    engine: Engine,
    tensor: torch.Tensor,
    spec: ShardingSpec,
    metadata: ShardedTensorMetadata,
    src_rank: int,
    has_values: bool,
) -> ShardedTensor:
    """Divides a tensor, once everybody is known to be about to do so; see `shard_tensor`."""
    layout = layout_of(metadata.shards_metadata, engine)
    devices = [str(_device(metadata, number)) for number in range(len(layout.boxes))]
    source: Place = src_rank if isinstance(engine, GroupEngine) else engine.here
    parts = scatter(engine, tensor, source, layout, devices, has_values)
    return ShardedTensor._make(engine, spec, metadata, parts, layout)


def check_source(engine: Engine, src_rank: Any) -> None:
    """
    Raises:
        ValueError: It is no rank of the group.
    """
    if isinstance(engine, GroupEngine) and (type(src_rank) is not int or src_rank not in engine.askers):
        raise ValueError(f"src_rank {src_rank!r} is no rank of the group, which has {len(engine.askers)}")


def _agree_on(engine: GroupEngine, tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, process_group: Any) -> bool:
    """Whether the source has values; raises for all ranks unless all are about to do the same."""

    def prepare() -> dict[str, Any]:
        _, metadata = placed(tensor, spec, process_group)
        check_source(engine, src_rank)
        return {
            "src_rank": src_rank,
            "sharding_spec": metadata.shards_metadata,
            "size": list(tensor.size()),
            "dtype": str(tensor.dtype),
            "requires_grad": tensor.requires_grad,
            "has_values": not tensor.is_meta,
        }

    has_values: bool = agree(engine, prepare, own_matters=["has_values"])[src_rank]["has_values"]
    return has_values


# -- references between ranks ------------------------------------------------------------------------------------------


def share_references(tensor: ShardedTensor) -> None:
    """Gives every rank references to the shards of all others.

    Raises:
        RuntimeError: The ranks are not all RPC workers.
    """
    engine = tensor._engine
    if not isinstance(engine, GroupEngine):
        return
    if not rpc._is_current_rpc_agent_set():
        raise RuntimeError(
            "RPC Framework needs to be initialized using gradwire.rpc.init_rpc if init_rrefs is set to True"
        )
    key = next(_numbers)
    _offered[key] = [RRef(shard) for shard in tensor.local_shards()]
    said = engine.gather_objects((rpc.get_worker_info(), key))
    futures = {
        info.id: rpc.rpc_async(info, _take_offered, args=(number,))
        for rank, (info, number) in enumerate(said)
        if rank != engine.here
    }
    tensor._remote_shards = {worker: future.wait() for worker, future in futures.items()}
    engine.gather_objects(None)  # everybody has them by now
    del _offered[key]


_numbers = itertools.count()
_offered: dict[int, list[RRef[Shard]]] = {}  # to other ranks, while a tensor is being made


def _take_offered(key: int) -> list[RRef[Shard]]:
    return _offered[key]
