"""Records of gradwire: which worker and context they belong to, and how they look."""

from __future__ import annotations

import io
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

import gradwire as gw
from conftest import MakeAgents
from gradwire.cluster import log_level
from gradwire.errors import ConfigurationError
from gradwire.observe import log
from gradwire.rpc import set_current_agent
from gradwire.testing import wait_until

_log = log.get_logger("gradwire.tests.records")


@pytest.fixture(autouse=True)
def _unchanged_logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(log_level, "_of_workers", None)
    logger = logging.getLogger("gradwire")
    before = logger.level, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


def test_records_have_worker_and_context(make_agents: MakeAgents, caplog: pytest.LogCaptureFixture) -> None:
    a, _ = make_agents(2)
    set_current_agent(a)
    try:
        with gw.autograd.context() as context_id:
            gw.rpc.rpc_sync("b", _warn, args=("inside",))
            _log.warning("here")
        a.call("b", _warn, ("outside",))
    finally:
        set_current_agent(None)
    _log.warning("elsewhere")
    found = {record.message: (record.worker, record.context_id) for record in caplog.records}  # type: ignore[attr-defined]
    assert found == {
        "inside": ("b", context_id),
        "here": ("a", context_id),
        "outside": ("b", 0),
        "elsewhere": ("", 0),
    }


def _warn(text: str) -> None:
    _log.warning(text)


def test_every_logger_of_gradwire_marks_its_records() -> None:
    known = logging.root.manager.loggerDict
    made = {name: item for name, item in known.items() if isinstance(item, logging.Logger)}
    unmarked = [name for name, item in made.items() if name.startswith("gradwire") and log._marker not in item.filters]
    assert not unmarked
    assert "gradwire.rpc.server" in made


def test_lines_name_worker_level_and_context() -> None:
    record = logging.makeLogRecord({"name": "gradwire.rpc", "levelname": "WARNING", "msg": "x %d", "args": (1,)})
    assert log.WorkerFormatter().format(record) == "WARNING gradwire.rpc: x 1", "of another library's logger"
    record.worker, record.context_id = "w0", 77
    assert log.WorkerFormatter().format(record) == "w0 WARNING gradwire.rpc (context 77): x 1"
    assert log.WorkerFormatter(shows_worker=False).format(record) == "WARNING gradwire.rpc (context 77): x 1"


def test_set_log_level_shows_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    _log.info("too early")
    gw.set_log_level("info")
    gw.set_log_level("INFO")  # type: ignore[arg-type]
    _log.info("shown")
    _log.debug("not shown")
    assert sys.stderr.getvalue() == "INFO gradwire.tests.records: shown\n"
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()])
    _log.info("left to the program")
    assert "left" not in sys.stderr.getvalue()


@pytest.mark.parametrize("level", ["loud", 0, 51, True, None, 2.5])
def test_levels_that_do_not_exist(level: object) -> None:
    with pytest.raises(ConfigurationError, match="a log level must be one of debug, info, warning, error, critical"):
        gw.set_log_level(level)  # type: ignore[arg-type]


def test_threads_of_a_worker_know_it(make_agents: MakeAgents) -> None:
    (agent,) = make_agents(1)
    found: list[str] = []
    agent.reactor.run_soon(lambda: found.append(log.thread.worker))
    wait_until(lambda: found == ["a"], 10.0, "the thread's worker")
    assert log.thread.worker == ""
    assert threading.current_thread() is threading.main_thread()
