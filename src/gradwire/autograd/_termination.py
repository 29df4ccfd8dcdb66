"""When a pass is over, and when it never will be: the root's side. Pure.

Every participant reports once, with the workers it exchanged messages with. The pass is over when everybody who can be
reached along those from the root has reported.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec


class Termination:
    """Collects the reports of a pass.

    Args:
        root: Rank of the worker that called backward.
    """

    def __init__(self, root: int) -> None:
        self._participants = {root}
        self._reported: set[int] = set()
        self._absent: set[int] = set()

    def reported(self, worker: int, peers: Collection[int], absent: Collection[int] = ()) -> bool:
        """A participant is done; whether everybody is, and the pass is right. Repeats do no harm."""
        if worker not in self._reported:
            self._reported.add(worker)
            self._participants.add(worker)
            self._participants.update(peers)
        self._absent.update(absent)
        return not self.missing and not self.mistaken

    @property
    def participants(self) -> frozenset[int]:
        """Everybody known to take part: those who have reported, too, that nobody has named yet."""
        return frozenset(self._participants)

    @property
    def mistaken(self) -> set[int]:
        """Lost workers that somebody took to have no part, while others had to do with them: the pass must fail."""
        return self._participants & self._absent

    @property
    def missing(self) -> set[int]:
        """Those who have not reported yet."""
        return self._participants - self._reported


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
    peers: tuple[int, ...] = ()


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
