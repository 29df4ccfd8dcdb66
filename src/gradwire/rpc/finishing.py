"""How calls end, on the side that made them.

    taken out of its table --> value or error is set --> future completed, in a thread that may run callbacks --> done

Ctrl-C may hit the main thread anywhere in between, also while it reads for others. Then a service thread does it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire.rpc._calls import CallTable, PendingCall
from gradwire.rpc.futures import CallFuture

if TYPE_CHECKING:
    from gradwire.rpc.agent import Agent

_log = logging.getLogger("gradwire")


class Finisher:
    """Ends one worker's calls."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._completing: set[PendingCall] = set()  # answered, and their callbacks run or are about to

    def finish(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """Ends a call; only for whoever took it out of its table."""
        call.value, call.error = value, error
        call.disembark()
        future = call.future
        if future is not None:
            self._completing.add(call)
            if self._must_run_elsewhere(future):
                call.is_answered = True
                self._agent.reactor.run_soon(lambda: self._complete(call, future))
            else:
                self._complete(call, future)
            return
        call.mark_done()
        on_done, call.on_done = call.on_done, None  # it may know a future that is to keep the call
        if on_done is not None:
            on_done(call)

    def _must_run_elsewhere(self, future: CallFuture[Any]) -> bool:
        """Callbacks run in service threads: a thread that waits has no time for them, and the clock must never wait."""
        reactor = self._agent.reactor
        if self._agent.is_closed:  # no service thread may be left; better a callback here than a thread for each
            return False
        return reactor.is_clock_thread() or (future.has_callbacks and not reactor.is_service_thread())

    def finish_surely(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """As `finish`; after Ctrl-C, a service thread does it again."""
        try:
            self.finish(call, value, error)
        except BaseException:
            self.finish_soon(call, value, error)
            raise

    def finish_soon(self, call: PendingCall, value: Any, error: Exception | None) -> None:
        """As `finish`, in a service thread: Ctrl-C has hit the thread that took the call out of its table."""

        def finish_again() -> None:
            if not call.is_done and call.table is not None and call.call_id not in call.table:
                self.finish(call, value, error)

        self._agent.reactor.run_soon(finish_again)

    def fail_all(self, calls: CallTable, make_error: Callable[[PendingCall], Exception]) -> None:
        """Ends all calls of a connection that is gone; after Ctrl-C, a service thread ends the rest of them."""
        current: PendingCall | None = None
        try:
            for call in list(calls.values()):
                current = call  # known before it is taken out
                if calls.pop(call.call_id, None) is not None:
                    self.finish(call, None, make_error(call))
                current = None
        except BaseException:
            self._agent.reactor.run_soon(partial(self._fail_rest, calls, make_error, current))
            raise

    def _fail_rest(
        self, calls: CallTable, make_error: Callable[[PendingCall], Exception], interrupted: PendingCall | None
    ) -> None:
        self.fail_all(calls, make_error)
        if interrupted is not None and not interrupted.is_done:
            self.finish(interrupted, None, make_error(interrupted))

    def _complete(self, call: PendingCall, future: CallFuture[Any]) -> None:
        is_over = True
        try:
            if call.error is not None:
                future.set_exception(call.error)
            else:
                future.set_result(call.value)
        except Exception:
            _log.exception("%s: a callback of %r failed", self._agent.info.name, call)
        except BaseException:
            is_over = future.done()  # else Ctrl-C hit before: a service thread finishes the call again
            raise
        finally:
            if is_over:
                call.value = call.future = None  # the future holds the value, and must not hold itself
                self._completing.discard(call)
                call.mark_done()
