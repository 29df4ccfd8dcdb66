"""What the page keeps: the log of the driver, and the clocks of workers."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator

import pytest

from gradwire.dashboard.collector import Clocks, Collector
from gradwire.observe.clock import ClockOffset
from gradwire.rpc.agent import Agent

MakeAgents = Callable[..., list[Agent]]


@pytest.fixture
def collector(make_agents: MakeAgents) -> Iterator[Collector]:
    (a,) = make_agents(1, "inproc")
    collector = Collector(a, "train-1", list)
    yield collector
    collector.close()


class Large:
    """An argument that should not be kept."""

    def __str__(self) -> str:
        return "large"


def test_the_log_keeps_texts_and_neither_arguments_nor_frames(collector: Collector) -> None:
    argument, in_frame = Large(), Large()

    def fail(held: Large) -> None:
        raise ValueError

    try:
        fail(in_frame)
    except ValueError as error:
        record = logging.LogRecord("gradwire.x", logging.ERROR, "x.py", 1, "%s\x1b", (argument,), None)
        record.exc_info = (ValueError, error, error.__traceback__)
        collector._log.handle(record)
    references = [weakref.ref(argument), weakref.ref(in_frame)]
    del argument, in_frame, record
    gc.collect()
    assert [item() for item in references] == [None, None]
    (problem,) = collector.collect().parts["errors"]
    assert (problem["worker"], problem["text"], problem["level"]) == ("a", "large\\x1b", "error")


def test_a_record_whose_arguments_do_not_fit_is_left_out(
    collector: Collector, capsys: pytest.CaptureFixture[str]
) -> None:
    for args in (("x",), (1,)):
        collector._log.handle(logging.LogRecord("gradwire.x", logging.WARNING, "x.py", 1, "%d things", args, None))
    assert [item["text"] for item in collector.collect().parts["errors"]] == ["1 things"]
    assert "Logging error" in capsys.readouterr().err


S = 10**9


@pytest.mark.parametrize(
    ("later", "pid", "expected_ns"),
    [
        (ClockOffset(2 * S, 7, 900), 1, 7),  # better
        (ClockOffset(2 * S, 7, 2_000_000), 1, 5),  # worse
        (ClockOffset(100 * S, 7, 2_000_000), 1, 7),  # worse, but the other one is old
        (ClockOffset(2 * S, 7, 2_000_000), 2, 7),  # another process
    ],
)
def test_the_best_measurement_of_a_clock_counts_until_it_is_old(later: ClockOffset, pid: int, expected_ns: int) -> None:
    clocks = Clocks()
    clocks.add("b", 1, ClockOffset(1 * S, 5, 1000))
    clocks.add("b", pid, later)
    assert clocks.offsets_ns() == {"b": expected_ns}
