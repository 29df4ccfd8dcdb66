"""The lock around what is decided about references, and the tables that go with it."""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from gradwire.errors import OwnerLost, RRefError
from gradwire.rpc.trips import Passage
from gradwire.rref._actions import Action, Break, Fail, Forget, Free, LocalAction, Worker
from gradwire.rref._exchange import Exchange
from gradwire.rref.values import Owned, UserFork, describe

_log = logging.getLogger("gradwire")


class Decisions:
    """What one worker knows of references.

    Use it as ``with decisions as known, known.lock:``. What is to be done is done when the lock is released; what Ctrl-C
    keeps from being done then is done next time. The lock is taken by the statement itself, because Ctrl-C between taking it
    in a function and returning would leave it taken for ever. Where nothing is to be done, `lock` alone is enough.

    Args:
        own: The worker.

    Attributes:
        exchange: Decides.
        ownership: The part of it that knows of references.
        outbox: The part of it that knows what is to be sent.
        owned: Values here that others know of, by id.
        forks: References to values elsewhere, by fork id.
        on_put: Called when there is something to be sent.
        asked_at: By fork that was sent and not accepted: when it was, or when it was last asked for.
        passages: By such a fork: what is known of the message that it is in.
    """

    def __init__(self, own: Worker) -> None:
        self.exchange = Exchange(own)
        self.ownership = self.exchange.ownership
        self.outbox = self.exchange.outbox
        self.owned: dict[int, Owned] = {}
        self.forks: dict[int, UserFork] = {}
        self.asked_at: dict[int, float] = {}
        self.passages: dict[int, Passage] = {}
        self.lock = threading.Lock()  # guards everything here; never held while anything is sent, freed or called back
        self._effects: list[Callable[[], Any]] = []
        self._due: collections.deque[Callable[[], Any]] = collections.deque()  # effects that wait for no lock any more
        self._has_put = False
        self.on_put: Callable[[], None] = lambda: None

    def __enter__(self) -> Decisions:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._has_put:  # first: an effect may be somebody's callback, which may wait for what is to be sent
            self._has_put = False
            try:
                self.on_put()
            except BaseException:
                self._has_put = True
                raise
        if self._effects:
            with self.lock:
                self._due.extend(self._effects)
                self._effects.clear()
        while self._due:
            self._do_next()

    def _do_next(self) -> None:
        """Has one effect. All may be repeated: after Ctrl-C they are, and two threads may have one at the same time."""
        try:
            effect = self._due[0]
        except IndexError:  # another thread had it
            return
        is_over = True
        try:
            effect()
        except KeyboardInterrupt:
            is_over = False
            raise
        finally:
            if is_over:
                with contextlib.suppress(ValueError):
                    self._due.remove(effect)

    def do(self, actions: Iterable[Action]) -> None:
        """Queues messages, and what concerns this worker alone for when the lock is released."""
        self.have(self.exchange.put(actions))

    def have(self, actions: Iterable[LocalAction]) -> None:
        """Queues what concerns this worker alone for when the lock is released."""
        self._has_put = self._has_put or self.outbox.has_messages
        for action in actions:
            if isinstance(action, Free):
                owned = self.owned.pop(action.rref_id, None)
                if owned is not None:
                    owned.is_freed = True
                    self._effects.append(owned.free)
            elif isinstance(action, Fail):
                self._fail(action.rref_id)
            elif isinstance(action, Break):
                self._break(action.fork_id, action.reason)
            elif isinstance(action, Forget):
                self.forks.pop(action.fork_id, None)
            else:
                self._confirm(action.fork_id)

    def later(self, effect: Callable[[], Any]) -> None:
        """Called when the lock is released."""
        self._effects.append(effect)

    def expect(self, rref_id: int) -> Owned:
        """The value of that id, which others know of."""
        owned = self.owned.get(rref_id)
        if owned is None:
            owned = self.owned[rref_id] = Owned(rref_id, num_local=0)
            owned.is_shared = True
        return owned

    def share(self, owned: Owned) -> None:
        """Others are going to know of a value."""
        if not owned.is_shared:
            owned.is_shared = True
            self.owned[owned.rref_id] = owned
            self.ownership.value_made(owned.rref_id)

    def _fail(self, rref_id: int) -> None:
        owned = self.owned.get(rref_id)
        if owned is not None:
            text = f"the value of reference {describe(rref_id)} was never made: the worker whose call was to make it gave up"
            self._effects.append(lambda: owned.fail(lambda: RRefError(f"{text} or died")))

    def _confirm(self, fork_id: int) -> None:
        fork = self.forks.get(fork_id)
        if fork is not None:
            self._effects.append(fork.confirm)

    def _break(self, fork_id: int, reason: str) -> None:
        fork = self.forks.get(fork_id)
        if fork is not None:
            name = fork.owner.name
            text = f"reference {describe(fork.rref_id)} to a value of worker {name} is lost: {reason}. Make the value again"
            self._effects.append(lambda: fork.end(lambda: OwnerLost(text, name)))
