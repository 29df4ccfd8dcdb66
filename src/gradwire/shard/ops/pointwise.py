"""Functions that work element by element: tables of names, and one implementation for all of them.

A name stands for what torch, `torch.Tensor`, `torch.nn.functional` and `torch.special` call so, and for what changes its
first argument in place (the name with an underscore). Random ones draw where each part is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from gradwire.shard.backend import Part
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.layout import Layout, broadcast, lift, restrict
from gradwire.shard.tensor import ShardedTensor, from_layout

FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Functions of torch that run where the parts are, by the names under which they are sent there."""

_names: dict[Callable[..., Any], str] = {}
_SPACES = {"torch": torch, "Tensor": torch.Tensor, "functional": functional, "special": torch.special}


def find_functions(names: str, spaces: str = "torch Tensor functional special") -> Iterator[Callable[..., Any]]:
    """Yield all functions of these names, once they can be sent to parts."""
    for name in names.split():
        for space in spaces.split():
            function = getattr(_SPACES[space], name, None)
            if function is not None:
                FUNCTIONS[f"{space}.{name}"] = function
                _names.setdefault(function, f"{space}.{name}")
                yield function


def call(*values: Any, name: str, keywords: Sequence[str], constants: dict[str, Any]) -> Any:
    """Call one of `FUNCTIONS`; the last values are its keyword arguments `keywords`."""
    num = len(values) - len(keywords)
    return FUNCTIONS[name](*values[:num], **dict(zip(keywords, values[num:], strict=True)), **constants)


class PointwiseCall:
    """A call of one of `FUNCTIONS` with sharded operands, and how to run it on their parts."""

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        values = [*args, *kwargs.values()]
        self.operands = [item for item in values if isinstance(item, torch.Tensor)]
        sharded = [item for item in self.operands if isinstance(item, ShardedTensor)]
        for item in values:
            if isinstance(item, list | tuple) and any(isinstance(element, torch.Tensor) for element in item):
                raise unsupported(func, "lists of tensors are not supported")
        check_same_group(func, *sharded)
        # With empty tensors: gives the dtype and whether there is a gradient, and raises the errors that parts would raise.
        self.result = func(*map(probe, args), **{name: probe(item) for name, item in kwargs.items()})
        self.size = torch.Size(broadcast(*map(size_of, self.operands)))
        # The result is sharded like the leader.
        same = [item for item in sharded if size_of(item) == self.size]
        self.leader = same[0] if same else max(sharded, key=lambda item: size_of(item).numel())

    def run(self, layout: Layout, size: Sequence[int]) -> list[Part]:
        """Run it on the parts of a result of that layout and size."""
        keywords = [name for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)]
        values = [*self.args, *(self.kwargs[name] for name in keywords)]
        columns = [align(value, self.leader, layout, size) for value in values]
        constants = {name: value for name, value in self.kwargs.items() if name not in keywords}
        return self.leader._backend.run(
            call, layout, *columns, name=_names[self.func], keywords=keywords, constants=constants
        )


def check_same_group(func: Any, *operands: Any) -> None:
    """Check that all sharded operands are in the same group."""
    sharded = [item for item in operands if isinstance(item, ShardedTensor)]
    if any(item._backend != sharded[0]._backend for item in sharded[1:]):
        raise unsupported(func, "All distributed tensors should use the same ProcessGroup if used together in an op")


def size_of(value: torch.Tensor) -> torch.Size:
    """Return the size of a tensor; for a sharded one this is quicker than its `size`."""
    return value._metadata.size if isinstance(value, ShardedTensor) else value.size()


def probe(value: Any, longest: int = 0) -> Any:
    """Return a small tensor that behaves as another one would; return other values as they are.

    It has the same number of dimensions, dtype and need of a gradient. Functions of it are quick, draw no random numbers if
    it has no elements, and raise what they would raise.

    Dimensions that are longer than `longest` get that length.
    """
    if not isinstance(value, torch.Tensor):
        return value
    size = [min(longest, length) for length in size_of(value)]
    with torch.enable_grad():  # a clone must not be a leaf
        found = torch.zeros(size, dtype=value.dtype, requires_grad=value.requires_grad)
        return found.clone() if found.requires_grad and not value.is_leaf else found


def align(value: Any, leader: ShardedTensor, layout: Layout, size: Sequence[int]) -> list[Any]:
    """Return an operand as a column: its share for each part of a result of that layout and size."""
    if isinstance(value, torch.Tensor):
        return take_parts(leader._backend, value, restrict(layout, size, size_of(value)))
    return [value] * len(leader._backend.box_numbers(layout))


def take_parts(backend: Any, value: torch.Tensor, layout: Layout) -> list[Any]:
    """Return the parts of a sharded or of a replicated tensor in some layout."""
    if isinstance(value, ShardedTensor):
        return list(backend.move(value._parts, value._layout, layout, value._like))
    return list(backend.divide(value, layout))


def needs_gradient(*operands: Any) -> bool:
    """Return whether a result of these operands requires grad."""
    return torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in operands)


