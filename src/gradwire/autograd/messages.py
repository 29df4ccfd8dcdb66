"""Messages between workers about contexts and backward passes; tensors travel beside these.

PropagateGradients   the gradient (or none) for messages that were sent in the forward pass; the first one from a worker
                     introduces it, and with no gradients at all it only says that the pass has begun; the last one
                     to the root may carry the report
ReportDone           to the root: everything here is done
AbortPass            something failed: to the root, and from there to all
CommitPass           from the root: the gradients of the pass join the context
ReleaseContext       the context is over; or the sender released it because its creator cannot be reached
HoldsContext         to the creator of a context: tell me of its end, because the worker that would is lost
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from gradwire.autograd._backward_state import Introduction, Report
from gradwire.types import Id, Rank
from gradwire.wire.messages import ErrorInfo, prepare

NO_ID = 0
"""Stands for no message: real ids carry a counter that begins at 1."""

WHERE_CHARS = 512

Where = Annotated[str, msgspec.Meta(max_length=WHERE_CHARS)]
"""Where a context was released, for people; cleaned where it is printed."""


class RecordedCall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Accompanies every call and reply made inside a context."""

    context_id: Id
    message_id: Id = NO_ID  # the send that was recorded, if any
    num_tensors: Id = 0  # of the message that require grad and were recorded
    detects_anomalies: bool = False
    released: Where = ""  # where the callee's part was released, if tensors that require grad come back unrecorded


class PassOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Options of a pass, for all participants."""

    is_fast: bool = False
    retain_graph: bool = False
    create_graph: bool = False
    skips_leaves: bool = False  # compute gradients only for the `inputs` of the root
    detects_anomalies: bool = False
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0  # from when a worker joins the pass


class GradientItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer for one message of the forward pass."""

    message_id: Id
    # For each of its tensors, whether a gradient is among the tensors of this message; None for no gradient at all.
    defined: tuple[bool, ...] | None = None
    recorded_id: Id = NO_ID  # with `create_graph`, the id under which this answer itself was recorded
    recorded: tuple[Id, ...] = ()  # which of the gradients were recorded, by position among those that travel
    via: Rank | None = None  # the receiver of the message, if it passed the message on untouched and was not asked


class PropagateGradients(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    context_id: Id
    pass_id: Id
    options: PassOptions
    items: tuple[GradientItem, ...] = ()
    introduction: Introduction | None = None
    report: Report | None = None


class ReportDone(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    context_id: Id
    pass_id: Id
    report: Report


class AbortPass(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    context_id: Id
    pass_id: Id
    error: ErrorInfo


class CommitPass(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    context_id: Id
    pass_id: Id


class ReleaseContext(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    context_id: Id
    where: Where
    is_suspected: bool = False  # the sender cannot reach the creator, which may be alive


class HoldsContext(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    context_id: Id


DEFAULT_TIMEOUT_S = 600.0
"""Default timeout of a backward pass."""

DEFAULT_OPTIONS = PassOptions()

prepare(RecordedCall, PropagateGradients, ReportDone, AbortPass, CommitPass, ReleaseContext, HoldsContext)
