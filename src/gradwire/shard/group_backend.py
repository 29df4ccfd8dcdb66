"""Parts on the ranks of a process group: every rank runs the same program.

Backward needs everybody, too: the gradient of what was moved comes from the ranks that it was moved to. Autograd runs the
nodes of a graph in the order in which they were made, last first, and all ranks have made the same; so every rank meets the
others in the same order there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.shard import redistribute
from gradwire.shard.backend import Backend, Part, Question, Request
from gradwire.shard.layout import Layout, everywhere, for_everybody, whole
from gradwire.shard.redistribute import collective

Counts = list[list[list[int]]]
"""How long the tensors of requests are: by who asks, box of this rank, and position in the request."""

_MAX_TENSORS = (
    4  # of a request; what is told of them is always as long, so that ranks that ask differently understand it
)
_FAILED, _NO_TENSOR = -1, -2


def ask(group: Any, question: Question, layout: Layout, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Asks all parts, and answers for those of this rank. Every rank must call it.

    Raises:
        Exception: The error of the question.
        RuntimeError: Another rank has one.
    """
    boxes = [layout.numbers_at(rank) for rank in range(dist.get_world_size(group))]  # by rank
    mine = boxes[dist.get_rank(group)]
    counts, have_gradients = _exchange_counts(group, question, boxes)
    arrived = _exchange_requests(group, question, boxes, counts, have_gradients)
    answers = [
        question.function(part, request, [of_asker[place] for of_asker in counts], question.settings[number])
        for place, (number, part, request) in enumerate(zip(mine, parts, arrived, strict=True))
    ]
    return _exchange_answers(group, question, boxes, counts, answers)


def _exchange_counts(group: Any, question: Question, boxes: Sequence[Sequence[int]]) -> tuple[Counts, list[bool]]:
    """How long requests are, and for each of their positions whether anybody's tensor there needs a gradient.

    Both are in one number: twice the length, and one more if there is a gradient.
    """
    num_tensors = len(question.requests[0])
    numbers = [told for rank in boxes for number in rank for told in _tell(question, number)]
    mine = boxes[dist.get_rank(group)]
    flat = torch.tensor(numbers, dtype=torch.int64, device=question.like.device)
    sent = [len(rank) * _MAX_TENSORS for rank in boxes]
    found = redistribute.exchange(flat, sent, [len(mine) * _MAX_TENSORS for _ in boxes], group)
    if question.error is not None:
        raise question.error
    told = found.view(len(boxes), len(mine), _MAX_TENSORS)
    for rank, of_rank in enumerate(told[:, 0].tolist()):
        if of_rank[0] == _FAILED:
            raise RuntimeError(f"rank {rank} could not go on, so no rank can; it has raised an error that says why")
        if _MAX_TENSORS - of_rank.count(_NO_TENSOR) != num_tensors:
            raise RuntimeError(f"rank {rank} calls it in another way: per_sample_weights are for all ranks or for none")
    told = told[:, :, :num_tensors]
    have_gradients: list[bool] = (told % 2).amax((0, 1)).bool().tolist()
    counts: Counts = told.div(2, rounding_mode="floor").tolist()
    return counts, have_gradients


def _tell(question: Question, number: int) -> list[int]:
    """What the rank that has a box is told of the request to it."""
    request = question.requests[number]
    told = [2 * item.size(0) + (item.requires_grad and torch.is_grad_enabled()) for item in request]
    known = told if question.error is None else [_FAILED] * len(request)
    return known + [_NO_TENSOR] * (_MAX_TENSORS - len(request))


