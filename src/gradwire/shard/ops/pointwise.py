"""Functions that work element by element: tables of names, and one implementation for all of them.

A name stands for what torch, `torch.Tensor`, `torch.nn.functional` and `torch.special` call so, and for what changes its
first argument in place (the name with an underscore). Random ones draw where each part is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from gradwire.shard.backend import Part
from gradwire.shard.dispatch import Implementation, implements, unsupported
from gradwire.shard.layout import Box, Layout
from gradwire.shard.tensor import ShardedTensor, from_layout

Range = tuple[int, int]
"""Offset and length."""


def broadcast(*sizes: Sequence[int]) -> tuple[int, ...]:
    """The size that tensors of these sizes are broadcast to.

    Raises:
        RuntimeError: They do not fit.
    """
    num_dims = max(map(len, sizes))
    result = [1] * num_dims
    for size in sizes:
        for dim, length in enumerate(size, num_dims - len(size)):
            if result[dim] == 1:
                result[dim] = length
            elif length not in (1, result[dim]):
                raise RuntimeError(
                    f"The size of tensor a ({result[dim]}) must match the size of tensor b ({length}) at non-singleton "
                    f"dimension {dim}"
                )
    return tuple(result)


def lift(layout: Layout, size: Sequence[int], result: Sequence[int]) -> Layout:
    """The layout of a tensor of `size` as one of the result that it is broadcast to."""
    if tuple(size) == tuple(result):
        return layout
    num_new = len(result) - len(size)

    def lifted(box: Box) -> Box:
        ranges: list[Range] = [(0, length) for length in result[:num_new]]
        for dim, (offset, length) in enumerate(_ranges(box)):
            is_same = size[dim] == result[num_new + dim]
            ranges.append((offset, length) if is_same else (0, result[num_new + dim] * length))
        return _box(ranges)

    return _map(layout, lifted)


def restrict(layout: Layout, result: Sequence[int], size: Sequence[int]) -> Layout:
    """What each box of a result needs of a tensor of `size` that is broadcast to it."""
    if tuple(size) == tuple(result):
        return layout
    num_new = len(result) - len(size)

    def restricted(box: Box) -> Box:
        ranges = _ranges(box)[num_new:]
        return _box(
            [
                (offset, length) if size[dim] == result[num_new + dim] else (0, min(1, length))
                for dim, (offset, length) in enumerate(ranges)
            ]
        )

    return _map(layout, restricted)


def reduce(layout: Layout, dims: Sequence[int]) -> Layout:
    """What each box makes up of a tensor whose dimensions `dims` were reduced to length 1; nothing if it is empty."""

    def reduced(box: Box) -> Box:
        if not box.num_elements:
            return nothing(len(box.sizes))
        return _box([(0, 1) if dim in dims else item for dim, item in enumerate(_ranges(box))])

    return _map(layout, reduced)


def drop(layout: Layout, dims: Sequence[int]) -> Layout:
    """The layout without some dimensions, along which the tensor has length 1."""
    return _map(layout, lambda box: _box([item for dim, item in enumerate(_ranges(box)) if dim not in dims]))


def stack(layout: Layout) -> Layout:
    """Every box by itself, along a new first dimension."""
    boxes = tuple(_box([(number, min(1, box.num_elements)), *_ranges(box)]) for number, box in enumerate(layout.boxes))
    return Layout(boxes, layout.places)


def chunk(size: Sequence[int], dim: int, places: Sequence[int | str]) -> Layout:
    """Parts of equal length along one dimension, as far as that goes."""
    step = -(-size[dim] // len(places))
    boxes = []
    for number in range(len(places)):
        start = min(number * step, size[dim])
        ranges = [(0, length) for length in size]
        ranges[dim] = (start, min(step, size[dim] - start))
        boxes.append(_box(ranges))
    return Layout(tuple(boxes), tuple(places))


def nothing(num_dims: int) -> Box:
    """An empty box."""
    return Box((0,) * num_dims, (0,) * num_dims)


def _ranges(box: Box) -> list[Range]:
    return list(zip(box.offsets, box.sizes, strict=True))


def _box(ranges: Sequence[Range]) -> Box:
    return Box(tuple(offset for offset, _ in ranges), tuple(length for _, length in ranges))


def _map(layout: Layout, change: Callable[[Box], Box]) -> Layout:
    return Layout(tuple(change(box) for box in layout.boxes), layout.places)


FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What is run where the parts are, by the names under which it is sent there."""

