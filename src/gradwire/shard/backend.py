"""The primitives of all operations on sharded tensors, so that each function of torch is implemented once.

A backend knows where the parts of tensors are and how functions get to them. There are two. In a **process group**
(`group_backend`) every rank runs the same program and handles its own parts. Over **RPC workers** (`worker_backend`) one
worker runs the program and handles all parts, which are references to tensors elsewhere.

    run         a function of parts, where they are; the results stay there
    move        from one layout to another; gradients take the same way back
    replicate   parts -> the same plain tensor for every participant
    divide      such a tensor -> parts
    spread      every participant's own rows -> parts
    ask         questions to parts, made by every participant for itself, and the answers

The *participants* are the processes that run the program: all ranks, or one worker. Two kinds of plain tensors meet sharded
ones. A participant's **own** (the rows of a batch) may be different for each of them, and so is its gradient. What is
**replicated** (a bias, the result of a reduction) is the same everywhere, and so is its gradient: the total.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.rref import RRef
from gradwire.shard.layout import Layout, Place

Part = torch.Tensor | RRef[Any]
"""A tensor that is here, or a reference to one that is not."""

Request = tuple[torch.Tensor, ...]
"""A request to one part: one-dimensional tensors of any length."""

Answerer = Callable[[torch.Tensor, Request, Any], torch.Tensor]
"""Answers the requests of all participants to one part; returns all answers, concatenated.

Its arguments are the part, all requests, joined tensor by tensor, and the setting of the part.
"""


@dataclass(frozen=True)
class Question:
    """A process's requests to all parts of a tensor.

    There is a request for every box, also for those that this process does not handle. The requests of all participants
    have the same number of tensors, of the same dtypes.
    """

    function: Answerer  # must be importable by name everywhere
    requests: Sequence[Request]
    settings: Sequence[Any]  # for each box, a plain value for the function, the same for all participants
    along: int  # the position of the tensor in a request that is as long as the answer
    rests: Sequence[Sequence[int]]  # the other dimensions of the answers of each box
    like: torch.Tensor  # has the dtype and device of the answers
    error: Exception | None = None  # why this process cannot ask; all participants raise then
    asks_all: bool = False  # whether parts without a request are called, too, so that they take part in backward

    def shape(self, number: int) -> tuple[int, ...]:
        """Return the shape of a box's answer to this process."""
        return self.requests[number][self.along].size(0), *self.rests[number]


class Backend(ABC):
    """Where parts are and how functions get to them.

    All methods but `box_numbers` are collective: in a process group each rank must call them, in the same order. Lists of
    parts are in the order of `box_numbers`.
    """

    @property
    @abstractmethod
    def own_place(self) -> Place:
        """The place that this process is."""

    @property
    @abstractmethod
    def participants(self) -> tuple[Place, ...]:
        """All processes that run the program: all ranks, or this worker alone."""

    @abstractmethod
    def complete(self, layout: Layout) -> Layout:
        """Return the layout with empty boxes for places that must have one."""

    @abstractmethod
    def box_numbers(self, layout: Layout) -> list[int]:
        """Return the boxes whose parts this process handles: its own, or all."""

    @abstractmethod
    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        """Call ``function(column[0], ..., **constants)`` for each part, where it is. The results stay there.

        Args:
            function: Must be importable by name everywhere: at the top of a module, or of torch.
            layout: Places of the parts.
            columns: For each part, its arguments: parts, tensors that are here, or plain values.
            constants: Plain values, the same for all.
        """

    @abstractmethod
    def move(
        self, parts: Sequence[Part], old: Layout, new: Layout, like: torch.Tensor, is_sum: bool = False
    ) -> list[Part]:
        """Return the parts of another layout. Gradients go back the same way; those of several copies add up.

        `like` tells dtype and device. With `is_sum`, old boxes that overlap are parts of a sum; else they must not overlap.
        """

    @abstractmethod
    def replicate(
        self, parts: Sequence[Part], layout: Layout, size: Sequence[int], like: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        """Return the whole tensor to every participant. Its gradient counts as the same everywhere."""

    @abstractmethod
    def divide(self, tensor: torch.Tensor, layout: Layout) -> list[Part]:
        """Return the parts of a tensor that is the same everywhere. Its gradient is the total, everywhere."""

    @abstractmethod
    def spread(self, rows: torch.Tensor, batch: Layout, layout: Layout) -> list[Part]:
        """Return the parts of every participant's own rows, for the next `run`. The gradient is that of the own rows."""

    @abstractmethod
    def ask(self, question: Question, layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Send requests to all parts, and return the answers of all boxes here.

        Tensors in requests and answers keep their gradients, except for integers. If the question has an error, this
        raises it, and the other participants raise RuntimeError.
        """

    @abstractmethod
    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return every participant's numbers, in the order of `participants`. All must pass the same number."""

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """Return every participant's value, in the order of `participants`."""

    @abstractmethod
    def settle(self, parts: Sequence[Part] = ()) -> None:
        """Wait until every started function has ended, so that its inputs may be changed in place.

        If one of `parts` could not be computed, its error is raised.
        """
