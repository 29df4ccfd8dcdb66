"""The backend of RPC workers: one worker runs the program, and calls functions where the parts are.

Every call is an ordinary call of `gradwire.rpc`, so inside a context it is recorded and `backward` goes through it. A part
is a reference to a tensor, or the tensor itself if it is on this worker. Calls need not wait for each other: a function
whose argument is still being computed waits for it where it runs.

Parts may be on different devices. A function runs on the device of the part that it is called for. Other tensors travel in
host memory, whatever devices their workers have, and are copied to the device of the part; results are put on the device
of `like`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire import rpc
from gradwire._torch import is_view
from gradwire.rref import RRef, remote
from gradwire.shard.backend import Answerer, Backend, Part, Question, Request
from gradwire.shard.layout import Box, Layout, Place, everywhere, plan_moves, whole
from gradwire.wire.devices import CPU, move_all

Range = tuple[int, int]  # start and end
Piece = tuple[Part, list[Range] | None, list[Range]]
"""A piece of a tensor: the part it is taken from, its position there (None: the whole part), and its position here."""


# Results that may not be ready yet, by id, until they are dropped. Atomic operations only: any thread may drop one.
_started: dict[int, weakref.ref[RRef[Any]]] = {}


def _start(place: Place, function: Callable[..., Any], arguments: tuple[Any, ...]) -> RRef[Any]:
    """Call a function on another worker, in the grad mode of this thread."""
    made: RRef[Any] = remote(place, _in_mode, (torch.is_grad_enabled(), function, arguments))
    number = id(made)
    _started[number] = weakref.ref(made, lambda _: _started.pop(number, None))
    return made


class WorkerBackend(Backend):
    """The backend of the worker that runs the program: this process."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkerBackend)

    def __hash__(self) -> int:
        return hash(WorkerBackend)

    @property
    def own_place(self) -> str:
        return rpc.get_worker_info().name

    @property
    def participants(self) -> tuple[Place, ...]:
        return (self.own_place,)

    def complete(self, layout: Layout) -> Layout:
        return layout  # workers that hold nothing have nothing to do

    def box_numbers(self, layout: Layout) -> list[int]:
        return list(range(len(layout.boxes)))

    def run(
        self, function: Callable[..., Any], layout: Layout, *columns: Sequence[Any], **constants: Any
    ) -> list[Part]:
        here = self.own_place
        return [
            _run(function, arguments, constants)
            if place == here
            else _start(place, _run, (function, [on_host(item) for item in arguments], constants))
            for place, *arguments in zip(layout.places, *columns, strict=True)
        ]

    def move(
        self,
        parts: Sequence[Part],
        old: Layout,
        new: Layout,
        like: torch.Tensor,
        is_sum: bool = False,
        devices: Sequence[str] | None = None,
    ) -> list[Part]:
        """As `Backend.move`; `devices` are those of the new parts, if they are not all on that of `like`."""
        if old == new and not is_sum:
            return list(parts) if devices is None else self.run(put_on, new, parts, devices)
        pieces: list[list[Piece]] = [[] for _ in new.boxes]
        for step in plan_moves(old.boxes, new.boxes):
            part = parts[step.source]
            source: list[Range] | None = ranges_in(step.box, old.boxes[step.source])
            if isinstance(part, torch.Tensor) and new.places[step.target] != self.own_place:
                part, source = take_to_host(part, source), None  # only what is needed goes on its way
            pieces[step.target].append((part, source, ranges_in(step.box, new.boxes[step.target])))
        sizes = [list(box.sizes) for box in new.boxes]
        devices = [str(like.device)] * len(sizes) if devices is None else devices
        return self.run(assemble, new, sizes, pieces, devices, dtype=like.dtype, is_sum=is_sum)

    def replicate(
        self, parts: Sequence[Part], layout: Layout, size: Sequence[int], like: torch.Tensor, is_sum: bool = False
    ) -> torch.Tensor:
        (found,) = self.move(parts, layout, everywhere(size, self.participants), like, is_sum)
        assert isinstance(found, torch.Tensor)
        is_part = is_view(found) or any(found is part for part in parts)
        return found.clone() if is_part else found  # changes by the caller must not reach the tensor

    def divide(self, tensor: torch.Tensor, layout: Layout) -> list[Part]:
        outer = whole(tensor.size())
        return [tensor[box.slices_in(outer)] for box in layout.boxes]  # each goes with the call that needs it

    def spread(self, rows: torch.Tensor, batch: Layout, layout: Layout) -> list[Part]:
        return self.divide(rows, layout)

    def ask(self, question: Question, layout: Layout, parts: Sequence[Part]) -> list[torch.Tensor]:
        # One call to each part that is asked for anything. If the question says so, the others are called as well: their
        # gradient is zero then, not None. Optimizers tell these apart, and all parts of a parameter must be stepped alike.
        if question.error is not None:
            raise question.error
        here, answers, waiting = self.own_place, {}, {}
        for number, (place, request) in enumerate(zip(layout.places, question.requests, strict=True)):
            may_have_gradient = question.asks_all and layout.boxes[number].num_elements
            if not (may_have_gradient or any(item.numel() for item in request)):
                answers[number] = question.like.new_zeros(question.shape(number))
            elif place != here:
                call = (torch.is_grad_enabled(), answer_to_host, _call(question, parts, number))
                waiting[number] = rpc.rpc_async(place, _in_mode, args=call)
        for number, place in enumerate(layout.places):
            if place == here and number not in answers:
                answers[number] = answer(*_call(question, parts, number))
        for number, future in waiting.items():
            answers[number] = future.wait()
        found: list[torch.Tensor] = move_all([answers[number] for number in range(len(parts))], question.like.device)
        return found

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers)]

    def settle(self, parts: Sequence[Part] = ()) -> None:
        # Calls whose results are still held. One that fails raises where its result is used.
        waiting = [made for known in list(_started.values()) if (made := known()) is not None]
        for future in [item._get_future() for item in waiting]:
            with contextlib.suppress(Exception):
                future.wait()
        for made in waiting:  # only now: another thread may be waiting for them as well
            _started.pop(id(made), None)
        for part in parts:
            if isinstance(part, RRef):
                part._get_future().wait()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def value_of(part: Any) -> Any:
    """Return a part as a tensor: itself if it is here, a copy if it is not. Return anything else as it is."""
    return part.to_here() if isinstance(part, RRef) else part


