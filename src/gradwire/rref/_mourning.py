"""When dead workers' references may be forgotten. Pure: events in, messages out.

owner A: B is dead -- Mourn(B) --> every other worker; each answers EndSeen(B) once it has noticed the end, too, and
whatever B had sent it is listed.

What B got rid of may have gone on through others that died as well, before or after it, in the eyes of A. Nothing of any dead
worker is therefore forgotten while anybody has not seen the end of one of them. Who dies before it has answered need not:
its own end is to be seen then.
"""

from __future__ import annotations

from collections.abc import Collection

from gradwire.rref._actions import EndSeen, Mourn, Worker


class Mourning:
    """The dead, as one worker knows them.

    Attributes:
        ended: Workers that are dead.
        mourned: Those of them whose references are still kept.
    """

    def __init__(self) -> None:
        self.ended: set[Worker] = set()
        self.mourned: set[Worker] = set()
        self._unseen: set[tuple[Worker, Worker]] = set()  # who has not seen whose end yet
        self._rounds: dict[Worker, int] = {}  # by dead worker: how often it died; answers to earlier times do not count
        self._mourners: dict[Worker, dict[Worker, int]] = {}  # by worker: who wants to hear when we have seen its end

    def lost(self, worker: Worker, others: Collection[Worker], is_concerned: bool) -> list[Mourn]:
        """A worker died; `is_concerned` if anything is shared that it, or others through it, might have."""
        self.ended.add(worker)
        has_owed = any(by == worker for by, _ in self._unseen)
        self._unseen = {pair for pair in self._unseen if pair[0] != worker}
        if not (is_concerned or has_owed):
            return []
        self.mourned.add(worker)
        self._rounds[worker] = self._rounds.get(worker, 0) + 1
        return self._ask(sorted(set(others) - self.ended), [worker])

    def returned(self, worker: Worker) -> list[Mourn]:
        """A worker is not dead after all: it keeps what it has, and is asked about those who are."""
        self.ended.discard(worker)
        self.mourned.discard(worker)
        self._unseen = {pair for pair in self._unseen if pair[1] != worker}
        return self._ask([worker], sorted(self.mourned))

    def seen(self, by: Worker, dead: Worker, round_: int) -> None:
        """Another worker has seen the end of a dead one, and whatever it got from that one is listed."""
        if self._rounds.get(dead) == round_:
            self._unseen.discard((by, dead))

    def take_over(self) -> list[Worker]:
        """The dead whom nobody can have got anything from that is not listed."""
        if self._unseen:
            return []
        over = sorted(self.mourned)
        self.mourned.clear()
        return over

    def asked(self, by: Worker, dead: Worker, round_: int) -> None:
        """Somebody wants to be told when we have seen the end of a worker."""
        self._mourners.setdefault(dead, {})[by] = round_

    def tell(self, dead: Worker) -> list[EndSeen]:
        """We have seen the end of a worker, and whatever it sent us is listed."""
        return [EndSeen(by, dead, round_) for by, round_ in self._mourners.pop(dead, {}).items()]

    def _ask(self, others: Collection[Worker], dead: Collection[Worker]) -> list[Mourn]:
        pairs = [(other, worker) for worker in dead for other in others]
        self._unseen.update(pairs)
        return [Mourn(other, worker, self._rounds[worker]) for other, worker in pairs]
