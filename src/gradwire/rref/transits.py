"""References in transit: which of them to ask their receivers for, and when. No threads, no clock: times come in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gradwire.rpc.codec import TransferStatus

_SCANS_PER_ASK: Final = 5  # how often, at most, all references are looked through before one is overdue
_NEVER: Final = float("inf")


class Transits:
    """The references that one worker has sent and that have not been accepted.

    A message that carries many references may take long to send and unpack, above all on a busy machine, and to ask for each
    of them meanwhile would make it take longer still. They arrive in order, so only the last one is asked for: the probe of
    the message. When the probe has arrived or is lost, each of the references that are left is asked for.
    """

    def __init__(self) -> None:
        self._messages: dict[int, TransferStatus] = {}  # by fork, in the order in which they were sent
        # By message, as long as references in it are in transit:
        self._asked_at: dict[TransferStatus, float] = {}  # when its last reference was added, or its receiver was asked
        self._probes: dict[TransferStatus, int] = {}  # forks
        self._scanned_at = -_NEVER

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, fork_id: int, message: TransferStatus, now: float) -> None:
        self._messages[fork_id] = message
        self._asked_at[message] = now

    def discard(self, fork_id: int) -> None:
        self._messages.pop(fork_id, None)

    def next_scan(self, ask_s: float) -> float:
        """Return the earliest time for the next scan: it takes long if there are many references."""
        return self._scanned_at + ask_s / _SCANS_PER_ASK

    def scan(self, fork_ids: Iterable[int], now: float, ask_s: float) -> tuple[list[int], float]:
        """Look through the references in transit.

        Args:
            fork_ids: Those that are still in transit; each of them was added.
            now: The time.
            ask_s: How long they may stay unaccepted before their receiver is asked.

        Returns:
            The references to ask for, and when the next may be overdue.
        """
        self._scanned_at = now
        self._messages = {fork_id: self._messages[fork_id] for fork_id in fork_ids}
        last = {message: fork_id for fork_id, message in self._messages.items()}
        self._asked_at = {message: self._asked_at[message] for message in last}
        self._probes = {message: probe for message, probe in self._probes.items() if message in last}
        overdue = [message for message, asked_at in self._asked_at.items() if asked_at <= now - ask_s]
        self._asked_at.update(dict.fromkeys(overdue, now))
        next_overdue = min(self._asked_at.values(), default=_NEVER) + ask_s
        # While its call is in progress, a message may still have to leave, or wait behind something large.
        overdue = [message for message in overdue if message.call_id == 0]
        probed = {message for message in overdue if self._probes.get(message, last[message]) not in self._messages}
        self._probes.update((message, last[message]) for message in overdue if message not in probed)
        asked = [last[message] for message in overdue if message not in probed]
        if probed:
            asked += [fork_id for fork_id, message in self._messages.items() if message in probed]
        return asked, next_overdue
