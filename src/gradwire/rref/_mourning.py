"""When a dead worker's references may be forgotten. Pure: events in, messages out.

owner A: B is dead -- Mourn(B) --> every other worker; each answers EndSeen(B) once it has noticed the end, too, and
whatever B had sent it is listed. If one of them dies before, what it got may have gone on: its end is to be seen as well.
"""

from __future__ import annotations

from collections.abc import Collection

from gradwire.rref._actions import EndSeen, Mourn, Worker


class Mourning:
    """The dead, as one worker knows them.

    Attributes:
        ended: Workers that are dead.
    """

    def __init__(self) -> None:
        self.ended: set[Worker] = set()
        self._mourned: dict[Worker, set[tuple[Worker, Worker]]] = {}  # by dead worker: who has not seen whose end yet
        self._rounds: dict[
            Worker, int
        ] = {}  # by dead worker: how often we asked; answers to earlier rounds do not count
        self._mourners: dict[Worker, dict[Worker, int]] = {}  # by worker: who wants to hear when we have seen its end

    def lost(self, worker: Worker, others: Collection[Worker], is_concerned: bool) -> list[Mourn]:
        """A worker died; `is_concerned` if it held something of ours, or something was on its way to it."""
        self.ended.add(worker)
        alive = set(others) - self.ended
        asked = {(other, worker) for other in alive}
        is_asked = is_concerned
        for waiting in self._mourned.values():
            late = {pair for pair in waiting if pair[0] == worker}
            if late:
                waiting -= late
                waiting |= asked
                is_asked = True
        if is_concerned:
            self._mourned[worker] = asked
        if not is_asked:
            return []
        self._rounds[worker] = self._rounds.get(worker, 0) + 1
        return [Mourn(other, worker, self._rounds[worker]) for other in sorted(alive)]

    def seen(self, by: Worker, dead: Worker, round_: int) -> None:
        """Another worker has seen the end of a dead one, and whatever it got from that one is listed."""
        if self._rounds.get(dead) == round_:
            for waiting in self._mourned.values():
                waiting.discard((by, dead))

    def take_over(self) -> list[Worker]:
        """The dead whom nobody can have got anything from that is not listed."""
        over = [worker for worker, waiting in self._mourned.items() if not waiting]
        for worker in over:
            del self._mourned[worker]
        return over

    def asked(self, by: Worker, dead: Worker, round_: int) -> None:
        """Somebody wants to be told when we have seen the end of a worker."""
        self._mourners.setdefault(dead, {})[by] = round_

    def tell(self, dead: Worker) -> list[EndSeen]:
        """We have seen the end of a worker, and whatever it sent us is listed."""
        return [EndSeen(by, dead, round_) for by, round_ in self._mourners.pop(dead, {}).items()]
