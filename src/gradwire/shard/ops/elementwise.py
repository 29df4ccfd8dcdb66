"""Functions that work element by element: tables of names, and one implementation for all of them.

A name stands for what torch, `torch.Tensor`, `torch.nn.functional` and `torch.special` call so, and for what changes its
first argument in place (the name with an underscore). Random ones draw where each part is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from gradwire.shard.dispatch import implements
from gradwire.shard.ops._operands import offer, pointwise, pointwise_in_place
from gradwire.shard.tensor import ShardedTensor

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
