"""Copies of sharded tensors: as they are, of another dtype, on another device, of the same size with other elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import init

from gradwire.shard.backend import Backend
from gradwire.shard.creation import share_references
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.metadata import ShardedTensorMetadata, ShardMetadata
from gradwire.shard.ops.pointwise import call, note_gradient, offer, pointwise
from gradwire.shard.placement import placement_of
from gradwire.shard.sharding_spec import infer_sharding_spec
from gradwire.shard.tensor import ShardedTensor

_T: Any = torch.Tensor


@implements(_T.detach, torch.detach, _T.data.__get__)
def _detach(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """Shares memory with the original, as always."""
    tensor: ShardedTensor = args[0]
    with torch.no_grad():
        return tensor._with_parts(tensor._backend.run(torch.Tensor.detach, tensor._layout, tensor._parts))


for _key, _function in {
    "torch.clone": torch.clone,
    "Tensor.clone": _T.clone,
    "Tensor.contiguous": _T.contiguous,
}.items():
    implements(offer(_key, _function))(pointwise)


@implements(_T.data.__set__)
def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The parts stay the same objects, so whoever has them (an optimizer, say) sees the new data."""
    tensor, other = args
    if not isinstance(tensor, ShardedTensor) or not isinstance(other, ShardedTensor):
        raise unsupported(func, "both must be sharded")
    if other._layout != tensor._layout or other._backend != tensor._backend:
        raise unsupported(func, "the new data must be sharded in the same way; use redistribute()")
    backend = tensor._backend
    backend.settle()
    backend.settle(backend.run(set_data, tensor._layout, tensor._parts, other._parts))
    with torch._C.DisableTorchFunctionSubclass():
        func(tensor, other)  # the object itself has a dtype and a device
    tensor._sharding_spec = other._sharding_spec
    properties = replace(other._metadata.tensor_properties, requires_grad=tensor.requires_grad)
    tensor._metadata = replace(other._metadata, tensor_properties=properties)