def _exchange_requests(
    group: Any,
    question: Question,
    boxes: Sequence[Sequence[int]],
    counts: Counts,
    have_gradients: Sequence[bool],
) -> list[Request]:
    """What everybody asks of each of this rank's parts, one after the other."""
    num_mine = len(boxes[dist.get_rank(group)])
    found: list[list[torch.Tensor]] = [[torch.empty(0)] * len(question.requests[0]) for _ in range(num_mine)]
    for positions in _by_dtype(question.requests[0]):
        outgoing = [[question.requests[number][at] for number in rank for at in positions] for rank in boxes]
        sizes = [[of_box[at] for of_box in of_asker for at in positions] for of_asker in counts]
        pieces = _exchange_pieces(group, outgoing, sizes, any(have_gradients[at] for at in positions))
        for place in range(num_mine):
            for offset, at in enumerate(positions):
                of_askers = [of_asker[place * len(positions) + offset] for of_asker in pieces]
                found[place][at] = torch.cat(of_askers)
    return [tuple(of_box) for of_box in found]


def _by_dtype(request: Request) -> list[list[int]]:
    """Positions of tensors that can go in one message."""
    found: dict[torch.dtype, list[int]] = {}
    for position, item in enumerate(request):
        found.setdefault(item.dtype, []).append(position)
    return list(found.values())


def _exchange_pieces(
    group: Any, outgoing: Sequence[Sequence[torch.Tensor]], sizes: Sequence[Sequence[int]], has_gradient: bool
) -> list[tuple[torch.Tensor, ...]]:
    """Lists of flat tensors for every rank, for such lists from every rank, whose sizes are known.

    If anybody's have a gradient, all have one: all take part in backward then.
    """
    sent = [sum(item.numel() for item in items) for items in outgoing]
    flat = torch.cat([item for items in outgoing for item in items])
    if has_gradient and not flat.requires_grad:
        flat.requires_grad_(torch.is_grad_enabled())
    received = exchange(group, flat, sent, [sum(items) for items in sizes])
    pieces = torch.split(received, [size for items in sizes for size in items])
    found, start = [], 0
    for items in sizes:
        found.append(pieces[start : start + len(items)])
        start += len(items)
    return found


