"""Questions of every rank to the parts of every rank, and the answers.

    counts      how long are your requests?      every rank tells every other what is on its way
    requests    one message for each dtype       all that one rank asks of all parts of another
    answers     one message                      all that one rank answers to another

Gradients of answers go back by the same ways, and so do those of requests that have any.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.shard import moving
from gradwire.shard.engines import Question, Request
from gradwire.shard.layouts import Layout

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
    boxes = [layout.of(rank) for rank in range(dist.get_world_size(group))]  # by rank
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
    found = moving.exchange(flat, sent, [len(mine) * _MAX_TENSORS for _ in boxes], group)
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
    """`moving.exchange`, with gradients."""
    if not flat.requires_grad:
        return moving.exchange(flat, sent, received, group)
    found: torch.Tensor = _Exchange.apply(group, flat, sent, received)  # type: ignore[no-untyped-call]
    return found


class _Exchange(torch.autograd.Function):
    """The gradient of what went to a rank comes from there. So does the gradient of that."""

    @staticmethod
    def forward(ctx: Any, group: Any, flat: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.exchange = group, sent, received
        return moving.exchange(flat.detach(), sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        group, sent, received = ctx.exchange
        return None, exchange(group, gradients[0].contiguous(), received, sent), None, None
