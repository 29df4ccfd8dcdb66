"""Reductions: sums, products, extremes, norms, deviations; `_reducing` tells where the results are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.shard.dispatch import Implementation, implements, unsupported
from gradwire.shard.ops._local_reductions import (
    all_part,
    any_part,
    count_part,
    index_part,
    logsumexp_part,
    max_part,
    mean_part,
    min_part,
    nansum_part,
    norm_part,
    picked_part,
    prod_part,
    std_part,
    sum_part,
    var_part,
)
from gradwire.shard.ops._operands import input_first, pointwise
from gradwire.shard.ops._reducing import (
    add_up,
    combine,
    dims_of,
    is_whole,
    made_whole,
    outline,
    reduce_parts,
    share_gradient,
)
from gradwire.shard.tensor import ShardedTensor

_T: Any = torch.Tensor
Result = ShardedTensor | torch.Tensor


def _read(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], func: Any) -> dict[str, Any]:
    """Arguments after the tensor, by their names."""
    found = {("dim" if name == "axis" else name): value for name, value in kwargs.items()}
    found.update(zip(names, args[1:], strict=False))
    if found.pop("out", None) is not None:
        raise unsupported(func, "it cannot write to out=")
    return found


# -- sums ------------------------------------------------------------------------------------------------------------------


def _reduce(local: Callable[..., torch.Tensor], total: Any, names: str) -> Implementation:
    """Reduces parts where the dimensions are whole, and does `total(tensor, dims, keepdim, options)` where they are not."""

    @input_first
    def implementation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
        tensor: ShardedTensor = args[0]
        options = _read(names.split(), args, kwargs, func)
        dims, keepdim = dims_of(tensor, options.pop("dim", None)), bool(options.pop("keepdim", False))
        if is_whole(tensor, dims):
            return reduce_parts(local, tensor, dims, keepdim, options)
        found: Result = total(tensor, dims, keepdim, options)
        return found

    return implementation


def _adding(local: Callable[..., torch.Tensor]) -> Any:
    return lambda tensor, dims, keepdim, options: add_up(local, tensor, dims, keepdim, options)


def _combining(local: Callable[..., torch.Tensor], neutral: Any) -> Any:
    return lambda tensor, dims, keepdim, options: combine(local, tensor, dims, keepdim, options, neutral)


def _mean(tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]) -> torch.Tensor:
    outline(mean_part, tensor, dims, options)  # integers have none
    return add_up(sum_part, tensor, dims, keepdim, options) / math.prod(tensor.size(dim) for dim in dims)


def _extreme(is_max: bool) -> Any:
    local = max_part if is_max else min_part

    def total(tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]) -> torch.Tensor:
        has_gradient = outline(local, tensor, dims, {}).requires_grad
        with torch.no_grad():
            found = combine(local, tensor, dims, keepdim or has_gradient, {}, _bound(tensor.dtype, not is_max))
        return share_gradient(tensor, found, dims, keepdim) if has_gradient else found

    return total


def _bound(dtype: torch.dtype, is_max: bool) -> Any:
    """The largest or smallest number of a dtype."""
    if dtype.is_floating_point:
        return math.inf if is_max else -math.inf
    if dtype == torch.bool:
        return is_max
    return torch.iinfo(dtype).max if is_max else torch.iinfo(dtype).min


def _norm(tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]) -> torch.Tensor:
    expected = outline(norm_part, tensor, dims, options)
    order = options.get("ord", 2)
    if order == 0:
        return add_up(norm_part, tensor, dims, keepdim, options)
    if math.isinf(order):
        values = torch.abs(tensor).to(expected.dtype)
        found: torch.Tensor = _extreme(order > 0)(values, dims, keepdim, {})
        return found
    return combine(norm_part, tensor, dims, keepdim, options, 0.0 if order > 0 else math.inf)


def _deviation(tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]) -> torch.Tensor:
    """The norm of the differences to the mean, whose gradient exists also where it is zero."""
    outline(std_part, tensor, dims, options)
    correction = options.get("correction", 1)
    number = math.prod(tensor.size(dim) for dim in dims) - (1 if correction is None else correction)
    differences: ShardedTensor = torch.sub(tensor, _mean(tensor, dims, True, {}))  # type: ignore[assignment]
    found: torch.Tensor = combine(norm_part, differences, dims, keepdim, {}, 0.0)
    return found / math.sqrt(number) if number > 0 else found / 0


def _variance(tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]) -> torch.Tensor:
    return _deviation(tensor, dims, keepdim, options).square()


for _names, _local, _total, _arguments in (
    ("sum", sum_part, _adding(sum_part), "dim keepdim"),
    ("nansum", nansum_part, _adding(nansum_part), "dim keepdim"),
    ("mean", mean_part, _mean, "dim keepdim"),
    ("prod", prod_part, _combining(prod_part, 1), "dim keepdim"),
    ("amax", max_part, _extreme(True), "dim keepdim"),
    ("amin", min_part, _extreme(False), "dim keepdim"),
    ("any", any_part, _combining(any_part, False), "dim keepdim"),
    ("all", all_part, _combining(all_part, True), "dim keepdim"),
    ("count_nonzero", count_part, _adding(count_part), "dim"),
    ("logsumexp", logsumexp_part, _combining(logsumexp_part, -math.inf), "dim keepdim"),
):
    implements(getattr(torch, _names), getattr(_T, _names))(_reduce(_local, _total, _arguments))
_vector_norm = implements(torch.linalg.vector_norm)(_reduce(norm_part, _norm, "ord dim keepdim"))


# -- norms and deviations --------------------------------------------------------------------------------------------------


@implements(torch.norm, _T.norm)
@input_first
def _torch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = _read(["p", "dim", "keepdim"], args, kwargs, func)
    order = options.pop("p", "fro")
    if order == "nuc":
        raise unsupported(func, "the nuclear norm needs the whole matrix")
    options["ord"] = 2 if order in ("fro", None) else order
    return _vector_norm(func, (args[0],), options)


@implements(torch.linalg.norm)
@input_first
def _linalg_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    options = _read(["ord", "dim", "keepdim"], args, kwargs, func)
    order = options.pop("ord", None)
    num_dims = len(dims_of(args[0], options.get("dim")))
    if order not in (None, "fro") and num_dims > 1:
        raise unsupported(func, "norms of matrices need the whole matrix; torch.linalg.vector_norm does not")
    options["ord"] = 2 if order in (None, "fro") else order
    return _vector_norm(func, (args[0],), options)


def _spread(local: Callable[..., torch.Tensor], total: Any) -> Implementation:
    """Standard deviation or variance, in all the ways in which one may call them."""
    reduce = _reduce(local, total, "dim")

    @input_first
    def implementation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 1 and isinstance(args[1], bool):
            args, kwargs = args[:1], {**kwargs, "unbiased": args[1]}
        options = _read(["dim", "unbiased", "keepdim"], args, kwargs, func)
        unbiased = options.pop("unbiased", None)
        if unbiased is not None:
            options["correction"] = int(unbiased)
        return reduce(func, args[:1], options)

    return implementation


implements(torch.std, _T.std)(_spread(std_part, _deviation))
implements(torch.var, _T.var)(_spread(var_part, _variance))


# -- extremes and where they are -----------------------------------------------------------------------------------------


def _extreme_of(name: str, other: Callable[..., Any]) -> Implementation:
    """torch.max and torch.min: of two tensors, of all elements, or along one dimension, with indices."""
    full = _reduce(max_part if name == "max" else min_part, _extreme(name == "max"), "dim keepdim")

    @input_first
    def implementation(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "other" in kwargs or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
            return pointwise(other, args, kwargs)
        options = _read(["dim", "keepdim"], args, kwargs, func)
        if options.get("dim") is None:
            return full(func, args[:1], {})
        tensor, dims = args[0], dims_of(args[0], options["dim"])
        keepdim = bool(options.get("keepdim", False))
        whole = made_whole(tensor, dims)
        if whole is None:
            return getattr(torch, name)(tensor.full_tensor(), dims[0], keepdim)
        values = reduce_parts(picked_part, whole, dims, keepdim, {"name": name, "item": 0})
        with torch.no_grad():
            indices = reduce_parts(picked_part, whole, dims, keepdim, {"name": name, "item": 1})
        return getattr(torch.return_types, name)((values, indices))

    return implementation


implements(torch.max, _T.max)(_extreme_of("max", torch.maximum))
implements(torch.min, _T.min)(_extreme_of("min", torch.minimum))


@implements(torch.argmax, _T.argmax, torch.argmin, _T.argmin)
@input_first
@torch.no_grad()
def _index_of_extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Along one dimension; of all elements, the whole tensor is looked at."""
    options = _read(["dim", "keepdim"], args, kwargs, func)
    tensor, dim, keepdim = args[0], options.get("dim"), bool(options.get("keepdim", False))
    whole = made_whole(tensor, dims_of(tensor, dim)) if dim is not None else None
    if whole is None:
        return func(tensor.full_tensor(), dim, keepdim)
    return reduce_parts(index_part, whole, dims_of(tensor, dim), keepdim, {"name": func.__name__})
