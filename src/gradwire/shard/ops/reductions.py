"""Reductions: sums, products, extremes, norms, deviations, and the losses that end in one.

Along dimensions that are whole in every part each part is reduced where it is, and the result stays sharded. Along others
the results of the parts are put together, and the result is a plain tensor, the same everywhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.shard.backend import Part
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.layout import Layout, chunk, drop, find_dim, reduce, stack, whole
from gradwire.shard.ops.pointwise import align, find_functions, needs_gradient, pointwise, probe, size_of
from gradwire.shard.tensor import ShardedTensor, from_layout

_T: Any = torch.Tensor
Options = dict[str, Any]


def dims_of(tensor: torch.Tensor, dim: Any) -> list[int]:
    """Return the dimensions that the argument `dim` of a reduction means: all of them if it is None.

    Raises:
        IndexError: There is no such dimension.
    """
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(tensor.dim()))
    named = dim if isinstance(dim, list | tuple) else [dim]
    return sorted({find_dim(item, tensor.dim()) for item in named})


def is_whole(tensor: ShardedTensor, dims: Sequence[int]) -> bool:
    """Return whether no part is cut along these dimensions, and others are left."""
    return len(dims) < tensor.dim() and all(tensor._layout.is_whole_along(dim, tensor.size(dim)) for dim in dims)


def made_whole(tensor: ShardedTensor, dims: Sequence[int]) -> ShardedTensor | None:
    """Return the tensor, divided so that these dimensions are whole; None if there is no other to divide it along."""
    if is_whole(tensor, dims):
        return tensor
    kept = [dim for dim in range(tensor.dim()) if dim not in dims]
    if not kept:
        return None
    backend = tensor._backend
    places = list(dict.fromkeys(tensor._layout.places))
    layout = backend.complete(chunk(tensor.size(), max(kept, key=tensor.size), places))
    parts = backend.move(tensor._parts, tensor._layout, layout, tensor._like)
    return from_layout(backend, layout, parts, tensor.size(), tensor._like, needs_gradient(tensor))


# -- of one part ---------------------------------------------------------------------------------------------------------
# Called where the part is, by name: ``reduce_dense(name, part, dims, keepdim, **options)``.

_LOCAL: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.sum,
    "nansum": torch.nansum,
    "mean": torch.mean,
    "amax": torch.amax,
    "amin": torch.amin,
    "any": torch.any,
    "all": torch.all,
    "logsumexp": torch.logsumexp,
    "std": lambda part, dims, keepdim, correction=1: torch.std(part, dims, correction=correction, keepdim=keepdim),
    "var": lambda part, dims, keepdim, correction=1: torch.var(part, dims, correction=correction, keepdim=keepdim),
    "count_nonzero": lambda part, dims, keepdim: torch.sum(part != 0, dims, keepdim),
    "vector_norm": lambda part, dims, keepdim, ord=2, dtype=None: torch.linalg.vector_norm(
        part, ord, dims, keepdim, dtype=dtype
    ),
    "argmax": lambda part, dims, keepdim: torch.argmax(part, dims[0], keepdim),
    "argmin": lambda part, dims, keepdim: torch.argmin(part, dims[0], keepdim),
    "max": lambda part, dims, keepdim, item: torch.max(part, dims[0], keepdim)[item],
    "min": lambda part, dims, keepdim, item: torch.min(part, dims[0], keepdim)[item],
}


def reduce_dense(name: str, part: torch.Tensor, dims: list[int], keepdim: bool, **options: Any) -> torch.Tensor:
    """Reduce a plain tensor along some of its dimensions."""
    if name != "prod":
        return _LOCAL[name](part, dims, keepdim, **options)
    for dim in sorted(dims, reverse=True):  # torch.prod takes one dimension
        part = torch.prod(part, dim, keepdim, **options)
    return part


def reduce_part(
    part: torch.Tensor, is_empty: bool, name: str, dims: list[int], keepdim: bool, options: Options, is_stacked: bool
) -> torch.Tensor:
    """Reduce one part: to nothing if it is empty, but even that has its place in the graph."""
    if not is_empty:
        found = reduce_dense(name, part, dims, keepdim, **options)
        return found.unsqueeze(0) if is_stacked else found
    dtype = reduce_dense(name, part.new_ones([1] * part.dim()), dims, keepdim, **options).dtype
    found = _emptied(torch.sum(part, dims, keepdim, dtype=dtype))
    return found.reshape(0, *found.size()) if is_stacked else found


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(0, 0) for _ in range(tensor.dim()))]


def _run(
    name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options, is_stacked: bool = False
) -> list[Part]:
    flags = [not box.num_elements for box in tensor._boxes()]
    constants = {"name": name, "dims": list(dims), "keepdim": keepdim, "options": options, "is_stacked": is_stacked}
    return tensor._backend.run(reduce_part, tensor._layout, tensor._parts, flags, **constants)


# -- of all parts --------------------------------------------------------------------------------------------------------


def outline(name: str, tensor: torch.Tensor, dims: Sequence[int], options: Options) -> torch.Tensor:
    """Reduce a small tensor of the same kind: tells dtype and need of a gradient, and raises what the parts would raise."""
    harmless = {"correction": 0} if "correction" in options else {}  # so few elements would give a warning
    return reduce_dense(name, probe(tensor, 2), list(dims), True, **{**options, **harmless})


def reduce_parts(
    name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options
) -> ShardedTensor:
    """Reduce along dimensions that are whole: the result stays sharded."""
    expected = outline(name, tensor, dims, options)
    layout = reduce(tensor._layout, dims)
    layout = layout if keepdim else drop(layout, dims)
    parts = _run(name, tensor, dims, keepdim, options)
    size, like = _reduced_size(tensor, dims, keepdim), tensor._like.to(expected.dtype)
    return from_layout(tensor._backend, layout, parts, size, like, expected.requires_grad)


def add_up(name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options) -> torch.Tensor:
    """Return the sum of what a reduction gives for each part: a plain tensor."""
    like = tensor._like.to(outline(name, tensor, dims, options).dtype)
    parts = _run(name, tensor, dims, True, options)
    layout, size = reduce(tensor._layout, dims), _reduced_size(tensor, dims)
    total = tensor._backend.replicate(parts, layout, size, like, is_sum=True)
    return total if keepdim else _squeeze(total, dims)


def combine(
    name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options, neutral: Any
) -> torch.Tensor:
    """Return the reduction of what it gives for each part: a plain tensor; `neutral` stands for empty parts."""
    layout = stack(reduce(tensor._layout, dims))
    like = tensor._like.to(outline(name, tensor, dims, options).dtype)
    parts = _run(name, tensor, dims, True, options, is_stacked=True)
    size = (len(layout.boxes), *_reduced_size(tensor, dims))
    stacked = tensor._backend.replicate(parts, layout, size, like)
    filled = torch.where(_covered(layout, size).to(stacked.device), stacked, neutral)
    total = reduce_dense(name, filled, [0], False, **options)
    return total if keepdim else _squeeze(total, dims)


def _reduced_size(tensor: torch.Tensor, dims: Sequence[int], keepdim: bool = True) -> list[int]:
    size = enumerate(size_of(tensor))
    return [1 if dim in dims else length for dim, length in size if keepdim or dim not in dims]


def _covered(layout: Layout, size: Sequence[int]) -> torch.Tensor:
    covered = torch.zeros(*size, dtype=torch.bool)
    for box in layout.boxes:
        covered[box.slices_in(whole(size))] = True
    return covered


def _squeeze(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return tensor.reshape([length for dim, length in enumerate(tensor.size()) if dim not in dims])


# -- extremes: elements that are equal share the gradient, wherever they are -----------------------------------------------


def _share_gradient(tensor: ShardedTensor, extreme: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Give a gradient to the largest or smallest elements, which have their reduced dimensions."""
    backend, layout, size = tensor._backend, reduce(tensor._layout, dims), extreme.size()
    column = align(extreme, tensor, tensor._layout, tensor.size())
    with torch.no_grad():
        ties = backend.run(count_equal, tensor._layout, tensor._parts, column, dims=list(dims))
        number = backend.replicate(ties, layout, size, tensor._like, is_sum=True)
    numbers = align(number, tensor, tensor._layout, tensor.size())
    parts = backend.run(zeros_of_equal, tensor._layout, tensor._parts, column, numbers, dims=list(dims))
    found = extreme + backend.replicate(parts, layout, size, tensor._like, is_sum=True)
    return found if keepdim else _squeeze(found, dims)


