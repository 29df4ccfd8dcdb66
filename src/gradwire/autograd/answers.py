"""Gradients as they travel: an item for each message that is answered, and the tensors beside it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradwire.autograd._backward_state import Route
from gradwire.autograd.context import RESULT, DistAutogradContext, RecordedRecv
from gradwire.autograd.functions import Gradients
from gradwire.autograd.gradients import sum_by_origin
from gradwire.autograd.messages import NO_ID, GradientItem
from gradwire.errors import AutogradError
from gradwire.types import WorkerInfo

Answers = tuple[tuple[GradientItem, ...], list[torch.Tensor]]
"""What goes back for messages, and the gradients beside it."""

_MOST_TENSORS = 1 << 20  # in one message, whatever others say


def pack_answer(
    context: DistAutogradContext,
    recv: RecordedRecv,
    gradients: Gradients,
    recorded_id: int = NO_ID,
    via: int | None = None,
) -> tuple[GradientItem, list[torch.Tensor]]:
    """The gradients of a recv, if any are defined; recorded as a send of their own under that id, if given."""
    present = [gradient for gradient in gradients if gradient is not None]
    if not present:
        return GradientItem(recv.message_id, via=via), present
    if len(present) == len(gradients):
        defined = (True,) * len(present)
    else:
        defined = tuple([gradient is not None for gradient in gradients])
    recorded: tuple[int, ...] = ()
    if recorded_id != NO_ID:
        recorded = tuple(number for number, gradient in enumerate(present) if gradient.requires_grad)
        if recorded:
            chosen = [present[number] for number in recorded]
            context.record_send(recorded_id, recv.peer, f"the gradient of {recv.function}", chosen, RESULT)
        else:
            recorded_id = NO_ID
    item = GradientItem(recv.message_id, defined, recorded_id, recorded, via)
    return item, [gradient.detach() if gradient.requires_grad else gradient for gradient in present]


def follow_routes(
    recv: RecordedRecv, routes: Sequence[Route], gradients: Gradients
) -> dict[tuple[int, int], list[torch.Tensor | None] | None]:
    """The gradients of a recv, by the worker and the message that its tensors came from; None where there are none.

    Raises:
        AutogradError: The routes are not those of that message.
    """
    if len(routes) != len(gradients):
        raise AutogradError(f"worker {recv.peer} offered a shortcut that does not fit message {recv.message_id:#x}")
    sums = sum_by_origin([route[1:3] for route in routes], gradients)
    answers: dict[tuple[int, int], list[torch.Tensor | None] | None] = {}
    for worker, message_id, _, num_tensors in routes:
        found = sums.get(message_id)
        if found and (num_tensors > _MOST_TENSORS or not all(0 <= number < num_tensors for number in found)):
            raise AutogradError(f"worker {recv.peer} offered a shortcut to tensors that cannot be")
        answers[worker, message_id] = [found.get(number) for number in range(num_tensors)] if found else None
    return answers


def unpack_answers(
    context: DistAutogradContext, sender: WorkerInfo, items: tuple[GradientItem, ...], tensors: list[torch.Tensor]
) -> dict[int, Gradients | None]:
    """The answers of a message, each with its own tensors.

    Raises:
        AutogradError: There are not as many as it says.
    """
    answers: dict[int, Gradients | None] = {}
    rest = list(tensors)
    for item in items:
        if item.defined is None:
            answers[item.message_id] = None
            continue
        number = sum(item.defined)
        if number > len(rest):
            raise AutogradError(f"a message of {sender.name} lacks gradients for message {item.message_id:#x}")
        mine, rest = rest[:number], rest[number:]
        if item.recorded_id != NO_ID:
            mine = _record_gradients(context, sender, item, mine)
        following = iter(mine)
        answers[item.message_id] = [next(following) if is_defined else None for is_defined in item.defined]
    if rest:
        raise AutogradError(f"a message of {sender.name} carries {len(rest)} gradients more than it names")
    return answers


def _record_gradients(
    context: DistAutogradContext, sender: WorkerInfo, item: GradientItem, gradients: list[torch.Tensor]
) -> list[torch.Tensor]:
    """With `create_graph`: gradients that arrive are part of the graph, too."""
    if not all(0 <= number < len(gradients) for number in item.recorded) or not item.recorded:
        raise AutogradError(f"a message of {sender.name} names gradients that it does not carry")
    chosen = [gradients[number] for number in item.recorded]
    outputs = context.record_recv(item.recorded_id, sender.id, "gradient", chosen)
    gradients = list(gradients)
    for number, output in zip(item.recorded, outputs, strict=True):
        gradients[number] = output
    return gradients
