"""Reductions: sums, products, extremes, norms, deviations, and the losses that end in one.

Along dimensions that are whole in every part each part is reduced where it is, and the result stays sharded. Along others
the results of the parts are put together, and the result is a plain tensor, the same everywhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradwire.shard.backend import Part
from gradwire.shard.dispatch import implements, unsupported
from gradwire.shard.layout import chunk, drop, find_dim, reduce, stack, whole
from gradwire.shard.ops.pointwise import align, find_functions, needs_gradient, pointwise, probe, size_of
from gradwire.shard.tensor import ShardedTensor, from_layout

_T: Any = torch.Tensor


def dims_of(tensor: torch.Tensor, dim: Any) -> list[int]:
    """Return the dimensions for the argument `dim` of a reduction: all of them for None."""
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(tensor.dim()))
    named = dim if isinstance(dim, list | tuple) else [dim]
    return sorted({find_dim(item, tensor.dim()) for item in named})


def is_whole(tensor: ShardedTensor, dims: Sequence[int]) -> bool:
    """Return whether no part is sharded along these dimensions, and others are left."""
    return len(dims) < tensor.dim() and all(tensor._layout.is_whole_along(dim, tensor.size(dim)) for dim in dims)


def made_whole(tensor: ShardedTensor, dims: Sequence[int]) -> ShardedTensor | None:
    """Return the tensor, resharded so that these dimensions are whole; None if there is no other dimension."""
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
    if name != "prod":
        return _LOCAL[name](part, dims, keepdim, **options)
    for dim in sorted(dims, reverse=True):  # torch.prod takes one dimension
        part = torch.prod(part, dim, keepdim, **options)
    return part


def reduce_part(
    part: torch.Tensor,
    is_empty: bool,
    name: str,
    dims: list[int],
    keepdim: bool,
    options: dict[str, Any],
    is_stacked: bool,
) -> torch.Tensor:
    """Reduce one part; an empty one gives an empty result, which is still part of the graph."""
    if not is_empty:
        found = reduce_dense(name, part, dims, keepdim, **options)
        return found.unsqueeze(0) if is_stacked else found
    dtype = reduce_dense(name, part.new_ones([1] * part.dim()), dims, keepdim, **options).dtype
    found = _emptied(torch.sum(part, dims, keepdim, dtype=dtype))
    return found.reshape(0, *found.size()) if is_stacked else found


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[tuple(slice(0, 0) for _ in range(tensor.dim()))]


@dataclass(frozen=True)
class Reduction:
    """A reduction of a sharded tensor along some of its dimensions."""

    name: str
    tensor: ShardedTensor
    dims: list[int]
    keepdim: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def outline(self) -> torch.Tensor:
        """Reduce a small tensor of the same kind, for its dtype, `requires_grad` and the errors that parts would raise."""
        harmless = {"correction": 0} if "correction" in self.options else {}  # so few elements would give a warning
        return reduce_dense(self.name, probe(self.tensor, 2), self.dims, True, **{**self.options, **harmless})

    def reduce_parts(self) -> ShardedTensor:
        """Reduce along dimensions that are whole: the result stays sharded."""
        expected, tensor = self.outline(), self.tensor
        layout = reduce(tensor._layout, self.dims)
        layout = layout if self.keepdim else drop(layout, self.dims)
        size, like = self._size(self.keepdim), tensor._like.to(expected.dtype)
        return from_layout(tensor._backend, layout, self._run(self.keepdim), size, like, expected.requires_grad, tensor)

    def add_up(self) -> torch.Tensor:
        """Return the sum of the parts' reductions, as a plain tensor."""
        layout, like = reduce(self.tensor._layout, self.dims), self.tensor._like.to(self.outline().dtype)
        return self._finish(self.tensor._backend.replicate(self._run(), layout, self._size(), like, is_sum=True))

    def combine(self, neutral: Any) -> torch.Tensor:
        """Return the reduction of the parts' reductions, as a plain tensor; `neutral` is used for empty parts."""
        layout = stack(reduce(self.tensor._layout, self.dims))
        like = self.tensor._like.to(self.outline().dtype)
        size = (len(layout.boxes), *self._size())
        stacked = self.tensor._backend.replicate(self._run(is_stacked=True), layout, size, like)
        covered = torch.zeros(*size, dtype=torch.bool)
        for box in layout.boxes:
            covered[box.slices_in(whole(size))] = True
        filled = torch.where(covered.to(stacked.device), stacked, neutral)
        return self._finish(reduce_dense(self.name, filled, [0], False, **self.options))

    def share_gradient(self, extreme: torch.Tensor) -> torch.Tensor:
        """Give a gradient to the largest or smallest elements; equal ones share it, on all places."""
        tensor, dims, size = self.tensor, self.dims, extreme.size()
        backend, layout = tensor._backend, reduce(tensor._layout, dims)
        column = align(extreme, tensor, tensor._layout, tensor.size())
        with torch.no_grad():
            ties = backend.run(count_equal, tensor._layout, tensor._parts, column, dims=dims)
            number = backend.replicate(ties, layout, size, tensor._like, is_sum=True)
        numbers = align(number, tensor, tensor._layout, tensor.size())
        parts = backend.run(zeros_of_equal, tensor._layout, tensor._parts, column, numbers, dims=dims)
        return self._finish(extreme + backend.replicate(parts, layout, size, tensor._like, is_sum=True))

    def _run(self, keepdim: bool = True, is_stacked: bool = False) -> list[Part]:
        flags = [not box.num_elements for box in self.tensor._boxes()]
        constants = {"name": self.name, "dims": self.dims, "keepdim": keepdim, "options": self.options}
        backend, layout = self.tensor._backend, self.tensor._layout
        return backend.run(reduce_part, layout, self.tensor._parts, flags, is_stacked=is_stacked, **constants)

    def _size(self, keepdim: bool = True) -> list[int]:
        size = enumerate(size_of(self.tensor))
        return [1 if dim in self.dims else length for dim, length in size if keepdim or dim not in self.dims]

    def _finish(self, total: torch.Tensor) -> torch.Tensor:
        return total if self.keepdim else total.reshape(self._size(keepdim=False))


