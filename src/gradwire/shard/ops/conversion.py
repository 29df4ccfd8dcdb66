"""Copies of sharded tensors: of another dtype, on another device, of the same size with other elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn import init

from gradwire._torch import DisableTorchFunctionSubclass, calculate_correct_fan
from gradwire.shard.backend import Backend
from gradwire.shard.creation import share_references
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.group_backend import GroupBackend
from gradwire.shard.metadata import ShardMetadata
from gradwire.shard.ops.pointwise import call, find_functions, needs_gradient, note_gradient
from gradwire.shard.placement import placement_of
from gradwire.shard.sharding_spec import infer_sharding_spec
from gradwire.shard.tensor import ShardedTensor

_T: Any = torch.Tensor


@implements(_T.detach, torch.detach, _T.data.__get__)
def _detach(func: Any, input: ShardedTensor) -> ShardedTensor:
    with torch.no_grad():  # shares memory with the original, as always
        return input._with_parts(input._backend.run(torch.Tensor.detach, input._layout, input._parts))


@implements(_T.data.__set__)
def _set_data(func: Any, tensor: Any, other: Any) -> None:
    # The parts stay the same objects, so an optimizer that holds them sees the new data.
    if not isinstance(tensor, ShardedTensor) or not isinstance(other, ShardedTensor):
        raise unsupported(func, "both must be sharded")
    if other._layout != tensor._layout or other._backend != tensor._backend:
        raise unsupported(func, "the new data must be sharded in the same way; use redistribute()")
    backend = tensor._backend
    backend.settle()
    backend.settle(backend.run(set_data, tensor._layout, tensor._parts, other._parts))
    with DisableTorchFunctionSubclass():
        func(tensor, other)  # the object itself has a dtype and a device
    tensor._sharding_spec = other._sharding_spec
    properties = replace(other._metadata.tensor_properties, requires_grad=tensor.requires_grad)
    tensor._metadata = replace(other._metadata, tensor_properties=properties)


def set_data(part: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    part.data = value.detach()
    return part


@implements(torch.Tensor.__deepcopy__)
def _deepcopy(func: Any, tensor: ShardedTensor, memo: dict[int, Any]) -> ShardedTensor:
    """Create a new leaf with the same layout; a parameter stays a parameter."""
    if id(tensor) in memo:
        found: ShardedTensor = memo[id(tensor)]
        return found
    if not tensor.is_leaf:
        raise RuntimeError(
            "only sharded tensors that are leaves of the graph support the deepcopy protocol, and this one is the result of "
            "an operation; copy tensor.detach()"
        )
    requires_grad = tensor.requires_grad
    with torch.no_grad():
        parts = tensor._backend.run(copy_part, tensor._layout, tensor._parts, requires_grad=requires_grad)
        made = tensor._with_parts(parts)
    made._metadata = tensor._metadata
    made._is_result = False
    made._is_param = tensor._is_param
    memo[id(tensor)] = made
    return made


def copy_part(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    made = tensor.detach().clone().requires_grad_(requires_grad)
    if tensor.is_leaf and tensor.grad is not None:
        made.grad = tensor.grad.detach().clone()
    return made


@implements(_T.to)
def _to(func: Any, tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    rest, other = list(args), kwargs.pop("other", None)
    if other is None and rest and isinstance(rest[0], torch.Tensor):
        other = rest.pop(0)
    if other is not None:
        rest = [other.device, other.dtype, *rest]
    dtype = kwargs.pop("dtype", None) or next((item for item in rest if isinstance(item, torch.dtype)), tensor.dtype)
    first = rest[0] if rest else None
    is_device = isinstance(first, torch.device | str) or type(first) is int
    device = kwargs.pop("device", first if is_device else None)
    flags = [item for item in rest if type(item) is bool]  # non_blocking, copy
    copy = bool(kwargs.pop("copy", flags[1] if len(flags) > 1 else False))
    return _convert(tensor, dtype, device, copy, **kwargs)


@implements(_T.cpu)
def _cpu(func: Any, tensor: ShardedTensor, memory_format: Any = None, process_group: Any = None) -> ShardedTensor:
    return _convert(tensor, tensor.dtype, "cpu", memory_format=memory_format, process_group=process_group)


@implements(_T.cuda)
def _cuda(
    func: Any, tensor: ShardedTensor, device: Any = None, non_blocking: bool = False, **kwargs: Any
) -> ShardedTensor:
    return _convert(tensor, tensor.dtype, "cuda" if device is None else device, **kwargs)


@implements(_T.type_as)
def _type_as(func: Any, tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return _convert(tensor, other.dtype) if isinstance(tensor, ShardedTensor) else tensor.to(other.dtype)


def _convert(
    tensor: ShardedTensor,
    dtype: torch.dtype,
    device: Any = None,
    copy: bool = False,
    non_blocking: bool = False,
    memory_format: Any = None,
    process_group: Any = None,
) -> ShardedTensor:
    """Return the tensor itself if nothing changes."""
    target = None if device is None else torch.device(device)
    if target is not None and all(
        target.type == found.type and target.index in (None, found.index) for found in tensor._devices()
    ):
        target = None
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        raise RuntimeError("Only `torch.contiguous_format` or `torch.preserve_format` is supported!")
    backend = GroupBackend(process_group) if process_group is not None else tensor._backend
    if dtype == tensor.dtype and target is None and not copy and backend == tensor._backend:
        return tensor
    name = None if target is None else str(target)
    parts = tensor._backend.run(_T.to, tensor._layout, tensor._parts, dtype=dtype, device=name, copy=True)
    made = tensor._with_parts(parts, dtype)
    has_gradient = needs_gradient(tensor) and (dtype.is_floating_point or dtype.is_complex)
    note_gradient(made, has_gradient, not has_gradient)
    if target is not None or backend != tensor._backend:
        _place(made, backend, target if target is not None else tensor.device)
    return share_references(made) if tensor._init_rrefs else made


def _place(tensor: ShardedTensor, backend: Backend, device: torch.device) -> None:
    """Update the devices and places of the parts in the metadata."""
    own = device
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        own = torch.device("cuda", torch.cuda.current_device())
    names = backend.gather_objects(str(own)) if backend.participants else []  # none outside the group
    by_place = dict(zip(backend.participants, names, strict=True))
    shards = [
        ShardMetadata(
            shard.shard_offsets, shard.shard_sizes, placement_of(place, by_place.get(place, str(device)), backend)
        )
        for shard, place in zip(tensor._metadata.shards_metadata, tensor._layout.places, strict=False)
    ]
    tensor._backend, tensor._sharding_spec = backend, infer_sharding_spec(shards)
    tensor._metadata = replace(tensor._metadata, shards_metadata=shards)


@implements(*find_functions("empty_like full_like ones_like rand_like randint_like randn_like zeros_like", "torch"))
@torch.no_grad()
def _like(func: Callable[..., Any], input: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    """Create a new leaf with the same layout. Random numbers are drawn on the process of each part."""
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    if kwargs.get("layout", torch.strided) != torch.strided:
        raise unsupported(func, "only strided tensors can be sharded")
    if "device" in kwargs and torch.device(kwargs["device"]).type != input.device.type:
        raise unsupported(func, "it must be on the same device; use to() afterwards")
    columns = [[value] * len(input._parts) for value in args]
    parts = input._backend.run(
        call, input._layout, input._parts, *columns, name=f"torch.{func.__name__}", keywords=[], constants=kwargs
    )
    made = input._with_parts(parts, kwargs.get("dtype", input.dtype))
    made._batch = None
    note_gradient(made, bool(kwargs.get("requires_grad", False)), True)
    return made


@implements(torch.equal, _T.equal)
def _equal(func: Any, input: torch.Tensor, other: torch.Tensor) -> bool:
    return _could_be_same(input, other) and _are_all(input == other)


@implements(torch.allclose, _T.allclose)
def _allclose(func: Any, input: torch.Tensor, other: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    return _could_be_same(input, other) and _are_all(torch.isclose(input, other, *args, **kwargs))


def _could_be_same(input: torch.Tensor, other: torch.Tensor) -> bool:
    return input.size() == other.size() and input.dtype == other.dtype


def _are_all(flags: torch.Tensor) -> bool:
    """Return whether all elements are True; outside the process group, where there are none, return True."""
    assert isinstance(flags, ShardedTensor)  # as one of the operands was
    backend = flags._backend
    is_outside = isinstance(backend, GroupBackend) and not backend.is_member
    return is_outside or bool(flags.all())


@implements(init.uniform_)
@torch.no_grad()
def _uniform(func: Any, tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    return tensor.uniform_(a, b, **_generator(generator))


@implements(init.normal_)
@torch.no_grad()
def _normal(func: Any, tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    return tensor.normal_(mean, std, **_generator(generator))


@implements(init.constant_)
@torch.no_grad()
def _constant(func: Any, tensor: Any, val: float) -> Any:
    return tensor.fill_(val)


@implements(init.kaiming_uniform_)
@torch.no_grad()
def _kaiming_uniform(
    func: Any, tensor: Any, a: float = 0, mode: Any = "fan_in", nonlinearity: Any = "leaky_relu", generator: Any = None
) -> Any:
    if not tensor.numel():
        return tensor
    bound = math.sqrt(3.0) * init.calculate_gain(nonlinearity, a) / math.sqrt(calculate_correct_fan(tensor, mode))
    return tensor.uniform_(-bound, bound, **_generator(generator))


def _generator(generator: Any) -> dict[str, Any]:
    return {} if generator is None else {"generator": generator}  # it cannot be sent to workers