def _exchange_answers(
    group: Any,
    question: Question,
    boxes: Sequence[Sequence[int]],
    counts: Counts,
    answers: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    mine = boxes[dist.get_rank(group)]
    lengths = [
        [of_box[question.along] for of_box in of_asker] for of_asker in counts
    ]  # by who asks, and box of this rank
    volumes = [math.prod(rest) for rest in question.rests]
    sent = [
        sum(length * volumes[number] for length, number in zip(of_asker, mine, strict=True)) for of_asker in lengths
    ]
    asked = [[question.requests[number][question.along].size(0) * volumes[number] for number in rank] for rank in boxes]
    received = exchange(group, _by_asker(answers, lengths), sent, [sum(sizes) for sizes in asked])
    order = [number for rank in boxes for number in rank]
    found = dict(zip(order, torch.split(received, [size for sizes in asked for size in sizes]), strict=True))
    return [
        found[number].view(question.requests[number][question.along].size(0), *question.rests[number])
        for number in range(len(order))
    ]


def _by_asker(answers: Sequence[torch.Tensor], lengths: Sequence[Sequence[int]]) -> torch.Tensor:
    """Answers of all parts, those to the first rank first; with one part they are in this order already."""
    if len(answers) == 1:
        return answers[0].reshape(-1)
    pieces = [torch.split(answer, [of_asker[place] for of_asker in lengths]) for place, answer in enumerate(answers)]
    return torch.cat([of_box[asker].reshape(-1) for asker in range(len(lengths)) for of_box in pieces])


def exchange(group: Any, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
    """`redistribute.exchange`, with gradients."""
    if not flat.requires_grad:
        return redistribute.exchange(flat, sent, received, group)
    found: torch.Tensor = _Exchange.apply(group, flat, sent, received)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """The gradient of what went to a rank comes from there. So does the gradient of that."""

    @staticmethod
    def forward(ctx: Any, group: Any, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.exchange = group, sent, received
        return redistribute.exchange(flat.detach(), sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, sent, received = ctx.exchange
        return None, exchange(group, gradients[0].contiguous(), received, sent), None, None


class GroupBackend(Backend):
    """The backend of a process group.

    A rank outside of the group can have the backend, too: it knows the tensor, has no part of it, and exchanges nothing.

    Args:
        group: The process group; None for the default one. Outside of it, what `torch.distributed.new_group` returns there.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupBackend) and other._group is self._group

    def __hash__(self) -> int:
        return hash(id(self._group))

    @property
    def _group(self) -> Any:
        return dist.group.WORLD if self.group is None else self.group

    @property
    def is_member(self) -> bool:
        """Whether this rank is in the group."""
        return self.own_place >= 0

    def _check_member(self) -> None:
        if not self.is_member:
            raise RuntimeError(
                "this rank is not in the process group of the sharded tensor, so it has no part of it and cannot take part "
                "in operations of its members; call them on the members only"
            )

    @property
    def own_place(self) -> int:
        """The rank in the group; -1 outside of it."""
        return dist.get_rank(self.group)

    @property
    def participants(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(dist.get_world_size(self.group)))

    def complete(self, layout: Layout) -> Layout:
        """With an empty box for each rank that has none."""
        return for_everybody(layout, self.participants)

    def box_numbers(self, layout: Layout) -> list[int]:
        """Those of this rank."""
        return layout.numbers_at(self.own_place)

    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        """The function of each of this rank's parts."""
        return [function(*arguments, **constants) for arguments in zip(*columns, strict=True)]

    def move(
        self, parts: Sequence[Part], old: Layout, new: Layout, like: torch.Tensor, is_sum: bool = False
    ) -> list[Part]:
        """Every rank sends the others what they are to have of its parts."""
        if (old == new and not is_sum) or not self.is_member:
            return list(parts)
        return list(_Move.apply(self.group, old, new, like, is_sum, *parts))  # type: ignore[no-untyped-call]

    def replicate(
        self, parts: Sequence[Part], layout: Layout, size: Sequence[int], like: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        """Every rank sends its parts to all others."""
        self._check_member()
        target = everywhere(size, self.participants)
        found: torch.Tensor = _Replicate.apply(self.group, layout, target, like, is_sum, *parts)  # type: ignore[no-untyped-call]
        return found

    def divide(self, tensor: torch.Tensor, layout: Layout) -> list[Part]:
        """Every rank takes its parts."""
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = _Total.apply(self.group, tensor)  # type: ignore[no-untyped-call]
        outer = whole(tensor.size())
        return [tensor[layout.boxes[number].slices_in(outer)] for number in self.box_numbers(layout)]

    def spread(self, rows: torch.Tensor, batch: Layout, layout: Layout) -> list[Part]:
        """Every rank sends the others what they are to have of its rows."""
        self._check_member()
        return self.move([rows], batch, layout, rows)

    def ask(self, question: Question, layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Questions go to the ranks that have the parts, and the answers come back."""
        self._check_member()
        return ask(self.group, question, layout, parts)  # type: ignore[arg-type]  # all of them are here

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What every rank says."""
        self._check_member()
        num_askers = len(self.participants)
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"  # "cuda" is the current one
        own = torch.tensor([*numbers] * num_askers, dtype=torch.int64, device=device)
        sizes = [len(numbers)] * num_askers
        found: list[list[int]] = redistribute.exchange(own, sizes, sizes, self.group).view(num_askers, -1).tolist()
        return found

    def settle(self, parts: Sequence[Part] = ()) -> None:
        """Functions have ended when they return."""

    def gather_objects(self, value: Any) -> list[Any]:
        """What every rank says."""
        self._check_member()
        found: list[Any] = [None for _ in self.participants]
        with collective(self.group, "gathering what every rank has to say"):
            dist.all_gather_object(found, value, self.group)
        return found


class NoGroupBackend(GroupBackend):
    """The backend of shards that belong to no process group: they can be looked at, and nothing else."""

    @property
    def _group(self) -> Any:
        return None

    @property
    def own_place(self) -> int:
        """Not a rank of anything; shards that are here have this number in the layout."""
        return -1

    @property
    def participants(self) -> tuple[int, ...]:
        """None: there are no others to exchange anything with."""
        return ()

    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        """
        Raises:
            RuntimeError: There is no process group.
        """
        self._check_member()
        return []

    def move(
        self, parts: Sequence[Part], old: Layout, new: Layout, like: torch.Tensor, is_sum: bool = False
    ) -> list[Part]:
        """
        Raises:
            RuntimeError: There is no process group.
        """
        self._check_member()
        return []

    def _check_member(self) -> None:
        raise RuntimeError(
            "this ShardedTensor was made without a process group, so it has metadata() and local_shards() only; call "
            "init_process_group, and make it with ShardedTensor._init_from_local_shards_and_global_metadata"
        )


# What a backward does is differentiable, too: gradients of gradients take the same ways.


class _Move(torch.autograd.Function):
    """Parts of one layout from those of another."""

    @staticmethod
    def forward(
        ctx: Any, group: Any, old: Layout, new: Layout, like: torch.Tensor, is_sum: bool, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.move = group, old, new
        return tuple(redistribute.move(parts, old, new, group, like, is_sum))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, old, new = ctx.move
        is_sum = new.has_overlaps  # of what went to several ranks, the gradients add up
        found = _Move.apply(group, new, old, gradients[0], is_sum, *gradients)  # type: ignore[no-untyped-call]
        return None, None, None, None, None, *found


class _Replicate(torch.autograd.Function):
    """The whole tensor on every rank. The gradient is the same everywhere, so every rank takes what is its own."""

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
    """The tensor itself; its gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, _Sum.apply(ctx.group, gradients[0])  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """The sum over all ranks. Its gradient is the same everywhere, and is that of each of them."""

    @staticmethod
    def forward(ctx: Any, group: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        with collective(group, "adding up a gradient of all ranks"):
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, gradients[0]


Said = dict[str, Any]
"""What a rank is about to do, by name."""

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TypeError, ValueError, KeyError, AttributeError, RuntimeError, NotImplementedError)
}


def agree(backend: Backend, prepare: Callable[[], Said], own_matters: Sequence[str] = ()) -> list[Said]:
    """What everybody is about to do; raises for all if somebody cannot, or if they are not about to do the same.

    Args:
        backend: Knows who everybody is.
        prepare: Finds out what this process is about to do.
        own_matters: Names of what may be different.

    Raises:
        Exception: What `prepare` raised; what it raised elsewhere, with the same type if that is an ordinary one.
        ValueError: Not all are about to do the same.
    """
    said: Said = {}
    refusal: tuple[str, str] | None = None
    failure: Exception | None = None
    try:
        said = prepare()
    except Exception as error:  # whatever it is, the others must hear of it
        failure, refusal = error, (type(error).__name__, str(error.args[0] if error.args else error))
    everybody: list[tuple[tuple[str, str] | None, Said]] = backend.gather_objects((refusal, said))
    if failure is not None:
        raise failure
    for rank, (found, _) in enumerate(everybody):
        if found is not None:
            kind, text = found
            raise _KINDS.get(kind, RuntimeError)(f"rank {rank} cannot do it, so no rank did: {kind}: {text}")
    _compare([item for _, item in everybody], own_matters)
    return [item for _, item in everybody]


def _compare(everybody: Sequence[Said], own_matters: Sequence[str]) -> None:
    first = everybody[0]
    for rank, other in enumerate(everybody):
        for name in first:
            if name not in own_matters and other[name] != first[name]:
                raise ValueError(
                    f"the ranks are not about to do the same: {name}={first[name]} on rank 0 does not match with "
                    f"{name}={other[name]} on rank {rank}"
                )
