"""Reductions: sums, products, extremes, norms, deviations; `_reducing` tells where the results are."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from gradwire.shard.backend import Part
from gradwire.shard.dispatch import Implementation, implements, unsupported
from gradwire.shard.layout import Layout, whole
from gradwire.shard.ops import pointwise as boxes
from gradwire.shard.ops.pointwise import align, input_first, offer, pointwise, probe, size_of
from gradwire.shard.tensor import ShardedTensor, from_layout

Local = Callable[..., torch.Tensor]
"""``local(part, dims, keepdim, **options)``; at the top of a module, so that it is found everywhere."""


def dims_of(tensor: torch.Tensor, dim: Any) -> list[int]:
    """The dimensions that somebody named: none stands for all.

    Raises:
        IndexError: There is no such dimension.
    """
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(tensor.dim()))
    named = list(dim) if isinstance(dim, list | tuple) else [dim]
    for item in named:
        if not -tensor.dim() <= item < tensor.dim():
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-tensor.dim()}, {tensor.dim() - 1}], got {item})"
            )
    return sorted({item % tensor.dim() for item in named})


def is_whole(tensor: ShardedTensor, dims: Sequence[int]) -> bool:
    """Whether no part is cut along these dimensions, and others are left."""
    return len(dims) < tensor.dim() and all(tensor._layout.is_whole_along(dim, tensor.size(dim)) for dim in dims)


def outline(local: Local, tensor: torch.Tensor, dims: Sequence[int], options: dict[str, Any]) -> torch.Tensor:
    """The reduction of a small tensor of the same kind: tells dtype and need of a gradient, and raises what is to raise."""
    harmless = {"correction": 0} if "correction" in options else {}  # so few elements would give a warning
    return local(probe(tensor, 2), list(dims), True, **{**options, **harmless})


def reduced_size(tensor: torch.Tensor, dims: Sequence[int], keepdim: bool = True) -> list[int]:
    """What is left of the size of a tensor."""
    size = enumerate(size_of(tensor))
    return [1 if dim in dims else length for dim, length in size if keepdim or dim not in dims]


def reduce_parts(
    local: Local, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]
) -> ShardedTensor:
    """The result of a reduction along dimensions that are whole: it stays sharded."""
    expected = outline(local, tensor, dims, options)
    layout = boxes.reduce(tensor._layout, dims)
    layout = layout if keepdim else boxes.drop(layout, dims)
    parts = _run(local, tensor, dims, keepdim, options)
    size, like = reduced_size(tensor, dims, keepdim), tensor._like.to(expected.dtype)
    return from_layout(tensor._backend, layout, parts, size, like, expected.requires_grad)


def add_up(
    local: Local, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any]
) -> torch.Tensor:
    """The sum of what a reduction gives for each part: a plain tensor."""
    like = tensor._like.to(outline(local, tensor, dims, options).dtype)
    layout = boxes.reduce(tensor._layout, dims)
    parts = _run(local, tensor, dims, True, options)
    total = tensor._backend.replicate(parts, layout, reduced_size(tensor, dims), like, is_sum=True)
    return total if keepdim else _squeeze(total, dims)


def combine(
    local: Local, tensor: ShardedTensor, dims: Sequence[int], keepdim: bool, options: dict[str, Any], neutral: Any
) -> torch.Tensor:
    """What a reduction gives for what it gave for each part: a plain tensor.

    Args:
        local: The reduction.
        tensor: What is reduced.
        dims: Along which dimensions.
        keepdim: Whether they stay, with length 1.
        options: For the reduction.
        neutral: What changes nothing, where a part has nothing to say.
    """
    layout = boxes.stack(boxes.reduce(tensor._layout, dims))
    like = tensor._like.to(outline(local, tensor, dims, options).dtype)
    parts = _run(local, tensor, dims, True, options, is_stacked=True)
    size = (len(layout.boxes), *reduced_size(tensor, dims))
    stacked = tensor._backend.replicate(parts, layout, size, like)
    total = local(torch.where(_covered(layout, size).to(stacked.device), stacked, neutral), [0], False, **options)
    return total if keepdim else _squeeze(total, dims)


def _covered(layout: Layout, size: Sequence[int]) -> torch.Tensor:
    covered = torch.zeros(*size, dtype=torch.bool)
    for box in layout.boxes:
        covered[box.slices_in(whole(size))] = True
    return covered


def _squeeze(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return tensor.reshape([length for dim, length in enumerate(tensor.size()) if dim not in dims])


def _run(
    local: Local,
    tensor: ShardedTensor,
    dims: Sequence[int],
    keepdim: bool,
    options: dict[str, Any],
    is_stacked: bool = False,
) -> list[Part]:
    flags = [not box.num_elements for box in tensor._boxes()]
    constants = {"local": local, "dims": list(dims), "keepdim": keepdim, "options": options, "is_stacked": is_stacked}
    return tensor._backend.run(reduce_part, tensor._layout, tensor._parts, flags, **constants)


def reduce_part(
    part: torch.Tensor,
    is_empty: bool,
    local: Local,
    dims: list[int],
    keepdim: bool,
    options: dict[str, Any],
    is_stacked: bool,
) -> torch.Tensor:
    """What one part gives: nothing if it is empty, but even that has its place in the graph."""
    if not is_empty:
        found = local(part, dims, keepdim, **options)
        return found.unsqueeze(0) if is_stacked else found
    dtype = local(part.new_ones([1] * part.dim()), dims, keepdim, **options).dtype
    found = torch.sum(part, dims, keepdim, dtype=dtype)
    found = found[tuple(slice(0, 0) for _ in range(found.dim()))]
    return found.reshape(0, *found.size()) if is_stacked else found


def made_whole(tensor: ShardedTensor, dims: Sequence[int]) -> ShardedTensor | None:
    """The tensor, divided so that these dimensions are whole; None if there is no other to divide it along."""
    if is_whole(tensor, dims):
        return tensor
    kept = [dim for dim in range(tensor.dim()) if dim not in dims]
    if not kept:
        return None
    backend = tensor._backend
    places = list(dict.fromkeys(tensor._layout.places))
    layout = backend.complete(boxes.chunk(tensor.size(), max(kept, key=tensor.size), places))
    parts = backend.move(tensor._parts, tensor._layout, layout, tensor._like)
    requires_grad = tensor.requires_grad and torch.is_grad_enabled()
    return from_layout(backend, layout, parts, tensor.size(), tensor._like, requires_grad)


# -- the largest, of which there may be several ------------------------------------------------------------------------


def share_gradient(tensor: ShardedTensor, extreme: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """The largest or smallest elements, with their gradient: elements that are equal share it, wherever they are.

    Args:
        tensor: What they are the largest or smallest of.
        extreme: They themselves, without a gradient, with the reduced dimensions.
        dims: The reduced dimensions.
        keepdim: Whether these stay.
    """
    backend, layout, size = tensor._backend, boxes.reduce(tensor._layout, dims), extreme.size()
    column = align(extreme, tensor, tensor._layout, tensor.size())
    with torch.no_grad():
        ties = backend.run(count_equal, tensor._layout, tensor._parts, column, dims=list(dims))
        number = backend.replicate(ties, layout, size, tensor._like, is_sum=True)
    numbers = align(number, tensor, tensor._layout, tensor.size())
    parts = backend.run(zeros_of_equal, tensor._layout, tensor._parts, column, numbers, dims=list(dims))
    found = extreme + backend.replicate(parts, layout, size, tensor._like, is_sum=True)
    return found if keepdim else _squeeze(found, dims)


def count_equal(part: torch.Tensor, extreme: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """How many elements are equal to the extreme ones."""
    found = (part == extreme).sum(dims, keepdim=True).to(part.dtype)
    return found if part.numel() else found[tuple(slice(0, 0) for _ in range(found.dim()))]


def zeros_of_equal(part: torch.Tensor, extreme: torch.Tensor, number: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Zeros, through which elements that are equal to the extreme ones get their shares of the gradient."""
    found: torch.Tensor = _Zeros.apply(part, (part == extreme).to(part.dtype) / number, dims)  # type: ignore[no-untyped-call]
    return found if part.numel() else found[tuple(slice(0, 0) for _ in range(found.dim()))]


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