def count_equal(part: torch.Tensor, extreme: torch.Tensor, dims: list[int]) -> torch.Tensor:
    found = (part == extreme).sum(dims, keepdim=True).to(part.dtype)
    return found if part.numel() else _emptied(found)


def zeros_of_equal(part: torch.Tensor, extreme: torch.Tensor, number: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Return zeros through which elements equal to the extreme ones get their shares of the gradient."""
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


def _mean(wanted: Reduction) -> torch.Tensor:
    replace(wanted, name="mean").outline()  # integers have none
    return replace(wanted, name="sum").add_up() / math.prod(wanted.tensor.size(dim) for dim in wanted.dims)


def _extreme(wanted: Reduction) -> torch.Tensor:
    has_gradient = wanted.outline().requires_grad
    with torch.no_grad():
        bound = _bound(wanted.tensor.dtype, wanted.name == "amin")
        found = replace(wanted, keepdim=wanted.keepdim or has_gradient).combine(bound)
    return wanted.share_gradient(found) if has_gradient else found


def _bound(dtype: torch.dtype, is_max: bool) -> Any:
    if dtype.is_floating_point:
        return math.inf if is_max else -math.inf
    if dtype == torch.bool:
        return is_max
    return torch.iinfo(dtype).max if is_max else torch.iinfo(dtype).min


def _norm(wanted: Reduction) -> torch.Tensor:
    order = wanted.options.get("ord", 2)
    if order == 0:
        return wanted.add_up()
    if math.isinf(order):
        values: Any = torch.abs(wanted.tensor).to(wanted.outline().dtype)
        return _extreme(Reduction("amax" if order > 0 else "amin", values, wanted.dims, wanted.keepdim))
    return wanted.combine(0.0 if order > 0 else math.inf)


def _deviation(wanted: Reduction) -> torch.Tensor:
    """Return the norm of the differences to the mean, whose gradient exists also where it is zero; or its square."""
    wanted.outline()
    tensor, dims, correction = wanted.tensor, wanted.dims, wanted.options.get("correction", 1)
    number = math.prod(tensor.size(dim) for dim in dims) - (1 if correction is None else correction)
    differences: Any = torch.sub(tensor, _mean(Reduction("mean", tensor, dims, keepdim=True)))
    found = Reduction("vector_norm", differences, dims, wanted.keepdim).combine(0.0)
    found = found / math.sqrt(number) if number > 0 else found / 0
    return found.square() if wanted.name == "var" else found


_TOTALS: dict[str, Callable[[Reduction], torch.Tensor]] = {
    "sum": Reduction.add_up,
    "nansum": Reduction.add_up,
    "count_nonzero": Reduction.add_up,
    "mean": _mean,
    "prod": lambda wanted: wanted.combine(1),
    "any": lambda wanted: wanted.combine(False),
    "all": lambda wanted: wanted.combine(True),
    "logsumexp": lambda wanted: wanted.combine(-math.inf),
    "amax": _extreme,
    "amin": _extreme,
    "vector_norm": _norm,
    "std": _deviation,
    "var": _deviation,
}


def _reduce(name: str, tensor: ShardedTensor, dim: Any = None, keepdim: bool = False, **options: Any) -> torch.Tensor:
    dims = dims_of(tensor, options.pop("axis", dim))
    wanted = Reduction(name, tensor, dims, bool(keepdim), options)
    return wanted.reduce_parts() if is_whole(tensor, dims) else _TOTALS[name](wanted)


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
    values = Reduction(name, tensor, dims, keepdim, {"item": 0}).reduce_parts()
    with torch.no_grad():
        indices = Reduction(name, tensor, dims, keepdim, {"item": 1}).reduce_parts()
    return getattr(torch.return_types, name)((values, indices))


@implements(torch.argmax, _T.argmax, torch.argmin, _T.argmin)
@torch.no_grad()
def _argmax_or_argmin(func: Any, input: ShardedTensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dim = kwargs.get("axis", dim)
    tensor = made_whole(input, dims_of(input, dim)) if dim is not None else None
    if tensor is None:
        return func(input.full_tensor(), dim, keepdim)
    return Reduction(func.__name__, tensor, dims_of(input, dim), keepdim).reduce_parts()


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
        raise unsupported(func, "size_average and reduce are deprecated; use reduction=")
    values = pointwise(func, given.pop("input"), given.pop("target"), **{**given, "reduction": "none"})
    if reduction == "none":
        return values
    return values.sum() / values.size(0) if reduction == "batchmean" else getattr(values, reduction)()
