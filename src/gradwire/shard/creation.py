"""Creates sharded tensors: empty or filled ones, from a plain tensor, and from local shards."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypedDict

import torch
import torch.distributed as dist

from gradwire import rpc
from gradwire.rref import RRef
from gradwire.shard import redistribute
from gradwire.shard.backend import Backend, Part
from gradwire.shard.group_backend import GroupBackend, NoGroupBackend, Proposal, agree, all_or_none
from gradwire.shard.layout import Box, Layout, Place, cut, whole
from gradwire.shard.metadata import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from gradwire.shard.placement import _parse_and_validate_remote_device as _parse_and_validate_remote_device
from gradwire.shard.placement import backend_for, find_group, layout_of
from gradwire.shard.sharding_spec import ShardingSpec, as_placement, check_tensor, infer_sharding_spec, validate_shards
from gradwire.shard.tensor import ShardedTensor, ShardedTensorBase
from gradwire.shard.worker_backend import on_host, ranges_in, value_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Options(TypedDict, total=False):
    """Options of a sharded tensor besides its spec and size, as `ShardedTensor` documents them."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    pin_memory: bool
    memory_format: torch.memory_format
    process_group: Any
    init_rrefs: bool


def empty(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Create a sharded tensor with undefined elements; options as for `ShardedTensor`."""
    return _create("empty", sharding_spec, size, options)


def ones(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Create a sharded tensor of ones; options as for `ShardedTensor`."""
    return _create("ones", sharding_spec, size, options)


def zeros(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Create a sharded tensor of zeros; options as for `ShardedTensor`."""
    return _create("zeros", sharding_spec, size, options)


def rand(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Create a sharded tensor of uniform random numbers; options as for `ShardedTensor`."""
    return _create("rand", sharding_spec, size, options)


def randn(sharding_spec: ShardingSpec, *size: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Create a sharded tensor of normal random numbers; options as for `ShardedTensor`."""
    return _create("randn", sharding_spec, size, options)


def full(sharding_spec: ShardingSpec, size: Any, fill_value: Any, **options: Unpack[Options]) -> ShardedTensor:
    """Create a sharded tensor of one value; options as for `ShardedTensor`."""
    if "dtype" not in options or options["dtype"] is None:
        options["dtype"] = torch.full((), fill_value).dtype
    return _create("full", sharding_spec, (size,), options, fill_value)


def _create(kind: str, spec: Any, size: tuple[Any, ...], options: Options, *more: Any) -> ShardedTensor:
    if not isinstance(spec, ShardingSpec):
        raise TypeError(f"a sharded tensor needs a ShardingSpec, not {type(spec).__name__}")
    group, init_rrefs, properties = _read(options)
    metadata = spec.build_metadata(_size(size), properties)
    backend = backend_for(metadata.shards_metadata, group)
    layout = layout_of(metadata.shards_metadata, backend)
    numbers = backend.box_numbers(layout)
    sizes = [list(layout.boxes[number].sizes) for number in numbers]
    devices = [str(_device(metadata, number)) for number in numbers]
    flags = {"dtype": properties.dtype, "pin_memory": properties.pin_memory, "requires_grad": properties.requires_grad}
    parts = backend.run(make_part, layout, sizes, devices, kind=kind, more=list(more), **flags)
    made = ShardedTensor._make(backend, spec, metadata, parts, layout)
    return share_references(made) if init_rrefs else made


def make_part(sizes: list[int], device: str, kind: str, more: Sequence[Any] = (), **flags: Any) -> torch.Tensor:
    made: torch.Tensor = getattr(torch, kind)(sizes, *more, device=device, **flags)
    return made


def _device(metadata: ShardedTensorMetadata, number: int) -> Any:
    """Return the device of a shard; places without shards use the kind of the first."""
    shards = metadata.shards_metadata
    placement = shards[number if number < len(shards) else 0].placement
    assert placement is not None  # it determined the backend
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
            raise TypeError(f"a size must consist of integers, not {item!r}")
    return torch.Size(_flat(size))


def _flat(size: Sequence[Any]) -> Sequence[Any]:
    return size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size


def _create_tensor_from_params(
    *size: Any, local_device: torch.device, tensor_properties: TensorProperties
) -> torch.Tensor:
    """Create one shard with undefined elements: PyTorch's private name."""
    return torch.empty(*size, device=local_device, **vars(tensor_properties))


# -- from a tensor that is not sharded ---------------------------------------------------------------------------------


def shard_tensor(tensor: torch.Tensor, sharding_spec: ShardingSpec, src_rank: int, process_group: Any) -> ShardedTensor:
    """Shard a tensor; see `ShardingSpec.shard`.

    Every shard is sent directly to its place; the source sends each element once, and copies a few megabytes at a time.
    """
    found = find_group([sharding_spec], process_group)
    if found is None:
        backend, _, _ = placed(tensor, sharding_spec, process_group)
        found = backend if isinstance(backend, GroupBackend) else None  # for specs of other classes, known only now
    group, has_values = found, not tensor.is_meta

    def propose() -> Proposal:
        _, metadata, _ = placed(tensor, sharding_spec, process_group)
        check_source(group, src_rank)
        return {
            "src_rank": src_rank,
            "sharding_spec": metadata.shards_metadata,
            "size": list(tensor.size()),
            "dtype": str(tensor.dtype),
            "requires_grad": tensor.requires_grad,
            "has_values": has_values,
        }

    if group is not None:
        has_values = agree(group.group, propose, may_differ=["has_values"])[src_rank]["has_values"]
    return divide_tensor(placed(tensor, sharding_spec, process_group), tensor, sharding_spec, src_rank, has_values)


Placed = tuple[Backend, ShardedTensorMetadata, Layout]


def placed(tensor: torch.Tensor, spec: ShardingSpec, process_group: Any) -> Placed:
    """Return the places of the parts of a tensor. Nothing is moved or sent."""
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise ValueError("input tensor is not a contiguous Tensor; pass tensor.contiguous()")
    metadata = spec.build_metadata(tensor.size(), TensorProperties.create_from_tensor(tensor))
    backend = backend_for(metadata.shards_metadata, process_group)
    return backend, metadata, layout_of(metadata.shards_metadata, backend)


def divide_tensor(
    where: Placed, tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, has_values: bool
) -> ShardedTensor:
    """Shard a tensor, after all ranks have agreed; see `shard_tensor`."""
    backend, metadata, layout = where
    devices = [str(_device(metadata, number)) for number in range(len(layout.boxes))]
    source: Place = src_rank if isinstance(backend, GroupBackend) else backend.own_place
    parts = scatter(backend, tensor, source, layout, devices, has_values)
    return ShardedTensor._make(backend, spec, metadata, parts, layout)


def check_source(group: GroupBackend | None, src_rank: Any) -> None:
    if group is not None and (type(src_rank) is not int or src_rank not in group.participants):
        raise ValueError(f"src_rank {src_rank!r} is not a rank of the group, which has {len(group.participants)} ranks")


# -- from a source to its shards --------------------------------------------------------------------------------------

ROUND_BYTES = 16 * 2**20
"""Bytes in flight at a time, of all shards together."""

_MIN_PIECE_BYTES = 2**18


def scatter(
    backend: Backend, tensor: torch.Tensor, source: Place, layout: Layout, devices: Sequence[str], has_values: bool
) -> list[Part]:
    """Return the parts of a tensor, each with its own memory, as leaves.

    The tensor has the same size and dtype everywhere, and needs data only on the source: elsewhere it may be ``meta``.
    If the source has no data either (`has_values`), the elements of parts are undefined.
    """
    sizes = [list(layout.boxes[number].sizes) for number in backend.box_numbers(layout)]
    own_devices = [devices[number] for number in backend.box_numbers(layout)]
    with torch.no_grad():
        if has_values and isinstance(backend, GroupBackend):
            # Moves between ranks are split into pieces anyway.
            like = torch.empty(0, dtype=tensor.dtype, device="cpu" if tensor.is_meta else tensor.device)
            held = [tensor.detach()] if backend.own_place == source else []
            old = Layout((whole(tensor.size()),), (source,))
            moved = redistribute.move(held, old, layout, backend.group, like)
            own = zip(moved, own_devices, strict=True)
            return [part.to(device).requires_grad_(tensor.requires_grad) for part, device in own]
        flags = {"dtype": tensor.dtype, "requires_grad": tensor.requires_grad}
        parts = backend.run(make_part, layout, sizes, own_devices, kind="empty", **flags)
        if has_values:
            _fill_on_workers(backend, tensor.detach(), layout, parts)
    return parts


def _fill_on_workers(backend: Backend, tensor: torch.Tensor, layout: Layout, parts: list[Part]) -> None:
    outer, here = whole(tensor.size()), backend.own_place
    for pieces in rounds(layout.boxes, tensor.element_size()):
        waiting = []
        for number, box in pieces:
            place, part, ranges = layout.places[number], parts[number], ranges_in(box, layout.boxes[number])
            values = tensor[box.slices_in(outer)]
            if place == here:
                fill(part, ranges, values)
            else:
                waiting.append(rpc.rpc_async(place, fill, args=(part, ranges, on_host(values))))
        for future in waiting:
            future.wait()


def fill(part: Part, ranges: Sequence[tuple[int, int]], values: torch.Tensor) -> None:
    tensor: torch.Tensor = value_of(part) if isinstance(part, RRef) else part
    with torch.no_grad():
        tensor[tuple(slice(start, end) for start, end in ranges)].copy_(values)


def rounds(boxes: Sequence[Box], element_size: int) -> Iterator[list[tuple[int, Box]]]:
    """Yield lists of pieces of all boxes, with the numbers of these; those of one list go together."""
    full = [number for number, box in enumerate(boxes) if box.num_elements]
    limit = max(_MIN_PIECE_BYTES, ROUND_BYTES // max(1, len(full))) // element_size
    for pieces in zip_longest(*(cut(boxes[number], limit) for number in full)):
        yield [(number, piece) for number, piece in zip(full, pieces, strict=True) if piece is not None]


# -- references between ranks ------------------------------------------------------------------------------------------


_keys = itertools.count()
_offered: dict[int, list[RRef[Shard]]] = {}  # to other ranks, while a tensor is being created


def _take_offered(key: int) -> list[RRef[Shard]]:
    return _offered[key]


def share_references(tensor: ShardedTensor) -> ShardedTensor:
    """Give every rank references to the shards of all others that have some, and return the tensor.

    All ranks must call it, also those outside the tensor's process group, which get references, too.
    """
    if not isinstance(tensor._backend, GroupBackend):
        return tensor
    world, key = GroupBackend(), next(_keys)
    own = rpc.get_worker_info() if rpc._is_current_rpc_agent_set() else None
    _offered[key] = [RRef(shard) for shard in tensor.local_shards()] if own is not None else []
    try:
        offers = world.gather_objects((own, key, len(_offered[key])))
        missing = [rank for rank, (info, _, _) in enumerate(offers) if info is None]
        if missing:
            raise RuntimeError(
                "RPC Framework needs to be initialized using gradwire.rpc.init_rpc if init_rrefs is set to True; ranks "
                f"{missing} are not RPC workers"
            )
        futures = {
            info.id: rpc.rpc_async(info, _take_offered, args=(number,))
            for rank, (info, number, num_shards) in enumerate(offers)
            if rank != world.own_place and num_shards
        }
        tensor._remote_shards = {worker: future.wait() for worker, future in futures.items()}
        world.gather_objects(None)  # all ranks have them by now
    finally:
        del _offered[key]
    return tensor


# -- from the shards of each rank -------------------------------------------------------------------------------------


def init_from_local_shards(
    local_shards: Sequence[Shard], *global_size: Any, process_group: Any = None, init_rrefs: bool = False
) -> ShardedTensor:
    """Create a sharded tensor from the local shards of each rank.

    Args:
        local_shards: Shards of this rank; may be empty.
        global_size: Size of the whole tensor. With ``None`` for an unknown length, shards are consecutive rows in the
            order of the ranks; size and offsets are computed from that, and written to the metadata of the shards.
        process_group: The process group; None for the default group.
        init_rrefs: Whether ranks create references to their shards for each other; see `share_references`.

    Raises:
        ValueError: The shards of all ranks do not form a tensor of that size, or the ranks' sizes or properties differ. All
            ranks raise it, even if only the shards of one rank are wrong.
        TypeError: A size is not an integer.
        RuntimeError: There is no process group; or `init_rrefs` is set, and a rank is not an RPC worker.
    """
    backend = GroupBackend(process_group)
    is_stacked = None in _flat(global_size)
    size = _size([0 if item is None else item for item in _flat(global_size)])

    def describe() -> _Described:
        for shard in local_shards:
            _check_shard(shard, dist.get_rank())
        return list(size), [(s.metadata, TensorProperties.create_from_tensor(s.tensor)) for s in local_shards]

    metadata = _join_metadata(all_or_none(backend.group, describe), is_stacked)
    if is_stacked:
        own = (item for item in metadata.shards_metadata if _rank_of(item) == dist.get_rank())
        for shard, found in zip(local_shards, own, strict=True):
            shard.metadata = found
    made = _from_own_shards(backend, metadata, local_shards, infer_sharding_spec(metadata.shards_metadata))
    return share_references(made) if init_rrefs else made


_Described = tuple[list[int], list[tuple[ShardMetadata, TensorProperties]]]
"""What one rank knows of a tensor: the size of the whole, and the shards that it has, with the properties of each."""


def _check_shard(shard: Shard, rank: int) -> None:
    """Check that a shard can be one of that rank's, among all ranks."""
    tensor, placement = shard.tensor, shard.metadata.placement
    if tensor.layout != torch.strided:
        raise ValueError(f"Only torch.strided layout is currently supported, but found {tensor.layout} on rank:{rank}!")
    if not tensor.is_contiguous():
        raise ValueError(
            f"Only torch.contiguous_format memory_format is currently supported! A shard of rank:{rank} has another"
        )
    if placement is None or placement.rank() != rank:
        raise ValueError(
            f"Local shard metadata's rank does not match with the rank in its process group! Found current rank in the "
            f"process group: {rank}, local ShardMetadata placement: {placement}"
        )


def _find_difference(one: TensorProperties, other: TensorProperties) -> str | None:
    names = ("dtype", "layout", "requires_grad", "pin_memory")
    return next((name for name in names if getattr(one, name) != getattr(other, name)), None)


def _join_metadata(described: Sequence[_Described], is_stacked: bool) -> ShardedTensorMetadata:
    """Return the metadata of the whole; all ranks get the same, and so all raise the same.

    With `is_stacked`, shards are consecutive rows, and neither offsets nor the size are known yet.
    """
    size = described[0][0]
    for rank, (other, _) in enumerate(described):
        if other != size:
            raise ValueError(
                f"ShardedTensor global_size property does not match from different ranks! Found "
                f"global_size={size} on rank:0, and global_size={other} on rank:{rank}"
            )
    of_shards = [(rank, *item) for rank, (_, items) in enumerate(described) for item in items]
    if not of_shards:
        raise ValueError("a ShardedTensor would have no local shards on all ranks; it needs at least one shard")
    first_rank, _, properties = of_shards[0]
    for rank, _, found in of_shards:
        name = _find_difference(found, properties)
        if name is not None:
            raise ValueError(
                f"ShardedTensor {name} property does not match from different ranks! Found {name}="
                f"{getattr(properties, name)} on rank:{first_rank}, and {name}={getattr(found, name)} on rank:{rank}"
            )
    shards = [metadata for _, metadata, _ in of_shards]
    if is_stacked:
        size = stack_shards(shards, 0)
    validate_shards(shards)
    check_tensor(shards, size)
    return ShardedTensorMetadata(shards, torch.Size(size), properties)


def stack_shards(shards: Sequence[ShardMetadata], dim: int) -> list[int]:
    """Set the offsets of shards that lie one after the other along a dimension, by rank; return the size of the whole."""
    start = 0
    for shard in sorted(shards, key=_rank_of):
        shard.shard_offsets = [start if number == dim else 0 for number in range(len(shard.shard_sizes))]
        start += shard.shard_sizes[dim]
    return [start if number == dim else length for number, length in enumerate(shards[0].shard_sizes)]


def _rank_of(shard: ShardMetadata) -> int:
    rank = shard.placement.rank() if shard.placement is not None else None
    if rank is None:
        raise AssertionError(f"every shard must name its rank, and {shard} does not")
    return rank


def _from_own_shards(
    backend: Backend,
    metadata: ShardedTensorMetadata,
    local_shards: Sequence[Shard],
    spec: ShardingSpec,
    layout: Layout | None = None,
) -> ShardedTensor:
    layout = layout if layout is not None else layout_of(metadata.shards_metadata, backend)
    tensors = {shard.metadata.box: shard.tensor for shard in local_shards}
    properties, shards = metadata.tensor_properties, metadata.shards_metadata
    parts: list[Part] = []
    for number in backend.box_numbers(layout):
        box = layout.boxes[number]
        if number < len(shards):
            if box not in tensors:
                raise ValueError(f"this rank has no tensor for its shard {shards[number]}")
            parts.append(tensors[box])
        else:
            device, requires_grad = _device(metadata, len(shards)), properties.requires_grad
            parts.append(torch.empty(box.sizes, dtype=properties.dtype, requires_grad=requires_grad, device=device))
    return ShardedTensor._make(backend, spec, metadata, parts, layout)


def init_from_local_shards_and_metadata(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    process_group: Any = None,
    init_rrefs: bool = False,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """Create a sharded tensor from local shards and metadata that all ranks know, without communication.

    Raises:
        ValueError: The metadata does not describe a tensor, or this rank's shards do not fit it.
        RuntimeError: The number of local shards does not match the metadata.
    """
    shards = sharded_tensor_metadata.shards_metadata
    spec = _check_metadata(sharded_tensor_metadata, sharding_spec)
    backend = backend_for(shards, process_group)
    if isinstance(backend, GroupBackend):
        rank = dist.get_rank()
        expected = [shard for shard in shards if _rank_of(shard) == rank]
        if len(local_shards) != len(expected):
            raise RuntimeError(
                f"Number of local shards ({len(local_shards)}) does not match number of local shards metadata in "
                f"sharded_tensor_metadata ({len(expected)}) on rank ({rank})"
            )
        for shard in local_shards:
            found, wanted = TensorProperties.create_from_tensor(shard.tensor), sharded_tensor_metadata.tensor_properties
            name = _find_difference(found, wanted)
            if name is not None:
                raise ValueError(
                    f"Local shards' tensor {name} property is incompatible with tensor property on rank {rank}: tensor "
                    f"property {name}={getattr(wanted, name)}, local shard tensor {name}={getattr(found, name)}"
                )
            _check_shard(shard, rank)
    made = _from_own_shards(backend, sharded_tensor_metadata, local_shards, spec)
    return share_references(made) if init_rrefs else made


def _check_metadata(metadata: ShardedTensorMetadata, spec: ShardingSpec | None) -> ShardingSpec:
    shards = metadata.shards_metadata
    if not shards:
        raise ValueError("shards_metadata must not be empty!")
    if metadata.tensor_properties.layout != torch.strided:
        raise ValueError("Only torch.strided layout is currently supported")
    validate_shards(shards)
    check_tensor(shards, metadata.size)
    return spec if spec is not None else infer_sharding_spec(shards)


def describe_local_shards(
    local_shards: Sequence[Shard],
    sharded_tensor_metadata: ShardedTensorMetadata,
    sharding_spec: ShardingSpec | None = None,
) -> ShardedTensor:
    """Create a sharded tensor without a process group, such as in a tool that reads the shards of all ranks.

    It has `metadata` and `local_shards`, but no operations.

    Args:
        local_shards: Available shards, of any ranks; they need not be contiguous.
        sharded_tensor_metadata: Metadata of the whole tensor.
        sharding_spec: The sharding; by default inferred from the metadata.

    Raises:
        ValueError: The metadata does not describe a tensor, or a shard is not in it.
    """
    shards = sharded_tensor_metadata.shards_metadata
    spec = _check_metadata(sharded_tensor_metadata, sharding_spec)
    backend = NoGroupBackend()
    own = [shard.metadata.box for shard in local_shards]
    boxes = tuple(item.box for item in shards)
    for shard in local_shards:
        if shard.metadata.box not in boxes:
            raise ValueError(f"the local shard {shard.metadata} is not in the metadata")
    places = tuple(backend.own_place if box in own else _rank_of(item) for box, item in zip(boxes, shards, strict=True))
    return _from_own_shards(backend, sharded_tensor_metadata, local_shards, spec, Layout(boxes, places))


def init_from_local_tensor(
    local_tensor: torch.Tensor,
    sharding_spec: ShardingSpec,
    *global_size: Any,
    process_group: Any = None,
    init_rrefs: bool = False,
) -> ShardedTensor:
    """Create a sharded tensor from one shard per rank and a spec that all ranks know, without communication.

    A rank without a shard in the spec passes a tensor, too; only its dtype and `requires_grad` are used.

    Args:
        local_tensor: The shard of this rank; it is used, not copied.
        sharding_spec: How the whole tensor is sharded.
        global_size: Size of the whole tensor.
        process_group: The process group; None for the default group.
        init_rrefs: Whether ranks create references to their shards for each other.

    Raises:
        ValueError: The tensor is not contiguous, does not have the size of its shard, or the spec does not fit the size.
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


# -- PyTorch's private names ------------------------------------------------------------------------------------------


def build_metadata_from_local_shards(
    local_shards: Sequence[Shard], global_size: torch.Size, current_rank: int, pg: Any
) -> ShardedTensorMetadata:
    """Return one rank's metadata of a tensor from its shards, of which there must be at least one."""
    if not local_shards:
        raise AssertionError("must have local shards!")
    first = TensorProperties.create_from_tensor(local_shards[0].tensor)
    for shard in local_shards:
        _check_shard(shard, current_rank)
        found = TensorProperties.create_from_tensor(shard.tensor)
        if found != first:
            raise ValueError(f"local shards of rank:{current_rank} differ: one is {first}, another {found}")
    return ShardedTensorMetadata([shard.metadata for shard in local_shards], torch.Size(global_size), first)


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """Return the metadata of the whole, from what each rank knows; None of ranks that have no shards.

    With `recalc_metadata`, ranks have consecutive rows, and their offsets are still to be found.
    """
    told = [copy.deepcopy(item) for item in gathered_metadatas if item is not None]
    if not told:
        raise ValueError("ShardedTensor have no local shards on all ranks!")
    return _join_metadata(
        [(list(item.size), [(shard, item.tensor_properties) for shard in item.shards_metadata]) for item in told],
        recalc_metadata,
    )


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Set offsets and size for shards that lie one after the other along a dimension, in the order of ranks."""
    size = stack_shards(global_sharded_tensor_metadata.shards_metadata, sharded_dim)
    global_sharded_tensor_metadata.size = torch.Size(size)


def get_idx_from_placements(placements: Sequence[Any], current_rank: int) -> int:
    for position, placement in enumerate(placements):
        if as_placement(placement).rank() == current_rank:
            return position
    raise RuntimeError(
        f"current_rank not in the placement: rank {current_rank} is not among {list(map(str, placements))}"
    )


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """Return the shards of a tensor in the order of their ranks, and the ranks in the order of the spec."""
    shards = sharding_spec.build_metadata(torch.Size(st_size), TensorProperties()).shards_metadata
    ranks = []
    for item in shards:
        rank = item.placement.rank() if item.placement is not None else None
        if rank is None or not 0 <= rank < world_size:
            raise ValueError(f"placement {item.placement} is not a rank of a world of {world_size}")
        ranks.append(rank)
    order = sorted(range(len(shards)), key=lambda number: ranks[number])
    return [shards[number] for number in order], ranks


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: Any,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Return this rank's shards of another layout, and the metadata of all shards, by rank. Every rank must call it."""
    old = init_from_local_tensor(local_tensor, sharding_spec, *st_size, process_group=pg)
    new = old.redistribute(resharding_spec)
    new._order_by_rank()
    return new.local_shards(), new.metadata().shards_metadata


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: Any,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """Do the same as `reshard_local_shard`; PyTorch has one for specs along the same dimension, and one for others."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)