_names: dict[Callable[..., Any], str] = {}


def offer(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a function be run where parts are."""
    FUNCTIONS[name] = function
    _names.setdefault(function, name)
    return function


def call(*values: Any, name: str, keywords: Sequence[str], constants: dict[str, Any]) -> Any:
    """Runs one of `FUNCTIONS`; the last values are its keyword arguments `keywords`."""
    num = len(values) - len(keywords)
    return FUNCTIONS[name](*values[:num], **dict(zip(keywords, values[num:], strict=True)), **constants)


class Call:
    """A function of operands, and how to run it on their parts.

    Args:
        func: One of `FUNCTIONS`.
        args: Its arguments.
        kwargs: Its keyword arguments.

    Attributes:
        operands: The tensors among the arguments.
        size: Of the result.
        result: What it returns for tensors without elements; tells the dtype, and whether there will be a gradient.
        leader: The operand as which the result is divided.

    Raises:
        RuntimeError: It is called in a way that sharded tensors do not know, or sizes do not fit.
        Exception: What the function raises for operands of these dtypes.
    """

    def __init__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if kwargs.get("out") is not None:
            raise unsupported(func, "it cannot write to out=")
        self.func, self.args, self.kwargs = func, list(args), {k: v for k, v in kwargs.items() if k != "out"}
        self.operands = [item for item in (*self.args, *self.kwargs.values()) if isinstance(item, torch.Tensor)]
        sharded = [item for item in self.operands if isinstance(item, ShardedTensor)]
        self._check(sharded)
        self.result = func(*map(probe, self.args), **{name: probe(item) for name, item in self.kwargs.items()})
        self.size = torch.Size(broadcast(*map(size_of, self.operands)))
        same = [item for item in sharded if size_of(item) == self.size]
        self.leader = same[0] if same else max(sharded, key=lambda item: size_of(item).numel())

    def _check(self, sharded: Sequence[ShardedTensor]) -> None:
        for item in (*self.args, *self.kwargs.values()):
            if isinstance(item, list | tuple) and any(isinstance(element, torch.Tensor) for element in item):
                raise unsupported(self.func, "it takes no lists of tensors")
        if any(item._backend != sharded[0]._backend for item in sharded[1:]):
            raise unsupported(
                self.func, "All distributed tensors should use the same ProcessGroup if used together in an op"
            )

    def run(self, layout: Layout, size: Sequence[int]) -> list[Part]:
        """Runs it on the parts of a result of that layout and size."""
        backend = self.leader._backend
        keywords = [name for name, value in self.kwargs.items() if isinstance(value, torch.Tensor)]
        values = [*self.args, *(self.kwargs[name] for name in keywords)]
        columns = [align(value, self.leader, layout, size) for value in values]
        constants = {name: value for name, value in self.kwargs.items() if name not in keywords}
        return backend.run(call, layout, *columns, name=_names[self.func], keywords=keywords, constants=constants)


def input_first(implementation: Implementation) -> Implementation:
    """For functions whose tensor may be given as ``input=``: the implementation gets it as the first argument."""

    @functools.wraps(implementation)
    def with_input(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        return implementation(func, args, kwargs)

    return with_input


def size_of(value: torch.Tensor) -> torch.Size:
    """Of a tensor; quicker than asking the tensor itself if it is sharded."""
    return value._metadata.size if isinstance(value, ShardedTensor) else value.size()


def probe(value: Any, longest: int = 0) -> Any:
    """A small tensor that behaves as another one would; other values are left as they are.

    It has the same number of dimensions, dtype and need of a gradient. Functions of it are quick, draw no random numbers if
    it has no elements, and raise what they would raise.

    Args:
        value: Any argument of a function.
        longest: What dimensions that are longer become.
    """
    if not isinstance(value, torch.Tensor):
        return value
    size = [min(longest, length) for length in size_of(value)]
    with torch.enable_grad():  # a clone must not be a leaf
        found = torch.zeros(size, dtype=value.dtype, requires_grad=value.requires_grad)
        return found.clone() if found.requires_grad and not value.is_leaf else found


def align(value: Any, leader: ShardedTensor, layout: Layout, size: Sequence[int]) -> list[Any]:
    """An operand as a column: what each part of a result of that layout and size needs of it."""
    backend = leader._backend
    if isinstance(value, ShardedTensor):
        return list(backend.move(value._parts, value._layout, restrict(layout, size, size_of(value)), value._like))
    if isinstance(value, torch.Tensor):
        return list(backend.divide(value, restrict(layout, size, value.size())))
    return [value] * len(backend.box_numbers(layout))


def pointwise(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of each element."""
    planned = Call(func, args, kwargs)
    if planned.result is NotImplemented:  # of operators
        return planned.result
    if not isinstance(planned.result, torch.Tensor):
        raise unsupported(func, "it returns no tensor when it is called like this")
    leader, size = planned.leader, planned.size
    layout = lift(leader._layout, size_of(leader), size)
    made = derive(leader, layout, planned.run(layout, size), size, planned.result)
    if made._batch is None and size_of(leader) == size:
        others = [item for item in planned.operands if isinstance(item, ShardedTensor) and size_of(item) == size]
        made._batch = next((item._batch for item in others if item._batch is not None), None)
    return made


def derive(
    leader: ShardedTensor, layout: Layout, parts: Sequence[Part], size: Sequence[int], result: torch.Tensor
) -> ShardedTensor:
    """What was made of sharded tensors; `result` tells its dtype and whether it has a gradient."""
    if layout is leader._layout:
        made = leader._with_parts(parts, result.dtype)
        note_gradient(made, result.requires_grad, not result.requires_grad)
        return made
    return from_layout(leader._backend, layout, parts, size, leader._like.to(result.dtype), result.requires_grad)


def pointwise_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """A function that changes its first argument. It is done everywhere when this returns."""
    tensor = args[0] if args else None
    if not isinstance(tensor, ShardedTensor):
        raise unsupported(func, "it would change a plain tensor; use full_tensor()")
    planned = Call(func, args, kwargs)
    if planned.size != size_of(tensor):
        raise unsupported(func, f"the result has size {list(planned.size)}, the tensor {list(size_of(tensor))}")
    backend = tensor._backend
    backend.settle()
    backend.settle(planned.run(tensor._layout, planned.size))
    note_gradient(tensor, planned.result.requires_grad, planned.result.is_leaf)
    return tensor


def note_gradient(tensor: ShardedTensor, requires_grad: bool, is_leaf: bool) -> None:
    """Tells a tensor whether its parts have a gradient, and whether they are leaves: of references nobody can tell."""
    metadata = tensor._metadata
    properties = replace(metadata.tensor_properties, requires_grad=requires_grad)
    tensor._metadata = replace(metadata, tensor_properties=properties)
    tensor._is_result = not is_leaf


_T: Any = torch.Tensor

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

_SPACES = {"torch": torch, "Tensor": torch.Tensor, "functional": functional, "special": torch.special}


def _known(names: str, spaces: str = "torch Tensor functional special") -> Iterator[Callable[..., Any]]:
    """Whatever has one of these names, ready to be sent to parts."""
    for name in names.split():
        for space in spaces.split():
            function = getattr(_SPACES[space], name, None)
            if function is not None:
                yield offer(f"{space}.{name}", function)


def _operators(names: str) -> Iterator[Callable[..., Any]]:
    return _known(" ".join(f"__{name}__" for name in names.split()), "Tensor")


def _with_flag(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that works in place if its argument ``inplace`` says so."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    return (pointwise_in_place if bound.arguments.get("inplace", False) else pointwise)(func, args, kwargs)


def _has_flag(function: Callable[..., Any]) -> bool:
    return inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters


def _convert(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardedTensor:
    """To another dtype; as always, the tensor itself if it has that already."""
    made: ShardedTensor = pointwise(func, args, kwargs)
    return args[0] if made.dtype == args[0].dtype else made


_ALL = f"{UNARY} {BINARY} {TERNARY}"
for _function in _known(_ALL):
    implements(_function)(_with_flag if _has_flag(_function) else pointwise)
for _function in _operators(OPERATORS):
    implements(_function)(pointwise)
for _function in _known(" ".join(f"{name}_" for name in _ALL.split())):
    implements(_function)(pointwise_in_place)
for _function in (*_operators(OPERATORS_IN_PLACE), *_known(f"{RANDOM} {ASSIGNMENTS}")):
    implements(_function)(pointwise_in_place)
for _function in _known(CONVERSIONS, "Tensor"):
    implements(_function)(_convert)
