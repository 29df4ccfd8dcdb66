"""The backend of process groups: every rank runs the same program and holds its own parts.

Backward is collective as well: the gradients of elements that were moved come back from the ranks that received them.
Autograd runs nodes in reverse order of their creation, and all ranks create the same nodes. So all ranks reach the
collectives of a backward pass in the same order.

`all_or_none` lets the ranks agree: an action that fails on one rank is an error on all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from gradwire.shard import redistribute
from gradwire.shard.backend import Backend, Part, Question, Request
from gradwire.shard.layout import Layout, everywhere, find_overlap, nothing, whole
from gradwire.shard.rank_loss import collective

T = TypeVar("T")


class GroupBackend(Backend):
    """The backend of a process group.

    A rank outside the group can have the backend as well: it knows the tensor, holds no part, and exchanges nothing.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group  # None for the default one; outside it, what `torch.distributed.new_group` returns there

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupBackend) and other._group is self._group

    def __hash__(self) -> int:
        return hash(id(self._group))

    @property
    def _group(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    @property
    def is_member(self) -> bool:
        return self.own_place >= 0

    def _check_member(self) -> None:
        if not self.is_member:
            raise RuntimeError(
                "this rank is not in the process group of the sharded tensor, so it holds no shard and cannot join "
                "operations of the members; call them on the members only"
            )

    @property
    def own_place(self) -> int:
        """The rank in the group; -1 outside it."""
        return dist.get_rank(self.group)

    @property
    def participants(self) -> tuple[int, ...]:
        return tuple(range(dist.get_world_size(self.group)))

    def complete(self, layout: Layout) -> Layout:
        # Every rank takes part in every operation and its backward, so every rank has a part of each sharded tensor, which
        # may be empty.
        missing = tuple(place for place in self.participants if place not in layout.places)
        return Layout(layout.boxes + (nothing(len(layout.boxes[0].sizes)),) * len(missing), layout.places + missing)

    def box_numbers(self, layout: Layout) -> list[int]:
        return layout.numbers_at(self.own_place)

    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        return [function(*arguments, **constants) for arguments in zip(*columns, strict=True)]

    def move(
        self, parts: Sequence[Part], old: Layout, new: Layout, like: torch.Tensor, is_sum: bool = False
    ) -> list[Part]:
        if (old == new and not is_sum) or not self.is_member:
            return list(parts)
        return list(_Move.apply(self.group, old, new, like, is_sum, *parts))  # type: ignore[no-untyped-call]

    def replicate(
        self, parts: Sequence[Part], layout: Layout, size: Sequence[int], like: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        self._check_member()
        target = everywhere(size, self.participants)
        found: torch.Tensor = _Replicate.apply(self.group, layout, target, like, is_sum, *parts)  # type: ignore[no-untyped-call]
        return found

    def divide(self, tensor: torch.Tensor, layout: Layout) -> list[Part]:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = _Total.apply(self.group, tensor)  # type: ignore[no-untyped-call]
        outer = whole(tensor.size())
        return [tensor[layout.boxes[number].slices_in(outer)] for number in self.box_numbers(layout)]

    def spread(self, rows: torch.Tensor, batch: Layout, layout: Layout) -> list[Part]:
        self._check_member()
        return self.move([rows], batch, layout, rows)

    def ask(self, question: Question, layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
        self._check_member()
        return _Inquiry(self.group, question, layout).run(parts)  # type: ignore[arg-type]  # all of them are here

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        self._check_member()
        num_ranks = len(self.participants)
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"  # "cuda" is the current one
        own = torch.tensor([*numbers] * num_ranks, dtype=torch.int64, device=device)
        sizes = [len(numbers)] * num_ranks
        found: list[list[int]] = redistribute.exchange(own, sizes, sizes, self.group).view(num_ranks, -1).tolist()
        return found

    def gather_objects(self, value: Any) -> list[Any]:
        self._check_member()
        return gather_objects(self.group, value)

    def settle(self, parts: Sequence[Part] = ()) -> None:
        """Do nothing: functions have ended when they return."""


class NoGroupBackend(GroupBackend):
    """The backend of shards without a process group: they can be read, but no operation runs on them."""

    _group = None
    own_place = -1  # not a rank of anything; shards that are here have this number in the layout
    participants = ()

    def _check_member(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "this ShardedTensor was made without a process group, so it has metadata() and local_shards() only; call "
            "init_process_group, and make it with ShardedTensor._init_from_local_shards_and_global_metadata"
        )

    run = move = _check_member


Proposal = dict[str, Any]
"""What a rank is about to do, by name."""

_ORDINARY_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TypeError, ValueError, KeyError, AttributeError, RuntimeError, NotImplementedError)
}


def gather_objects(group: Any, value: Any) -> list[Any]:
    """Return every rank's value, by rank. Every rank of the group must call it."""
    found: list[Any] = [None] * dist.get_world_size(group)
    with collective(group, "gathering a value of every rank"):
        dist.all_gather_object(found, value, group)
    return found


def rank_failed(rank: int, kind: str, text: str) -> Exception:
    """Make the error that the other ranks raise, of the same type if that is an ordinary one."""
    return _ORDINARY_ERRORS.get(kind, RuntimeError)(f"failed on rank {rank}; no rank was changed: {kind}: {text}")


def all_or_none(
    group: Any, action: Callable[[], T], failed: Callable[[int, str, str], Exception] = rank_failed
) -> list[T]:
    """Call `action` on every rank and return all results, by rank; if it fails on one rank, raise on all of them.

    Every rank of the group must call it. Results are pickled.

    `action` must leave nothing behind if it raises. `failed` makes the error of the other ranks, from the rank, the name of
    the error's type and its text.
    """
    result, failure, told = None, None, None
    try:
        result = action()
    except Exception as error:
        failure, told = error, (type(error).__name__, str(error.args[0] if len(error.args) == 1 else error))
    gathered = gather_objects(group, (told, result))
    if failure is not None:
        raise failure
    for rank, (told, _) in enumerate(gathered):
        if told is not None:
            raise failed(rank, *told)
    return [result for _, result in gathered]


def agree(group: Any, prepare: Callable[[], Proposal], may_differ: Sequence[str] = ()) -> list[Proposal]:
    """Return what every rank is about to do, by rank, if all can and all are about to do the same.

    `prepare` returns it by the same names on every rank; what is named in `may_differ` may be different.
    """
    proposals = all_or_none(group, prepare)
    first = proposals[0]
    for rank, other in enumerate(proposals):
        for name in first:
            if name not in may_differ and other[name] != first[name]:
                raise ValueError(
                    f"the ranks made different calls: {name}={first[name]} on rank 0 does not match "
                    f"{name}={other[name]} on rank {rank}"
                )
    return proposals


_MAX_TENSORS = 4  # of a request; counts are always that long, so that ranks that ask differently understand them
_FAILED, _NO_TENSOR = -1, -2


class _Inquiry:
    """One question from every rank to all parts. Each rank answers for its own parts."""

    def __init__(self, group: Any, question: Question, layout: Layout) -> None:
        self.group, self.question = group, question
        self.boxes = [layout.numbers_at(rank) for rank in range(dist.get_world_size(group))]  # of each rank
        self.mine = self.boxes[dist.get_rank(group)]
        # How long the tensors of requests are: by rank that asks, box of this rank, and position in the request.
        self.counts: list[list[list[int]]] = []

    def run(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        have_gradients = self._exchange_counts()
        requests = self._exchange_requests(have_gradients)
        answers = [
            self.question.function(part, request, self.question.settings[number])
            for number, part, request in zip(self.mine, parts, requests, strict=True)
        ]
        return self._exchange_answers(answers)

    def _exchange_counts(self) -> list[bool]:
        """Learn how long requests are, and for each position in them whether any rank's tensor there needs a gradient.

        Both are in one number: twice the length, and one more if there is a gradient.
        """
        question, num_mine = self.question, len(self.mine)
        num_tensors = len(question.requests[0])
        numbers = [told for rank in self.boxes for number in rank for told in self._describe_request(number)]
        flat = torch.tensor(numbers, dtype=torch.int64, device=question.like.device)
        sent = [len(rank) * _MAX_TENSORS for rank in self.boxes]
        found = redistribute.exchange(flat, sent, [num_mine * _MAX_TENSORS] * len(self.boxes), self.group)
        if question.error is not None:
            raise question.error
        told = found.view(len(self.boxes), num_mine, _MAX_TENSORS)
        for rank, of_rank in enumerate(told[:, 0].tolist()):
            if of_rank[0] == _FAILED:
                raise RuntimeError(
                    f"the operation on a sharded tensor failed on rank {rank}, which raised the original error; no rank "
                    "returned a result"
                )
            if _MAX_TENSORS - of_rank.count(_NO_TENSOR) != num_tensors:
                raise RuntimeError(
                    f"rank {rank} made a different call: pass per_sample_weights on all ranks or on none"
                )
        told = told[:, :, :num_tensors]
        self.counts = told.div(2, rounding_mode="floor").tolist()
        have_gradients: list[bool] = (told % 2).amax((0, 1)).bool().tolist()
        return have_gradients

    def _describe_request(self, number: int) -> list[int]:
        request = self.question.requests[number]
        told = [2 * item.size(0) + (item.requires_grad and torch.is_grad_enabled()) for item in request]
        known = told if self.question.error is None else [_FAILED] * len(request)
        return known + [_NO_TENSOR] * (_MAX_TENSORS - len(request))

    def _exchange_requests(self, have_gradients: Sequence[bool]) -> list[Request]:
        """Return what all ranks ask of each of this rank's parts, one after the other."""
        requests = self.question.requests
        found: list[list[torch.Tensor]] = [[torch.empty(0)] * len(requests[0]) for _ in self.mine]
        by_dtype: dict[torch.dtype, list[int]] = {}  # tensors of one dtype go in one message
        for position, item in enumerate(requests[0]):
            by_dtype.setdefault(item.dtype, []).append(position)
        for positions in by_dtype.values():
            outgoing = [[requests[number][at] for number in rank for at in positions] for rank in self.boxes]
            sizes = [[of_box[at] for of_box in of_asker for at in positions] for of_asker in self.counts]
            pieces = self._exchange_pieces(outgoing, sizes, any(have_gradients[at] for at in positions))
            for place in range(len(self.mine)):
                for offset, at in enumerate(positions):
                    found[place][at] = torch.cat([of_asker[place * len(positions) + offset] for of_asker in pieces])
        return [tuple(of_box) for of_box in found]

    def _exchange_pieces(
        self, outgoing: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]], has_gradient: bool
    ) -> list[list[torch.Tensor]]:
        """Send a list of flat tensors to every rank, and return the lists received, whose sizes are known.

        If the tensors of any rank need gradients, those of all ranks do, because backward is collective.
        """
        sent = [sum(item.numel() for item in items) for items in outgoing]
        flat = torch.cat([item for items in outgoing for item in items])
        if has_gradient and not flat.requires_grad:
            flat.requires_grad_(torch.is_grad_enabled())
        received = _exchange(self.group, flat, sent, [sum(items) for items in sizes])
        pieces = iter(torch.split(received, [size for items in sizes for size in items]))
        return [[next(pieces) for _ in items] for items in sizes]

    def _exchange_answers(self, answers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        question, mine = self.question, self.mine
        lengths = [[of_box[question.along] for of_box in of_asker] for of_asker in self.counts]
        volumes = [math.prod(rest) for rest in question.rests]
        sent = [
            sum(length * volumes[number] for length, number in zip(of_asker, mine, strict=True)) for of_asker in lengths
        ]
        asked = [[math.prod(question.shape(number)) for number in rank] for rank in self.boxes]
        received = _exchange(self.group, _by_asker(answers, lengths), sent, [sum(sizes) for sizes in asked])
        pieces = torch.split(received, [size for sizes in asked for size in sizes])
        order = [number for rank in self.boxes for number in rank]
        found = dict(zip(order, pieces, strict=True))
        return [found[number].view(question.shape(number)) for number in range(len(order))]


def _by_asker(answers: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Join the answers of all parts, those to the first rank first; with one part they are in this order already."""
    if len(answers) == 1:
        return answers[0].reshape(-1)
    pieces = [torch.split(answer, [of_asker[place] for of_asker in lengths]) for place, answer in enumerate(answers)]
    return torch.cat([of_box[asker].reshape(-1) for asker in range(len(lengths)) for of_box in pieces])


# These backward functions are differentiable themselves, for gradients of gradients.


def _exchange(group: Any, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    if not flat.requires_grad:
        return redistribute.exchange(flat, sent, received, group)
    found: torch.Tensor = _Exchange.apply(group, flat, sent, received)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """`redistribute.exchange`; gradients return from the ranks that the elements were sent to."""

    @staticmethod
    def forward(ctx: Any, group: Any, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.exchange = group, sent, received
        return redistribute.exchange(flat.detach(), sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, sent, received = ctx.exchange
        return None, _exchange(group, gradients[0].contiguous(), received, sent), None, None


class _Move(torch.autograd.Function):
    """Move parts from one layout to another."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, old: Layout, new: Layout, like: torch.Tensor, is_sum: bool, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.move = group, old, new
        return tuple(redistribute.move(parts, old, new, group, like, is_sum))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, old, new = ctx.move
        is_sum = find_overlap(new.boxes) is not None  # gradients of elements that went to several ranks add up
        found = _Move.apply(group, new, old, gradients[0], is_sum, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, None, *found


class _Replicate(torch.autograd.Function):
    """Gather the whole tensor on every rank. Its gradient is the same on all ranks, so each rank keeps its own part."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, old: Layout, new: Layout, like: torch.Tensor, is_sum: bool, *parts: torch.Tensor
    ) -> torch.Tensor:
        mine = old.numbers_at(dist.get_rank(group))
        ctx.take = group, [old.boxes[number].slices_in(new.boxes[0]) for number in mine]
        (found,) = redistribute.move(parts, old, new, group, like, is_sum)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, taken = ctx.take
        (gradient,) = gradients
        if gradient.requires_grad and torch.is_grad_enabled():
            gradient = _Total.apply(group, gradient)  # type: ignore[no-untyped-call]
        own = (gradient[slices].clone() for slices in taken)  # a view would keep the memory of the whole
        return None, None, None, None, None, *own


class _Total(torch.autograd.Function):
    """Return the tensor itself; its gradient is summed over all ranks."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, _Sum.apply(ctx.group, gradients[0])  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Sum over all ranks. The gradient is the same on all ranks, and each summand has that gradient."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        with collective(group, "adding up a gradient of all ranks"):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, gradients[0]
