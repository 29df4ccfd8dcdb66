"""References in transit: which of them to ask their receivers for, and when. No threads, no clock: times come in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from gradwire.rpc.codec import TransferStatus

_LOOKS_PER_ASK: Final = 5  # how often, at most, all references are looked through before one is overdue
_NEVER: Final = float("inf")


@dataclass(slots=True)
class _Transit:
    asked_at: float  # when it was sent, or when its receiver was last asked for it or for another one of its message
    status: TransferStatus | None = None  # of the message that it is in, if that is known

    @property
    def is_in_call(self) -> bool:
        """Whether the call that carries it is in progress: it may still have to leave, or wait behind something large."""
        return self.status is not None and self.status.call_id != 0


class Transits:
    """The references that one worker has sent and that have not been accepted.

    A message that carries many references may take long to pack, send and unpack, above all on a busy machine, and to ask
    for each of them meanwhile would make it take longer still. They arrive in order, so only the last one is asked for: the
    probe of the message. When the probe has arrived or is lost, the references that are left are asked for one by one.
    """

    def __init__(self) -> None:
        self._transits: dict[int, _Transit] = {}  # by fork
        self._probes: dict[TransferStatus, int] = {}  # forks; by message, as long as references in it are in transit
        self._looked_at = -_NEVER

    def __len__(self) -> int:
        return len(self._transits)

    def add(self, fork_id: int, status: TransferStatus, now: float) -> None:
        self._transits[fork_id] = _Transit(now, status)

    def discard(self, fork_id: int) -> None:
        self._transits.pop(fork_id, None)

    def next_look(self, ask_s: float) -> float:
        """Return the earliest time for the next look: it takes long if there are many references."""
        return self._looked_at + ask_s / _LOOKS_PER_ASK

    def look(self, fork_ids: Iterable[int], now: float, ask_s: float) -> tuple[list[int], float]:
        """Look through the references in transit.

        Args:
            fork_ids: Those that are in transit. One that was not added is to a worker that is back, and is new now.
            now: The time.
            ask_s: How long one may stay unaccepted before its receiver is asked.

        Returns:
            The references to ask for, and when the next may be overdue.
        """
        self._looked_at = now
        self._transits = {fork_id: self._transits.get(fork_id) or _Transit(now) for fork_id in fork_ids}
        overdue = {fork_id: item for fork_id, item in self._transits.items() if item.asked_at <= now - ask_s}
        asked = self._ask_for({fork_id: item.status for fork_id, item in overdue.items() if not item.is_in_call})
        for item in overdue.values():
            item.asked_at = now
        return asked, min((item.asked_at for item in self._transits.values()), default=_NEVER) + ask_s

    def _ask_for(self, overdue: dict[int, TransferStatus | None]) -> list[int]:
        messages = {item.status for item in self._transits.values()}
        self._probes = {status: fork_id for status, fork_id in self._probes.items() if status in messages}
        probed = {status for status, fork_id in self._probes.items() if fork_id not in self._transits}
        last = {status: fork_id for fork_id, status in overdue.items() if status is not None and status not in probed}
        self._probes.update(last)
        return [
            fork_id
            for fork_id, status in overdue.items()
            if status is None or status in probed or last[status] == fork_id
        ]