def sum_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.sum."""
    return torch.sum(part, dims, keepdim, dtype=dtype)


def nansum_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.nansum."""
    return torch.nansum(part, dims, keepdim, dtype=dtype)


def count_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.count_nonzero."""
    return torch.sum(part != 0, dims, keepdim)


def mean_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.mean."""
    return torch.mean(part, dims, keepdim, dtype=dtype)


def prod_part(part: torch.Tensor, dims: list[int], keepdim: bool, dtype: Any = None) -> torch.Tensor:
    """torch.prod, along several dimensions."""
    for dim in sorted(dims, reverse=True):
        part = torch.prod(part, dim, keepdim, dtype=dtype)
    return part


def max_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.amax."""
    return torch.amax(part, dims, keepdim)


def min_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.amin."""
    return torch.amin(part, dims, keepdim)


def any_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.any."""
    return torch.any(part, dims, keepdim)


def all_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.all."""
    return torch.all(part, dims, keepdim)


def logsumexp_part(part: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """torch.logsumexp."""
    return torch.logsumexp(part, dims, keepdim)


def norm_part(part: torch.Tensor, dims: list[int], keepdim: bool, ord: Any = 2, dtype: Any = None) -> torch.Tensor:
    """torch.linalg.vector_norm."""
    found: torch.Tensor = torch.linalg.vector_norm(part, ord, dims, keepdim, dtype=dtype)
    return found


def var_part(part: torch.Tensor, dims: list[int], keepdim: bool, correction: Any = 1) -> torch.Tensor:
    """torch.var."""
    return torch.var(part, dims, correction=correction, keepdim=keepdim)


def std_part(part: torch.Tensor, dims: list[int], keepdim: bool, correction: Any = 1) -> torch.Tensor:
    """torch.std."""
    return torch.std(part, dims, correction=correction, keepdim=keepdim)


def picked_part(part: torch.Tensor, dims: list[int], keepdim: bool, name: str, item: int) -> torch.Tensor:
    """Values or indices that torch.max and others return along one dimension."""
    found: torch.Tensor = getattr(torch, name)(part, dims[0], keepdim)[item]
    return found


def index_part(part: torch.Tensor, dims: list[int], keepdim: bool, name: str) -> torch.Tensor:
    """torch.argmax or torch.argmin along one dimension."""
    found: torch.Tensor = getattr(torch, name)(part, dims[0], keepdim)
    return found


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


def _loss(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = inspect.signature(func).bind(*args, **kwargs)
    reduction = bound.arguments.get("reduction", "mean")
    if reduction not in ("none", "mean", "sum", "batchmean"):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    if bound.arguments.get("size_average") is not None or bound.arguments.get("reduce") is not None:
        raise unsupported(func, "size_average and reduce are old names; use reduction=")
    given = {name: value for name, value in bound.arguments.items() if name not in ("size_average", "reduce")}
    values = pointwise(func, (given.pop("input"), given.pop("target")), {**given, "reduction": "none"})
    if reduction == "none":
        return values
    if reduction == "batchmean":
        return values.sum() / values.size(0)
    return getattr(values, reduction)()


NAMES = """
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss smooth_l1_loss
    soft_margin_loss
"""
for _name in NAMES.split():
    implements(offer(f"functional.{_name}", getattr(functional, _name)))(_loss)
