"""Sharded tensors from nothing and from tensors that are not sharded; those of shards are in `local_shards`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from gradwire import rpc
from gradwire.rref import RRef
from gradwire.shard.agreement import agree
from gradwire.shard.engines import Engine
from gradwire.shard.group_engine import GroupEngine
from gradwire.shard.layouts import Place
from gradwire.shard.metadata import ShardedTensorMetadata, TensorProperties
from gradwire.shard.placing import engine_for, find_group, layout_of
from gradwire.shard.scattering import scatter
from gradwire.shard.sharding_spec import ShardingSpec
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
    for item in _flat(size):
        if type(item) is not int:
            raise TypeError(f"a size is made of integers, not {item!r}")
    return torch.Size(_flat(size))


def _flat(size: Sequence[Any]) -> Sequence[Any]:
    return size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size


def _create_tensor_from_params(
    *size: Any, local_device: torch.device, tensor_properties: TensorProperties
) -> torch.Tensor:
    """One shard whose elements are whatever was in memory: PyTorch's private name."""
    return torch.empty(
        *size,
        dtype=tensor_properties.dtype,
        layout=tensor_properties.layout,
        device=local_device,
        requires_grad=tensor_properties.requires_grad,
        memory_format=tensor_properties.memory_format,
        pin_memory=tensor_properties.pin_memory,
    )


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
    """Gives every rank references to the shards of all others that have some.

    All ranks there are must call it, also those outside of the tensor's process group: they get references, too.

    Raises:
        RuntimeError: The ranks are not all RPC workers.
    """
    if not isinstance(tensor._engine, GroupEngine):
        return
    world = GroupEngine()
    own = rpc.get_worker_info() if rpc._is_current_rpc_agent_set() else None
    key = next(_numbers)
    _offered[key] = [RRef(shard) for shard in tensor.local_shards()] if own is not None else []
    said = world.gather_objects((own, key, len(_offered[key])))
    missing = [rank for rank, (info, _, _) in enumerate(said) if info is None]
    if missing:
        del _offered[key]
        raise RuntimeError(
            "RPC Framework needs to be initialized using gradwire.rpc.init_rpc if init_rrefs is set to True; ranks "
            f"{missing} are not RPC workers"
        )
    futures = {
        info.id: rpc.rpc_async(info, _take_offered, args=(number,))
        for rank, (info, number, num_shards) in enumerate(said)
        if rank != world.here and num_shards
    }
    tensor._remote_shards = {worker: future.wait() for worker, future in futures.items()}
    world.gather_objects(None)  # all ranks have them by now
    del _offered[key]


_numbers = itertools.count()
_offered: dict[int, list[RRef[Shard]]] = {}  # to other ranks, while a tensor is being made


def _take_offered(key: int) -> list[RRef[Shard]]:
    return _offered[key]