def _in_mode(is_grad_enabled: bool, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    with torch.set_grad_enabled(is_grad_enabled):
        return function(*arguments)


def _run(function: Callable[..., Any], arguments: Sequence[Any], constants: dict[str, Any]) -> Any:
    values = [value_of(item) for item in arguments]
    if len({item.device for item in values if isinstance(item, torch.Tensor)}) > 1:
        device = _device_for(arguments, values)
        values = [move_all(item, device) if isinstance(item, torch.Tensor) else item for item in values]
    return function(*values, **constants)


def _device_for(arguments: Sequence[Any], values: Sequence[Any]) -> torch.device:
    """Return the device of the part that a function is called for: one of this worker, and not what came with the call."""
    tensors = [(number, item) for number, item in enumerate(values) if isinstance(item, torch.Tensor)]
    own = [item for number, item in tensors if isinstance(arguments[number], RRef)]
    return (own or [item for _, item in tensors if not item.is_cpu])[0].device


def on_host(value: Any) -> Any:
    """Return a tensor in the host's memory, so that it can go to a worker without its device; anything else as it is."""
    is_on_device = isinstance(value, torch.Tensor) and not (value.is_cpu or value.is_meta)
    return move_all(value, CPU) if is_on_device else value


def _call(question: Question, parts: Sequence[Part], number: int) -> tuple[Answerer, Part, Request, Any]:
    return question.function, parts[number], question.requests[number], question.settings[number]


def answer(function: Answerer, part: Part, request: Request, setting: Any) -> torch.Tensor:
    own = value_of(part)
    return function(own, move_all(request, own.device), setting)


def answer_to_host(function: Answerer, part: Part, request: Request, setting: Any) -> torch.Tensor:
    found: torch.Tensor = on_host(answer(function, part, request, setting))
    return found


def put_on(part: torch.Tensor, device: str) -> torch.Tensor:
    found: torch.Tensor = move_all(part, torch.device(device))
    return found


def take(part: Any, ranges: Sequence[Range] | None) -> torch.Tensor:
    tensor: torch.Tensor = value_of(part)
    return tensor if ranges is None else tensor[tuple(slice(start, end) for start, end in ranges)]


def take_to_host(part: Any, ranges: Sequence[Range] | None) -> torch.Tensor:
    found: torch.Tensor = on_host(take(part, ranges))
    return found


def assemble(
    sizes: Sequence[int], pieces: Sequence[Piece], device: str, dtype: torch.dtype, is_sum: bool
) -> torch.Tensor:
    """Put a tensor together from pieces; fetch those that are elsewhere, all at once.

    They cover the tensor, unless `is_sum`: then overlapping pieces add up, and elements that no piece covers are zero.
    """
    futures = {
        number: rpc.rpc_async(part.owner(), take_to_host, args=(part, source))
        for number, (part, source, _) in enumerate(pieces)
        if isinstance(part, RRef) and not part.is_owner()
    }
    values: list[torch.Tensor] = [
        futures[number].wait() if number in futures else take(part, source)
        for number, (part, source, _) in enumerate(pieces)
    ]
    values = move_all(values, torch.device(device))
    if len(values) == 1 and list(values[0].size()) == list(sizes):
        return values[0]
    slices = [tuple(slice(start, end) for start, end in target) for _, _, target in pieces]
    found: torch.Tensor = _Assemble.apply(sizes, device, dtype, is_sum, slices, *values)  # type: ignore[no-untyped-call]
    return found


class _Assemble(torch.autograd.Function):
    """Assemble a tensor from pieces; each receives its part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, sizes: Any, device: str, dtype: torch.dtype, is_sum: bool, slices: Any, *values: torch.Tensor
    ) -> torch.Tensor:
        ctx.slices = slices
        made = (torch.zeros if is_sum else torch.empty)(*sizes, dtype=dtype, device=device)
        for target, value in zip(slices, values, strict=True):
            part = made[target]
            part.add_(value) if is_sum else part.copy_(value)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, None, None, None, None, *(gradients[0][target] for target in ctx.slices)


def ranges_in(box: Box, outer: Box) -> list[Range]:
    """Return where a box lies in a tensor that holds `outer`, as starts and ends that can be sent."""
    return [(item.start, item.stop) for item in box.slices_in(outer)]
