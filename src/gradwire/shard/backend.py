"""What operations on sharded tensors are written in, so that each is written once.

An backend knows where the parts of tensors are and how functions get to them. There are two. In a **process group**
(`group_backend`) every rank runs the same program and handles its own parts. Over **RPC workers** (`worker_backend`) one
worker runs the program and handles all parts, which are references to tensors elsewhere.

    run         a function of parts, where they are; what it returns stays there
    move        from one layout to another; what is moved keeps its gradient, which goes back the same way
    replicate   parts -> the same plain tensor for everybody who runs the program
    divide      such a tensor -> parts
    spread      everybody's own rows -> parts
    ask         questions to parts, made by everybody for themselves, and the answers

Two kinds of plain tensors meet sharded ones. What is **one's own** (the rows of a batch) may be different for everybody who
runs the program; its gradient is one's own, too. What is **replicated** (a bias, the result of a reduction) is the same
everywhere, and so is its gradient: the total.
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
"""What is asked of one part: tensors of one dimension, of any length."""

Answerer = Callable[[torch.Tensor, Request, list[list[int]], Any], torch.Tensor]
"""Answers what everybody asks of one part: all answers, one after the other.

Gets the part, all requests, joined tensor by tensor, how long each tensor of each request was, and the setting of the part.
"""


@dataclass(frozen=True)
class Question:
    """What a process asks of all parts of a tensor.

    Attributes:
        function: Gives the answers, where the part is. Must be found by name everywhere.
        requests: What is asked of each box, also of those this process does not handle. All have as many tensors, of the
            same dtypes, whoever asks.
        settings: For each box, a plain value for the function; the same, whoever asks.
        along: The position of the tensor in a request that is as long as the answer.
        rests: The other dimensions of the answers of each box.
        like: Tells dtype and device of the answers.
        error: Why this process cannot ask; everybody raises then.
        asks_all: Whether parts are asked, too, of which nothing is wanted, so that they take part in backward.
    """

    function: Answerer
    requests: Sequence[Request]
    settings: Sequence[Any]
    along: int
    rests: Sequence[Sequence[int]]
    like: torch.Tensor
    error: Exception | None = None
    asks_all: bool = False

    def shape(self, number: int) -> tuple[int, ...]:
        """Of the answer that a box gives to this process."""
        return self.requests[number][self.along].size(0), *self.rests[number]


class Backend(ABC):
    """Where parts are and how functions get to them.

    All methods but `numbers` concern everybody: in a process group each rank must call them, in the same order. Lists of
    parts are in the order of `numbers`.
    """

    @property
    @abstractmethod
    def own_place(self) -> Place:
        """This process."""

    @property
    @abstractmethod
    def participants(self) -> tuple[Place, ...]:
        """Everybody who runs the program: all ranks, or this worker alone."""

    @abstractmethod
    def complete(self, layout: Layout) -> Layout:
        """The layout, with empty boxes for those who must have one."""

    @abstractmethod
    def box_numbers(self, layout: Layout) -> list[int]:
        """The boxes whose parts this process handles: its own, or all."""

    @abstractmethod
    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        """``function(column[0], ..., **constants)`` for each part, where it is. The results stay there.

        Args:
            function: Must be found by name everywhere: at the top of a module, or of torch.
            layout: Tells where.
            columns: For each part, its arguments: parts, tensors that are here, or plain values.
            constants: Plain values, the same for all.
        """

    @abstractmethod
    def move(
        self, parts: Sequence[Part], old: Layout, new: Layout, like: torch.Tensor, is_sum: bool = False
    ) -> list[Part]:
        """The parts of another layout. Gradients go back the same way; those of several copies add up.

        Args:
            parts: Of the old layout.
            old: Who has what.
            new: Who is to have what.
            like: Tells dtype and device.
            is_sum: Whether old boxes that overlap are parts of a sum; else they must not overlap.
        """

    @abstractmethod
    def replicate(
        self, parts: Sequence[Part], layout: Layout, size: Sequence[int], like: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        """The whole tensor for everybody. Its gradient counts as the same everywhere."""

    @abstractmethod
    def divide(self, tensor: torch.Tensor, layout: Layout) -> list[Part]:
        """The parts of a tensor that is the same everywhere. Its gradient is the total, for everybody."""

    @abstractmethod
    def spread(self, rows: torch.Tensor, batch: Layout, layout: Layout) -> list[Part]:
        """The parts of everybody's own rows, for the next `run`. The gradient is one's own.

        Args:
            rows: One's own.
            batch: Whose rows are where; its places are the participants.
            layout: Who is to have what; boxes may overlap.
        """

    @abstractmethod
    def ask(self, question: Question, layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
        """Asks every part something, and returns the answers of all boxes, all of them here.

        Tensors in requests and answers keep their gradients, except for integers.

        Raises:
            Exception: The error of the question.
            RuntimeError: Somebody else's question has one.
        """

    @abstractmethod
    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers that everybody says, in the order of `participants`. All say as many."""

    @abstractmethod
    def settle(self, parts: Sequence[Part] = ()) -> None:
        """Returns when every function that was started has ended, so that what it reads may be changed in place.

        Args:
            parts: If one of these could not be made, its error is raised.
        """

    @abstractmethod
    def gather_objects(self, value: Any) -> list[Any]:
        """What everybody who runs the program says, in the order of `participants`."""
