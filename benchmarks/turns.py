"""One driver process for each system, and only one of them awake at a time.

torch's shared-memory transport polls: measured idle, its driver and its server each use a whole core. A system
measured beside it would be measured on a machine without free cores, so a system's processes, with all below them, are
stopped (SIGSTOP) while it is not its turn.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from peers import CONTEXT, PEERS
from processes import signal_all, with_descendants

CALL_TIMEOUT_S = 120.0
CLOSE_TIMEOUT_S = 30.0


class SystemFailed(Exception):
    """A system could not be started, or a round raised; carries the driver's traceback."""


class Driver:
    """The orchestrator's handle on one system: runs functions ``f(peer, ...)`` in its driver process."""

    def __init__(self, peer_name: str) -> None:
        self.name = peer_name
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_drive, args=(peer_name, theirs))
        self._process.start()
        theirs.close()
        self._pids = [self._process.pid]
        try:
            self._pids[:0] = self._result(CALL_TIMEOUT_S)  # servers wake first
        except SystemFailed:
            self.close()
            raise
        self._signal_all(signal.SIGSTOP)

    def run(self, function: Any, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Wakes the system, runs the function there, and stops the system again.

        Raises:
            SystemFailed: It raised, or gave no answer in time.
        """
        self._signal_all(signal.SIGCONT)
        try:
            self._pipe.send((function, args))
            return self._result(timeout_s)
        except OSError as error:
            raise SystemFailed(f"{self.name}: its driver process ended") from error
        finally:
            self._signal_all(signal.SIGSTOP)

    def close(self) -> None:
        """Ends both processes: in good order if they can, by force if not."""
        self._signal_all(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(CLOSE_TIMEOUT_S)
        if self._process.is_alive():
            self._signal_all(signal.SIGKILL)
            self._process.join(CLOSE_TIMEOUT_S)
        self._pids.clear()  # from here on the numbers may belong to others
        self._pipe.close()

    def _result(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise SystemFailed(f"{self.name}: no answer within {timeout_s:.0f} s")
            is_ok, value = self._pipe.recv()
        except EOFError as error:
            raise SystemFailed(f"{self.name}: its driver process ended") from error
        if not is_ok:
            raise SystemFailed(f"{self.name}: {value}")
        return value

    def _signal_all(self, number: signal.Signals) -> None:
        signal_all(with_descendants(self._pids), number)


class Systems:
    """Starts systems as they are needed, lets them take turns, and remembers which failed."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self._drivers: dict[str, Driver] = {}

    def run(self, name: str, function: Any, *args: Any) -> Any:
        """Return the function's result on that system, or None if the system is out."""
        if name in self.failures:
            return None
        try:
            if name not in self._drivers:
                self._drivers[name] = Driver(name)
            return self._drivers[name].run(function, *args)
        except SystemFailed as failure:
            self.failures[name] = str(failure)
            return None

    def take_turns(
        self, names: Sequence[str], num_rounds: int, run_round: Callable[[str, int], Any]
    ) -> dict[str, list[Any]]:
        """Return the results of the rounds by system; every other round in reverse, so that a drift hits all alike.

        Args:
            names: The systems.
            num_rounds: How often each has its turn.
            run_round: Is given a system and the number of the round; None is left out.
        """
        rounds: dict[str, list[Any]] = {name: [] for name in names}
        for number in range(num_rounds):
            for name in names[:: -1 if number % 2 else 1]:
                if (result := run_round(name, number)) is not None:
                    rounds[name].append(result)
        return rounds

    def close(self) -> None:
        for driver in self._drivers.values():
            driver.close()


def _drive(peer_name: str, pipe: Connection) -> None:
    peer = PEERS[peer_name]()
    try:
        peer.start()
        pipe.send((True, [server.pid for server in peer.servers]))
        while command := pipe.recv():
            function, args = command
            pipe.send((True, function(peer, *args)))
        peer.close()
    except EOFError:
        peer.close()  # the orchestrator is gone
    except Exception:
        pipe.send((False, traceback.format_exc()))