def count_equal(part: torch.Tensor, extreme: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Count the elements that are equal to the extreme ones."""
    found = (part == extreme).sum(dims, keepdim=True).to(part.dtype)
    return found if part.numel() else _emptied(found)


def zeros_of_equal(part: torch.Tensor, extreme: torch.Tensor, number: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Make zeros through which elements that are equal to the extreme ones get their shares of the gradient."""
    found: torch.Tensor = _Zeros.apply(part, (part == extreme).to(part.dtype) / number, dims)  # type: ignore[no-untyped-call]
    return found if part.numel() else _emptied(found)


class _Zeros(torch.autograd.Function):
    """Zeros of the reduced size, with the gradient of a weighted sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, weights: torch.Tensor, dims: list[int]) -> torch.Tensor:
        ctx.save_for_backward(weights)
        return part.new_zeros([1 if dim in dims else length for dim, length in enumerate(part.size())])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (weights,) = ctx.saved_tensors
        return gradients[0] * weights, None, None


# -- along dimensions that are cut: ``(name, tensor, dims, keepdim, options)`` ----------------------------------------------


def _combining(neutral: Any) -> Any:
    return lambda name, tensor, dims, keepdim, options: combine(name, tensor, dims, keepdim, options, neutral)


def _mean(name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options) -> torch.Tensor:
    outline("mean", tensor, dims, options)  # integers have none
    return add_up("sum", tensor, dims, keepdim, options) / math.prod(tensor.size(dim) for dim in dims)


def _extreme(name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options) -> torch.Tensor:
    has_gradient = outline(name, tensor, dims, {}).requires_grad
    with torch.no_grad():
        found = combine(name, tensor, dims, keepdim or has_gradient, {}, _bound(tensor.dtype, name == "amin"))
    return _share_gradient(tensor, found, dims, keepdim) if has_gradient else found


def _bound(dtype: torch.dtype, is_max: bool) -> Any:
    """Return the largest or smallest number of a dtype."""
    if dtype.is_floating_point:
        return math.inf if is_max else -math.inf
    if dtype == torch.bool:
        return is_max
    return torch.iinfo(dtype).max if is_max else torch.iinfo(dtype).min


def _norm(name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options) -> torch.Tensor:
    expected = outline(name, tensor, dims, options)
    order = options.get("ord", 2)
    if order == 0:
        return add_up(name, tensor, dims, keepdim, options)
    if math.isinf(order):
        values: Any = torch.abs(tensor).to(expected.dtype)
        return _extreme("amax" if order > 0 else "amin", values, dims, keepdim, {})
    return combine(name, tensor, dims, keepdim, options, 0.0 if order > 0 else math.inf)


def _deviation(name: str, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: Options) -> torch.Tensor:
    """Return the norm of the differences to the mean, whose gradient exists also where it is zero; or its square."""
    outline(name, tensor, dims, options)
    correction = options.get("correction", 1)
    number = math.prod(tensor.size(dim) for dim in dims) - (1 if correction is None else correction)
    differences: ShardedTensor = torch.sub(tensor, _mean("mean", tensor, dims, True, {}))  # type: ignore[assignment]
    found: torch.Tensor = combine("vector_norm", differences, dims, keepdim, {}, 0.0)
    found = found / math.sqrt(number) if number > 0 else found / 0
    return found.square() if name == "var" else found


_TOTALS: dict[str, Any] = {
    "sum": add_up,
    "nansum": add_up,
    "count_nonzero": add_up,
    "mean": _mean,
    "prod": _combining(1),
    "any": _combining(False),
    "all": _combining(True),
    "logsumexp": _combining(-math.inf),
    "amax": _extreme,
    "amin": _extreme,
    "vector_norm": _norm,
    "std": _deviation,
    "var": _deviation,
}


# -- the functions of torch ------------------------------------------------------------------------------------------------


def _reduce(name: str, tensor: ShardedTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    dims = dims_of(tensor, options.pop("axis", dim))
    do = reduce_parts if is_whole(tensor, dims) else _TOTALS[name]
    found: torch.Tensor = do(name, tensor, dims, bool(keepdim), options)
    return found


def _reduction(func: Any, input: ShardedTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    return _reduce(func.__name__, input, dim, keepdim, **options)


for _name in ("sum", "nansum", "mean", "prod", "amax", "amin", "any", "all", "count_nonzero", "logsumexp"):
    implements(getattr(torch, _name), getattr(_T, _name))(_reduction)


@implements(torch.linalg.vector_norm)
def _vector_norm(func: Any, input: ShardedTensor, ord: Any = 2, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _reduce("vector_norm", input, *args, ord=ord, **kwargs)


@implements(torch.norm, _T.norm)
def _torch_norm(func: Any, input: ShardedTensor, p: Any = "fro", *args: Any, **kwargs: Any) -> torch.Tensor:
    if p == "nuc":
        raise unsupported(func, "the nuclear norm needs the whole matrix")
    return _reduce("vector_norm", input, *args, ord=2 if p in ("fro", None) else p, **kwargs)


@implements(torch.linalg.norm)
def _linalg_norm(func: Any, input: ShardedTensor, ord: Any = None, dim: Any = None, *args: Any, **kwargs: Any) -> Any:
    if ord not in (None, "fro") and len(dims_of(input, dim)) > 1:
        raise unsupported(func, "norms of matrices need the whole matrix; torch.linalg.vector_norm does not")
    return _reduce("vector_norm", input, dim, *args, ord=2 if ord in (None, "fro") else ord, **kwargs)


@implements(torch.std, _T.std, torch.var, _T.var)
def _std_or_var(
    func: Any, input: ShardedTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, **options: Any
) -> torch.Tensor:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if unbiased is not None:
        options["correction"] = int(unbiased)
    return _reduce(func.__name__, input, dim, keepdim, **options)


@implements(torch.max, _T.max, torch.min, _T.min)
def _max_or_min(func: Any, input: Any, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    """Implement both for two tensors, for all elements, and along one dimension, with indices."""
    name = func.__name__
    other, dim = kwargs.get("other", dim), kwargs.get("axis", dim)
    if isinstance(other, torch.Tensor):
        return pointwise(torch.maximum if name == "max" else torch.minimum, input, other)
    if dim is None:
        return _reduce(f"a{name}", input)
    dims = dims_of(input, dim)
    tensor = made_whole(input, dims)
    if tensor is None:
        return func(input.full_tensor(), dims[0], keepdim)
    values = reduce_parts(name, tensor, dims, keepdim, {"item": 0})
    with torch.no_grad():
        indices = reduce_parts(name, tensor, dims, keepdim, {"item": 1})
    return getattr(torch.return_types, name)((values, indices))


@implements(torch.argmax, _T.argmax, torch.argmin, _T.argmin)
@torch.no_grad()
def _argmax_or_argmin(func: Any, input: ShardedTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dim = kwargs.get("axis", dim)
    tensor = made_whole(input, dims_of(input, dim)) if dim is not None else None
    if tensor is None:
        return func(input.full_tensor(), dim, keepdim)
    return reduce_parts(func.__name__, tensor, dims_of(input, dim), keepdim, {})


# -- losses ----------------------------------------------------------------------------------------------------------------

LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss
    soft_margin_loss
"""


@implements(*find_functions(LOSSES, "functional"))
def _loss(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    reduction = given.get("reduction", "mean")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if given.pop("size_average", None) is not None or given.pop("reduce", None) is not None:
        raise unsupported(func, "size_average and reduce are old names; use reduction=")
    values = pointwise(func, given.pop("input"), given.pop("target"), **{**given, "reduction": "none"})
    if reduction == "none":
        return values
    return values.sum() / values.size(0) if reduction == "batchmean" else getattr(values, reduction)()
