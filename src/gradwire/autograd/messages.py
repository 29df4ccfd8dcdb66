"""What workers tell each other about contexts and backward passes; tensors travel beside these.

PropagateGradients   the gradient (or none) for messages that were sent in the forward pass; the first one from a worker
                     introduces it, and with no gradients at all it only says that the pass has begun; the last one
                     to the root may carry the report
ReportDone           to the root: everything here is done
AbortPass            something failed: to the root, and from there to everybody
CommitPass           from the root: the gradients of the pass join the context
ReleaseContext       the context is over, or is where this comes from because its maker is out of reach
HoldsContext         to the worker that made a context: the one that brought it here is gone, so tell me of its end
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
"""Where a context was released, for people; made harmless to print where it is shown."""


class RecordedCall(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Goes with every call and reply made inside a context."""

    context_id: Id
    message_id: Id = NO_ID  # the send that was recorded, if any
    num_tensors: Id = 0  # of the message that require grad and were recorded
    detects_anomalies: bool = False
    released: Where = ""  # where the callee's part was released, if tensors that require grad come back unrecorded


class PassOptions(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all participants must know about a pass."""

    is_fast: bool = False
    retain_graph: bool = False
    create_graph: bool = False
    skips_leaves: bool = False  # gather gradients only for the `inputs` that the root asked for
    detects_anomalies: bool = False
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0  # from when a worker joins the pass


class GradientItem(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The answer for one message of the forward pass."""

    message_id: Id
    # For each of its tensors, whether a gradient is among the tensors of this message; None for no gradient at all.
    defined: tuple[bool, ...] | None = None
    recorded_id: Id = NO_ID  # with `create_graph`, the id under which this answer itself was recorded
    recorded: tuple[Id, ...] = ()  # which of the gradients were recorded, by position among those that travel
    via: Rank | None = None  # whom the message went to, if that worker passed it on untouched and was not asked


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
    is_suspected: bool = False  # the sender only cannot reach the worker that made it, which may live


class HoldsContext(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    context_id: Id


DEFAULT_TIMEOUT_S = 600.0
"""How long a backward pass may take."""

DEFAULT_OPTIONS = PassOptions()

prepare(RecordedCall, PropagateGradients, ReportDone, AbortPass, CommitPass, ReleaseContext, HoldsContext)