def set_data(part: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Gives a part other data, of any dtype."""
    part.data = value.detach()
    return part


# -- dtypes and devices ------------------------------------------------------------------------------------------------


@implements(_T.to)
def _to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    tensor: ShardedTensor = args[0]
    rest = list(args[1:])
    options = {name: value for name, value in kwargs.items() if name != "process_group"}
    other = options.pop("other", None)
    if other is None and rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    if other is not None:
        rest = [other.device, other.dtype, *rest]
    dtype = options.get("dtype") or next((value for value in rest if isinstance(value, torch.dtype)), tensor.dtype)
    return _convert(tensor, dtype, _device_of(rest, options), _wants_copy(rest, options), kwargs)


def _is_device(value: Any) -> bool:
    return isinstance(value, torch.device | str) or type(value) is int


def _device_of(rest: list[Any], options: dict[str, Any]) -> torch.device | None:
    named = options.get("device", rest[0] if rest and _is_device(rest[0]) else None)
    return None if named is None else torch.device(named)


def _wants_copy(rest: list[Any], options: dict[str, Any]) -> bool:
    flags = [value for value in rest if type(value) is bool]  # non_blocking, copy
    return bool(options.get("copy", flags[1] if len(flags) > 1 else False))


@implements(_T.cpu)
def _cpu(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    return _convert(args[0], args[0].dtype, torch.device("cpu"), False, kwargs)


@implements(_T.cuda)
def _cuda(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    named = args[1] if len(args) > 1 else kwargs.get("device")
    device = torch.device("cuda" if named is None else named)
    return _convert(args[0], args[0].dtype, device, False, kwargs)


@implements(_T.type_as)
def _type_as(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, other = args
    if not isinstance(tensor, ShardedTensor):
        return tensor.to(other.dtype)
    return _convert(tensor, other.dtype, None, False, {})


def _convert(
    tensor: ShardedTensor, dtype: torch.dtype, device: torch.device | None, copy: bool, kwargs: dict[str, Any]
) -> ShardedTensor:
    """The tensor itself, if nothing is to be changed."""
    if device is not None and device.type == tensor.device.type and device.index in (None, tensor.device.index):
        device = None
    if kwargs.get("memory_format") not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError("Only `torch.contiguous_format` or `torch.preserve_format` is supported!")
    group = kwargs.get("process_group")
    backend = GroupBackend(group) if group is not None else tensor._backend
    if dtype == tensor.dtype and device is None and not copy and backend == tensor._backend:
        return tensor
    parts = tensor._backend.run(convert_part, tensor._layout, tensor._parts, dtype=dtype, device=_text(device))
    made = tensor._with_parts(parts, dtype)
    has_gradient = tensor.requires_grad and torch.is_grad_enabled() and (dtype.is_floating_point or dtype.is_complex)
    note_gradient(made, has_gradient, not has_gradient)
    if device is not None or backend != tensor._backend:
        _place(made, backend, device if device is not None else tensor.device)
    if tensor._init_rrefs:
        share_references(made)
    return made


def _text(device: torch.device | None) -> str | None:
    return None if device is None else str(device)


def convert_part(part: torch.Tensor, dtype: torch.dtype, device: str | None) -> torch.Tensor:
    """A copy of a part."""
    return part.to(device=part.device if device is None else device, dtype=dtype, copy=True)


def _place(tensor: ShardedTensor, backend: Backend, device: torch.device) -> None:
    """Says in the metadata on which device the parts are, and whose they are."""
    names = backend.gather_objects(str(_exact(device))) if backend.participants else []  # none outside of the group
    by_place = dict(zip(backend.participants, names, strict=True))
    metadata = tensor._metadata
    shards = [
        ShardMetadata(
            shard.shard_offsets, shard.shard_sizes, placement_of(place, by_place.get(place, str(device)), backend)
        )
        for shard, place in zip(metadata.shards_metadata, tensor._layout.places, strict=False)
    ]
    tensor._backend, tensor._sharding_spec = backend, infer_sharding_spec(shards)
    tensor._metadata = ShardedTensorMetadata(shards, metadata.size, metadata.tensor_properties)


def _exact(device: torch.device) -> torch.device:
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


# -- of the same size --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A new leaf of the same layout. Random ones draw where each part is."""
    tensor: ShardedTensor = args[0]
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if kwargs.get("layout", torch.strided) != torch.strided:
        raise unsupported(func, "only strided tensors can be sharded")
    if "device" in kwargs and torch.device(kwargs["device"]).type != tensor.device.type:
        raise unsupported(func, "it must be on the same device; use to() afterwards")
    keys = [[value] * len(tensor._parts) for value in args[1:]]
    parts = tensor._backend.run(
        call, tensor._layout, tensor._parts, *keys, name=f"torch.{func.__name__}", keywords=[], constants=kwargs
    )
    made = tensor._with_parts(parts, kwargs.get("dtype", tensor.dtype))
    made._batch = None
    note_gradient(made, bool(kwargs.get("requires_grad", False)), True)
    return made


for _name in ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"):
    implements(offer(f"torch.{_name}", getattr(torch, _name)))(_like)


# -- comparison of all elements ----------------------------------------------------------------------------------------


@implements(torch.equal, _T.equal)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The same for everybody who asks."""
    tensor, other = _two(args, kwargs)
    return _could_be_same(tensor, other) and _are_all(tensor == other)


@implements(torch.allclose, _T.allclose)
def _allclose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The same for everybody who asks."""
    tensor, other = _two(args, kwargs)
    return _could_be_same(tensor, other) and _are_all(torch.isclose(*args, **kwargs))


def _two(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rest = [kwargs[name] for name in ("input", "other") if name in kwargs]
    tensor, other = (*args[:2], *rest)
    return tensor, other


def _could_be_same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.size() == other.size() and tensor.dtype == other.dtype


def _are_all(flags: torch.Tensor) -> bool:
    """Whether all elements are True; outside of the process group, where there are none, they are."""
    assert isinstance(flags, ShardedTensor)  # as one of the operands was
    backend = flags._backend
    is_outside = isinstance(backend, GroupBackend) and not backend.is_member
    return is_outside or bool(flags.all())


def _read(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardedTensor, dict[str, Any]]:
    found = {**kwargs, **dict(zip(["tensor", *names.split()], args, strict=False))}
    tensor = found.pop("tensor")
    return tensor, {name: value for name, value in found.items() if value is not None}


@implements(init.uniform_)
@torch.no_grad()
def _uniform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("a b generator", args, kwargs)
    return tensor.uniform_(options.pop("a", 0.0), options.pop("b", 1.0), **options)


@implements(init.normal_)
@torch.no_grad()
def _normal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("mean std generator", args, kwargs)
    return tensor.normal_(options.pop("mean", 0.0), options.pop("std", 1.0), **options)


@implements(init.constant_)
@torch.no_grad()
def _constant(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("val", args, kwargs)
    return tensor.fill_(options["val"])


@implements(init.kaiming_uniform_)
@torch.no_grad()
def _kaiming_uniform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, options = _read("a mode nonlinearity generator", args, kwargs)
    if not tensor.numel():
        return tensor
    fan = init._calculate_correct_fan(tensor, options.pop("mode", "fan_in"))
    gain = init.calculate_gain(options.pop("nonlinearity", "leaky_relu"), options.pop("a", 0))
    bound = math.sqrt(3.0) * gain / math.sqrt(fan)
    return tensor.uniform_(-bound, bound, **options)
