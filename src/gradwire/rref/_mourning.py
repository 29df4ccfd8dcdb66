"""When dead workers' references may be forgotten. Pure: events in, messages out.

owner A: B is dead -- Mourn(B) --> every other worker; each answers EndSeen(B) once it has noticed the end, too, and
whatever B had sent it is listed.

What B sent may have gone on through others that are dead as well, whether A noticed that before or after. So nothing of any
dead worker is forgotten while another one has not seen the end of one of them. A worker that dies before it has answered
need not: its own end is to be seen then.
"""

from __future__ import annotations

from collections.abc import Collection

from gradwire.rref._actions import EndSeen, Mourn, Worker


class Mourning:
    """The dead, as one worker knows them.

    Attributes:
        ended: Workers that are taken for dead.
        mourned: Those of them whose references are still kept, and which: values by fork. What is sent to a worker after
            its end was noticed is not among them: either it never leaves, or that worker is not dead.
    """

    def __init__(self) -> None:
        self.ended: set[Worker] = set()
        self.mourned: dict[Worker, dict[int, int]] = {}
        self._unseen: set[tuple[Worker, Worker]] = set()  # (a worker, whose end it has not seen yet)
        self._rounds: dict[Worker, int] = {}  # by dead worker: how often it died; answers to earlier times do not count
        self._mourners: dict[Worker, dict[Worker, int]] = {}  # by worker: those that wait for us to see its end

    def lost(self, worker: Worker, others: Collection[Worker], kept: dict[int, int], is_concerned: bool) -> list[Mourn]:
        """A worker died; `is_concerned` if anything is shared that it, or others through it, might have."""
        self.ended.add(worker)
        has_owed = any(by == worker for by, _ in self._unseen)
        self._unseen = {pair for pair in self._unseen if pair[0] != worker}
        if not (is_concerned or has_owed):
            return []
        self.mourned[worker] = kept
        self._rounds[worker] = self._rounds.get(worker, 0) + 1
        return self._ask(sorted(set(others) - self.ended), [worker])

    def returned(self, worker: Worker) -> list[Mourn]:
        """A worker is not dead after all: it keeps what it has, and is asked about those that are."""
        self.ended.discard(worker)
        self.mourned.pop(worker, None)
        self._unseen = {pair for pair in self._unseen if pair[1] != worker}
        return self._ask([worker], sorted(self.mourned))

    def seen(self, by: Worker, dead: Worker, round_: int) -> None:
        """Another worker has seen the end of a dead one, and whatever it got from that one is listed."""
        if self._rounds.get(dead) == round_:
            self._unseen.discard((by, dead))

    def take_over(self) -> dict[Worker, dict[int, int]]:
        """What was kept for each of the dead, once no worker can have got anything from them that is not listed."""
        if self._unseen:
            return {}
        over, self.mourned = self.mourned, {}
        return over

    def asked(self, by: Worker, dead: Worker, round_: int) -> None:
        """Another worker wants to be told when we have seen the end of a worker."""
        mourners = self._mourners.setdefault(dead, {})
        mourners[by] = max(round_, mourners.get(by, 0))

    def tell(self, dead: Worker) -> list[EndSeen]:
        """We have seen the end of a worker, and whatever it sent us is listed."""
        return [EndSeen(by, dead, round_) for by, round_ in self._mourners.pop(dead, {}).items()]

    def _ask(self, others: Collection[Worker], dead: Collection[Worker]) -> list[Mourn]:
        pairs = [(other, worker) for worker in dead for other in others]
        self._unseen.update(pairs)
        return [Mourn(other, worker, self._rounds[worker]) for other, worker in pairs]
