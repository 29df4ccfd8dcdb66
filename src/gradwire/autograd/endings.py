"""How backward passes end: committed, or dropped by everybody.

Whoever called backward decides. Anything that fails tells that worker, the root, which tells everybody; each passes it on to
those it has exchanged messages with. Who has reported waits for the root's word: gradients count everywhere or nowhere.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from gradwire.autograd.gradients import GradientTable, add_gradient
from gradwire.autograd.messages import AbortPass, CommitPass
from gradwire.autograd.passes import BackwardPass, PassPhase
from gradwire.autograd.quotas import ENDED_PASS_BYTES
from gradwire.errors import (
    BackwardFailed,
    LimitExceeded,
    RpcError,
    RpcTimeout,
    TransportError,
    UnknownContext,
    WorkerLost,
)
from gradwire.rpc._ids import creator_of
from gradwire.wire import failures

if TYPE_CHECKING:
    from gradwire.autograd.container import DistAutogradContainer
    from gradwire.autograd.context import DistAutogradContext
    from gradwire.rpc.agent import Agent

_MOST_EARLY = 64  # workers whose word is kept until another one names them
_TELL_S = 0.2  # how long whoever ends a pass or a context waits for a worker that does not read


class Endings:
    """Ends the passes of one worker, and tells others.

    Args:
        agent: The worker.
        container: Its contexts.
        name_of: Names of workers by rank.
    """

    def __init__(self, agent: Agent, container: DistAutogradContainer, name_of: Callable[[int], str]) -> None:
        self._agent = agent
        self._quotas = container.quotas
        self._own = container.worker
        self._name_of = name_of

    def commit(self, current: BackwardPass, others: Iterable[int], *, follows: bool = True) -> None:
        """Whoever called backward goes on at once: others that are asked for gradients wait for what is sent here.

        Args:
            current: The pass.
            others: Ranks of its other participants.
            follows: Whether those whom a follow-up tells need not be told here.
        """
        try:
            self.end(current, PassPhase.COMMITTED)
        except Exception as error:  # out of memory, say; nobody has heard yet
            with current.lock:
                if current.is_over:  # another thread could make them
                    return
                current.phase = PassPhase.DONE
            self.fail(current, error, "adding up gradients")
            return
        if follows and current.follow_up is not None:
            others = set(others) - current.follow_up.ranks
        if current.context.released is None:  # else they are told of that anyway
            self.tell_all(others, "autograd.commit", CommitPass(current.context.context_id, current.pass_id))

    def fail(self, current: BackwardPass, error: BaseException, operation: str) -> None:
        """Something went wrong here: the pass ends, and everybody is told.

        Who has reported leaves that to the root, which may have committed meanwhile: then the gradients here count.
        """
        if not current.is_open:
            return
        failure = self.failure(error, operation)
        abort = AbortPass(current.context.context_id, current.pass_id, self.describe(failure))
        if self.drop(current, failure, abort, set(), has_last_word=current.is_root) or not current.is_undecided:
            return
        if not self.tell(creator_of(current.pass_id), "autograd.abort", abort):  # nobody is left to say how it ends
            self.drop(current, failure, abort, set())

    def finish_commit(self, current: BackwardPass) -> None:
        """The thread that committed was interrupted, or what follows failed: some may have heard of it, so all must."""
        if current.phase in (PassPhase.COMMITTING, PassPhase.COMMITTED):
            with current.lock:
                others = current.followers()
            self.commit(current, others, follows=False)

    def release(self, current: BackwardPass, where: str) -> None:
        """The context of a pass was released: nobody can ask for its gradients any more, however it ends."""
        failure = self.failure(UnknownContext(f"the context was released {where}"), "waiting")
        abort = AbortPass(current.context.context_id, current.pass_id, self.describe(failure))
        self.drop(current, failure, abort, set())

    def may_abort(self, context: DistAutogradContext, message: AbortPass, sender: int) -> bool:
        """Whether a worker may end a pass; one that is not here cannot be begun then: messages may overtake each other.

        The root may not know yet that the worker takes part: then its word is kept until another participant names it. One
        that has not reported passes the word on to those who can tell the root.
        """
        with context.lock:
            current = context.passes.get(message.pass_id)
            is_known = context.knows(sender) or sender == creator_of(message.pass_id)
            if current is None:
                return is_known and self._bar(context, message.pass_id, sender)
        if is_known:
            return True
        with current.lock:
            if current.is_joined and sender in current.state.peers:
                return True
            if current.termination is None or current.termination.is_named(sender):
                return current.termination is not None
            if len(current.early) < _MOST_EARLY:
                current.early[sender] = message
            return False

    def _bar(self, context: DistAutogradContext, pass_id: int, sender: int) -> bool:
        """Remembers that a pass is over; under the context's lock. False if the sender has ended too many."""
        if pass_id not in context.ended_passes:
            try:
                self._quotas.charge(sender, context, ENDED_PASS_BYTES)
            except LimitExceeded:
                return False
            context.ended_passes[pass_id] = False
        return True

    def refuse(self, context_id: int, pass_id: int, sender: int, error: Exception) -> None:
        """Gradients came that cannot be taken here: the root must know."""
        failure = self.failure(error, "taking gradients")
        abort = AbortPass(context_id, pass_id, self.describe(failure))
        self.tell_all({creator_of(pass_id), sender}, "autograd.abort", abort)

    def tell_failed(self, rank: int, context_id: int, pass_id: int) -> None:
        """Tells a worker that waits for the end of a pass that it has failed."""
        failure = BackwardFailed("the backward pass has failed already", self._agent.info.name, "waiting")
        self.tell(rank, "autograd.abort", AbortPass(context_id, pass_id, self.describe(failure)))

    def failure(self, error: BaseException, operation: str) -> BackwardFailed:
        if isinstance(error, BackwardFailed):
            return error
        name = self._agent.info.name
        if isinstance(error, WorkerLost) and error.worker:  # whoever noticed it, and by whatever means: name the dead
            name, operation = error.worker, "taking part in the pass"
        node = "" if (rank := self._rank_of(name)) is None else f" on Node {rank}"
        kind = type(error).__name__
        text = f"Error{node}: {error} ({kind}; the backward pass failed on worker {name} while {operation})"
        failure = BackwardFailed(text, name, operation)
        failure.__cause__ = error
        return failure

    def _rank_of(self, name: str) -> int | None:
        return next((info.id for info in self._agent.directory.infos() if info.name == name), None)

    def describe(self, failure: BaseException) -> Any:
        return failures.describe_exception(failure, self._agent.info.name, self._agent.config.limits)

    def drop(
        self,
        current: BackwardPass,
        error: BaseException,
        abort: AbortPass,
        told: set[int],
        *,
        has_last_word: bool = True,
    ) -> bool:
        """Ends a pass without gradients, and passes that on to whoever has to do with it here.

        Args:
            current: The pass.
            error: Why.
            abort: The same, for others.
            told: Ranks of those who know.
            has_last_word: Whether that ends it here even after this worker has reported.

        Returns:
            False if it had ended, or is the root's to end.
        """
        had_reported = current.is_undecided and not current.is_root
        if not self.end(current, PassPhase.ABORTED, error, has_last_word=has_last_word):
            return False
        if had_reported:
            return True  # the others wait for the root's word, as this one did
        with current.lock:  # after the end, so that nobody is forgotten who reports at this moment
            others = {creator_of(current.pass_id)}
            if current.is_joined:
                others |= set(current.state.peers)
            others |= current.followers()
        self.tell_all(others - told - {self._own}, "autograd.abort", abort)
        return True

    def end(
        self, current: BackwardPass, phase: PassPhase, error: BaseException | None = None, *, has_last_word: bool = True
    ) -> bool:
        """The pass is decided; False if it was already. The root's gradients stay for whoever called backward."""
        context = current.context
        with context.lock, current.lock:
            if not current.is_open and (current.is_over or phase is PassPhase.ABORTED):
                return False
            if current.is_undecided and not has_last_word:
                return False
            is_committed = phase is PassPhase.COMMITTED
            gradients = self._joined(current) if is_committed else context.gradients
            # Assignments only: no Ctrl-C comes between them. Before them all may be done again, after them nothing need be.
            context.ended_passes[current.pass_id] = is_committed
            context.gradients = gradients
            current.phase, current.error, current.is_over = phase, error, True
            if not current.is_root:
                current.forget()
            context.passes.pop(current.pass_id, None)
            context.wake()
            current.wake()
        current.on_over()
        return True

    def _joined(self, current: BackwardPass) -> GradientTable:
        """The gradients of a context and of its pass; nothing has changed yet."""
        context = current.context
        if not current.joins_context or context.released:
            return context.gradients
        found = {leaf: gradient for leaf, gradient in context.gradients.items() if leaf not in current.totals}
        for leaf, gradient in current.gradients.items():
            add_gradient(found, leaf, gradient, current.options.create_graph)
        return found

    def tell_all(self, ranks: Iterable[int], name: str, note: Any) -> None:
        """Sends a notice to several workers; those that are gone need not be told."""
        for rank in ranks:
            if rank != self._own:
                self.tell(rank, name, note)

    def tell(self, rank: int, name: str, note: Any) -> bool:
        """Sends a notice; False if the worker is gone. For one that does not read, another thread goes on trying."""
        try:
            return self._send(rank, name, note, time.monotonic() + _TELL_S)
        except RpcTimeout:
            self._agent.reactor.run_soon(functools.partial(self._tell_late, rank, name, note))
            return True

    def _tell_late(self, rank: int, name: str, note: Any) -> None:
        # If its connection was cut off meanwhile, it takes this worker for dead, and needs to be told nothing more.
        self.send(rank, name, note)

    def send(self, rank: int, name: str, note: Any) -> bool:
        """Sends a notice, in as much time as a call has; False if the worker cannot be reached."""
        try:
            return self._send(rank, name, note, None)
        except RpcTimeout:
            return False

    def _send(self, rank: int, name: str, note: Any, deadline: float | None) -> bool:
        """Sends a notice; False if the worker is gone."""
        try:
            to = self._name_of(rank)
            if self._agent.notices.is_out_of_reach(to):
                return False
            self._agent.notices.send(to, name, note, (), deadline)
        except RpcTimeout:
            raise
        except (RpcError, TransportError):
            return False
        return True
