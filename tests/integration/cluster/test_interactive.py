"""A cluster in an interactive session, where cells are run again, interrupted and left by exceptions."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from cluster.processes import is_there
from cluster.scripts import Script
from gradwire.testing import wait_until

pytestmark = pytest.mark.slow

_FIRST_CELL = """
import json, operator, signal
_ = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored
from gradwire import Cluster, rpc
def show(*values): print(json.dumps(values), flush=True)
"""


def _run(session: Script, cell: str) -> Any:
    session.enter(cell)
    return json.loads(session.line())


def test_cells_that_run_again_and_are_interrupted(tmp_path: Path) -> None:
    with Script(tmp_path) as session:
        for line in _FIRST_CELL.strip().splitlines():
            session.enter(line)
        start = "cluster = Cluster.local(1)"
        state = (
            "show(cluster is Cluster.current(), cluster.workers[0].pid, cluster.workers[0].call(operator.add, 1, 2))"
        )
        session.enter(start)
        first = _run(session, state)
        session.enter(start)  # the cell runs again: an error that says what to do
        assert _run(session, state) == first == [True, first[1], 3]

        session.enter("cluster = Cluster.local(1, replace=True)")
        second = _run(session, state)
        assert second == [True, second[1], 3]
        assert second[1] != first[1]
        assert not is_there(first[1])

        session.enter("1 / 0")  # an error in a cell leaves the cluster as it is
        assert _run(session, state) == second
        session.enter("rpc.shutdown()")
        assert _run(session, "show(repr(cluster), Cluster.current())") == ["<Cluster closed>", None]
        assert not is_there(second[1])

        session.enter(
            """
            with Cluster.local(1) as cluster:
                show(cluster.workers[0].pid)
                cluster.workers[0].call(exec, "import threading; threading.Event().wait(60)")
            """
        )
        (third,) = json.loads(session.line())
        session.process.send_signal(signal.SIGINT)
        assert _run(session, "show(Cluster.current())") == [None]
        wait_until(lambda: not is_there(third))

        session.enter(start)
        assert _run(session, state)[0] is True
        status, _, errors = session.finish()  # the kernel ends with a cluster open
    assert status == 0
    assert "Cluster.current().close()" in errors
    assert "Cluster.local(..., replace=True)" in errors
    assert errors.count("Traceback") == 3  # the second cluster, the division, the interrupt
