"""A worker's view of a context: the answer to ``~autograd.explain``, checked when it arrives.

Every list and text has a bound. A worker that has more sends the first ones, and the total number.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from gradwire.autograd.messages import NO_ID
from gradwire.types import Id, Rank, Text
from gradwire.wire.messages import prepare

MOST_MESSAGES: Final = 2_000
"""Messages of each direction that one worker lists."""
MOST_PASSES: Final = 64
MOST_OPERATORS: Final = 6

Ids = Annotated[tuple[Id, ...], msgspec.Meta(max_length=MOST_MESSAGES)]
Item = TypeVar("Item")


class MessageView(msgspec.Struct, frozen=True):
    """A recorded message, as one of its two workers sees it."""

    message_id: Id
    peer: Text
    function: Text  # that was called, or whose result it is
    site: Text = ""  # where it was sent; only the sender knows
    num_tensors: Id = 0
    num_bytes: Id = 0  # only the sender knows
    is_result: bool = False  # likewise
    at_ns: Id = 0  # when it was recorded, by the clock of the worker's machine; 0 if that was not observed


class Segment(msgspec.Struct, frozen=True):
    """The operators that a worker ran for one send, and not already for earlier ones."""

    message_id: Id = NO_ID  # the send; none for the roots of a pass
    recvs: Ids = ()  # messages whose tensors it starts from
    builds_on: Ids = ()  # sends whose segments it starts from
    is_passed_on: bool = False  # its tensors were received and sent on untouched: see ADR 21
    num_operators: Id = 0
    operators: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_OPERATORS)] = ()  # in forward order, each once
    num_leaves: Id = 0
    leaf_bytes: Id = 0


class WaitingView(msgspec.Struct, frozen=True):
    """A send of a pass whose gradient has not arrived."""

    message_id: Id
    peer: Text
    function: Text
    site: Text = ""
    is_gate: bool = False  # a run of the local engine is blocked on it


class Shortcut(msgspec.Struct, frozen=True):
    """A message that a worker passed on untouched in another message, so that its gradients can skip this worker."""

    message_id: Id  # the one that was passed on
    passed_on: Id  # the message that carried it on
    peer: Text  # the receiver of that message


class PassView(msgspec.Struct, frozen=True):
    """A running backward pass."""

    pass_id: Id
    root: Text
    mode: Literal["smart", "fast"]
    phase: Text
    num_running: int = 0
    components: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MOST_MESSAGES)] = ()
    waiting: Annotated[tuple[WaitingView, ...], msgspec.Meta(max_length=MOST_MESSAGES)] = ()
    offered: Annotated[tuple[Shortcut, ...], msgspec.Meta(max_length=MOST_MESSAGES)] = ()  # past this worker
    taken: Ids = ()  # messages that arrived here and are answered by a shortcut past their sender


class WorkerView(msgspec.Struct, frozen=True):
    """One worker's part of a context."""

    worker: Text
    known_workers: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=65_536)] = ()
    num_gradients: Id = 0
    num_sends: Id = 0
    num_recvs: Id = 0
    sends: Annotated[tuple[MessageView, ...], msgspec.Meta(max_length=MOST_MESSAGES)] = ()
    recvs: Annotated[tuple[MessageView, ...], msgspec.Meta(max_length=MOST_MESSAGES)] = ()
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MOST_MESSAGES + 1)] = ()
    passes: Annotated[tuple[PassView, ...], msgspec.Meta(max_length=MOST_PASSES)] = ()
    answered: bool = True


def first(items: Iterable[Item]) -> tuple[Item, ...]:
    """Return the first items, as many as a list in an answer may have."""
    return tuple(item for item, _ in zip(items, range(MOST_MESSAGES), strict=False))


def find_settlers(views: Iterable[WorkerView]) -> dict[int, str]:
    """Return which worker has to send the gradient of each message that a pass waits for, by the message's id.

    That is its receiver; or the worker that the receiver passed it on to, if that worker took the shortcut.
    """
    views = list(views)
    offers: dict[tuple[str, int, int], Shortcut] = {}
    taken: set[tuple[str, int, int]] = set()
    for view in views:
        for current in view.passes:
            for item in current.offered:
                offers[view.worker, current.pass_id, item.message_id] = item
            taken.update((view.worker, current.pass_id, message_id) for message_id in current.taken)
    found = {}
    for current in [item for view in views for item in view.passes]:
        for send in current.waiting:
            offer = offers.get((send.peer, current.pass_id, send.message_id))
            is_taken = offer is not None and (offer.peer, current.pass_id, offer.passed_on) in taken
            found[send.message_id] = offer.peer if offer is not None and is_taken else send.peer
    return found


prepare(WorkerView)
