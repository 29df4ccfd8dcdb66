"""When a pass is over, and when it never will be: the root's side. Pure.

Every participant reports once, with the workers it exchanged messages with. The pass is over when everybody who can be
reached along those from the root has reported. What a worker reports that cannot be reached (yet) does not count: it
may have no part in the pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from gradwire.rpc._ids import Rank


class Termination:
    """Collects the reports of a pass.

    Args:
        root: Rank of the worker that called backward.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._reachable = {root}
        self._peers: dict[int, frozenset[int]] = {}  # of those who have reported
        self._absent: dict[int, set[int]] = {}  # whom they took to have no part

    def reported(self, worker: int, peers: Collection[int], absent: Collection[int] = ()) -> bool:
        """A participant is done; whether everybody is, and the pass is right. Repeats do no harm."""
        if absent:
            self._absent.setdefault(worker, set()).update(absent)
        if worker not in self._peers:
            self._peers[worker] = frozenset(peers)
            self._reachable = self._reach()
        return not self.missing and not self.mistaken

    def _reach(self) -> set[int]:
        found, todo = {self._root}, [self._root]
        while todo:
            new = self._peers.get(todo.pop(), frozenset()) - found
            found |= new
            todo += new
        return found

    def is_named(self, worker: int) -> bool:
        """Whether another worker has named that one in its report."""
        return any(worker in peers for reporter, peers in self._peers.items() if reporter != worker)

    @property
    def participants(self) -> frozenset[int]:
        """Everybody who may take part and must be told of the end: those, too, that cannot be reached yet."""
        return frozenset(self._reachable.union(self._peers, *self._peers.values()))

    @property
    def mistaken(self) -> set[int]:
        """Lost workers that somebody took to have no part, while others had to do with them: the pass must fail."""
        if not self._absent:
            return set()
        return self._reachable & set().union(*(self._absent.get(worker, ()) for worker in self._reachable))

    @property
    def missing(self) -> set[int]:
        """Those who have not reported yet."""
        return self._reachable - self._peers.keys()


class WaitingSend(msgspec.Struct, frozen=True):
    """A send without its gradient, as people are shown it.

    Attributes:
        message_id: The autograd message.
        worker: Who sent it and waits.
        peer: Who received it and should answer.
        function: The function that was called, or whose result was sent.
        site: Where in the user's code.
        is_gate: Whether a run of the local engine stands still for it.
    """

    message_id: int
    worker: str
    peer: str
    function: str
    site: str
    is_gate: bool = False

    def __str__(self) -> str:
        return f"send {self.message_id:#x} of {self.function} ({self.site}) on worker {self.worker} to {self.peer}"


class PassSnapshot(msgspec.Struct, frozen=True):
    """One participant's answer to the stall probe.

    Attributes:
        worker: Its name.
        is_known: Whether it has joined the pass and not dropped it.
        is_done: Whether it has reported.
        num_running: Runs of its local engine that are not standing still.
        num_sent: Messages of the pass that it sent.
        num_received: Messages of the pass that it handled.
        waiting: Its sends without gradient.
        peers: Ranks of the workers it exchanged messages with.
    """

    worker: str
    is_known: bool = False
    is_done: bool = False
    num_running: int = 0
    num_sent: int = 0
    num_received: int = 0
    waiting: tuple[WaitingSend, ...] = ()
    peers: tuple[Rank, ...] = ()


def is_stalled(before: Mapping[int, PassSnapshot], now: Mapping[int, PassSnapshot]) -> bool:
    """Whether nothing can move any more, from two probes, one after the other, of every participant.

    Nobody computes, every message that was sent has been handled, and nothing changed between the probes: then nothing was
    under way while the second one was taken. If somebody is not in the pass (any more), or does not answer, its end is on
    the way by itself, and the counts say nothing.
    """
    if before != now or all(item.is_done for item in now.values()):
        return False
    if any(item.num_running or not item.is_known or not now.keys() >= set(item.peers) for item in now.values()):
        return False
    return sum(item.num_sent for item in now.values()) == sum(item.num_received for item in now.values())