def derive(
    leader: ShardedTensor, layout: Layout, parts: Sequence[Part], size: Sequence[int], result: torch.Tensor
) -> ShardedTensor:
    """Create a tensor from computed parts; `result` gives its dtype and whether it requires grad."""
    if layout is leader._layout:
        made = leader._with_parts(parts, result.dtype)
        note_gradient(made, result.requires_grad, not result.requires_grad)
        return made
    return from_layout(leader._backend, layout, parts, size, leader._like.to(result.dtype), result.requires_grad)


def note_gradient(tensor: ShardedTensor, requires_grad: bool, is_leaf: bool) -> None:
    """Note whether parts require grad and are leaves, which references do not show."""
    metadata = tensor._metadata
    properties = replace(metadata.tensor_properties, requires_grad=requires_grad)
    tensor._metadata = replace(metadata, tensor_properties=properties)
    tensor._is_result = not is_leaf


def pointwise(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Implement a function of each element."""
    planned = PointwiseCall(func, args, kwargs)
    if planned.result is NotImplemented:  # of operators
        return planned.result
    if not isinstance(planned.result, torch.Tensor):
        raise unsupported(func, "it does not return a tensor when it is called like this")
    leader, size = planned.leader, planned.size
    layout = lift(leader._layout, size_of(leader), size)
    made = derive(leader, layout, planned.run(layout, size), size, planned.result)
    if made._batch is None and size_of(leader) == size:
        others = [item for item in planned.operands if isinstance(item, ShardedTensor) and size_of(item) == size]
        made._batch = next((item._batch for item in others if item._batch is not None), None)
    return made


def pointwise_in_place(func: Callable[..., Any], *args: Any, **kwargs: Any) -> ShardedTensor:
    """Implement a function that changes its first argument. It has finished on all places when this returns."""
    tensor = args[0] if args else None
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, "it would change a plain tensor; use full_tensor()")
    planned = PointwiseCall(func, args, kwargs)
    if planned.size != size_of(tensor):
        raise unsupported(func, f"the result has size {list(planned.size)}, the tensor {list(size_of(tensor))}")
    backend = tensor._backend
    backend.settle()
    backend.settle(planned.run(tensor._layout, planned.size))
    note_gradient(tensor, planned.result.requires_grad, planned.result.is_leaf)
    return tensor


def _in_place_by_flag(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    is_in_place = inspect.signature(func).bind(*args, **kwargs).arguments.get("inplace", False)
    return (pointwise_in_place if is_in_place else pointwise)(func, *args, **kwargs)


def _has_flag(function: Callable[..., Any]) -> bool:
    return inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters


def _convert_dtype(func: Callable[..., Any], tensor: ShardedTensor, *args: Any, **kwargs: Any) -> ShardedTensor:
    made: ShardedTensor = pointwise(func, tensor, *args, **kwargs)
    return tensor if made.dtype == tensor.dtype else made


UNARY = """
    abs absolute acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh bitwise_not
    ceil celu clamp clamp_max clamp_min clip conj_physical cos cosh deg2rad digamma dropout elu erf erfc erfinv exp
    exp2 expit expm1 fix float_power floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf
    isnan isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2 logical_not logit logsigmoid mish
    nan_to_num neg negative ndtr positive rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit
    silu sin sinc sinh softplus softshrink softsign sqrt square tan tanh tanhshrink threshold trunc
"""
BINARY = """
    add arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign div divide
    eq floor_divide fmax fmin fmod ge gcd greater greater_equal gt heaviside hypot isclose lcm ldexp le less
    less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt maximum minimum mul multiply ne nextafter
    not_equal pow remainder rsub sub subtract true_divide xlog1py xlogy
"""
TERNARY = "addcdiv addcmul lerp masked_fill where"
OPERATORS = """
    abs add and div eq floordiv ge gt invert le lshift lt mod mul ne neg or pos pow radd rand rdiv rfloordiv rlshift
    rmod rmul ror rpow rrshift rshift rsub rtruediv rxor sub truediv xor
"""
OPERATORS_IN_PLACE = "iadd iand idiv ifloordiv ilshift imod imul ior ipow irshift isub itruediv ixor"
CONVERSIONS = "bfloat16 bool byte cdouble cfloat char double float half int long short"
RANDOM = "bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_ uniform_"
ASSIGNMENTS = "copy_ fill_ zero_"


def _operators(names: str) -> Iterator[Callable[..., Any]]:
    return find_functions(" ".join(f"__{name}__" for name in names.split()), "Tensor")


_ALL = f"{UNARY} {BINARY} {TERNARY}"
for _function in find_functions(_ALL):
    implements(_function)(_in_place_by_flag if _has_flag(_function) else pointwise)
implements(*_operators(OPERATORS), *find_functions("clone contiguous", "torch Tensor"))(pointwise)
implements(
    *find_functions(" ".join(f"{name}_" for name in _ALL.split())),
    *_operators(OPERATORS_IN_PLACE),
    *find_functions(f"{RANDOM} {ASSIGNMENTS}"),
)(pointwise_in_place)
implements(*find_functions(CONVERSIONS, "Tensor"))(_convert_dtype)
