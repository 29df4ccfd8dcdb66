"""Which steps the page shows, and what belongs to them."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.autograd.worker_views import MessageView, PassView, Shortcut, WaitingView, WorkerView
from gradwire.dashboard.steps import Steps, find_waits
from gradwire.observe import Event

MS = 1_000_000


def views(*, is_waiting: bool = False, sent_ns: int = 0, received_ns: int = 0) -> list[WorkerView]:
    """The driver has sent one message to a worker."""
    waiting = (WaitingView(7, "worker0", "forward", "train.py:8, in step"),) if is_waiting else ()
    passes = (PassView(3, "driver", "smart", "running", waiting=waiting),) if is_waiting else ()
    sends = (MessageView(7, "worker0", "forward", "train.py:8, in step", 1, 64, at_ns=sent_ns),)
    recvs = (MessageView(7, "driver", "forward", at_ns=received_ns),)
    return [
        WorkerView("driver", (0,), num_sends=1, sends=sends, passes=passes),
        WorkerView("worker0", (1,), num_recvs=1, recvs=recvs),
    ]


def span(context_id: int, start_ns: int, end_ns: int, worker: str = "worker0") -> Event:
    return Event("run", "forward", worker, start_ns, end_ns, context_id=context_id, flow_in=(1 << 63,))


def chosen(steps: Steps, context_id: int | None = None) -> dict[str, Any]:
    found = steps.choose(context_id)
    assert found is not None
    return found


def test_the_latest_step_is_shown_until_another_is_chosen() -> None:
    steps = Steps()
    assert steps.choose(None) is None
    for context_id in (1, 2):
        steps.on_step(context_id, "driver", views(), float(context_id), {})
    assert [item["id"] for item in steps.summaries()] == ["2", "1"]
    assert chosen(steps)["id"] == "2"
    assert chosen(steps, 1)["id"] == "1"
    assert steps.choose(3) is None


def test_a_stalled_context_comes_first_until_it_ends() -> None:
    steps = Steps()
    steps.on_open(5, "driver", views(is_waiting=True), 1.0, {})
    steps.on_step(6, "driver", views(), 2.0, {})
    steps.on_contexts([5])
    found = chosen(steps)
    assert (found["id"], found["is_stalled"]) == ("5", True)
    assert found["graph"]["messages"][0]["waits_for"] == "worker0"
    assert [(item["worker"], item["for"], item["function"]) for item in found["waits"]] == [
        ("driver", "worker0", "forward")
    ]
    steps.on_contexts([])
    assert chosen(steps)["id"] == "6"
    assert not chosen(steps, 5)["is_open"]


def test_spans_find_their_step_before_and_after_its_graph() -> None:
    steps = Steps()
    steps.on_events([span(9, 100 * MS, 103 * MS)], 0)
    steps.on_step(9, "driver", views(), 1.0, {})
    steps.on_events([span(9, 90 * MS, 110 * MS, "driver")], 5 * MS)  # its clock is 5 ms behind
    found = chosen(steps)
    assert [(item["worker"], item["start_ms"], item["end_ms"]) for item in found["spans"]] == [
        ("driver", 0.0, 20.0),
        ("worker0", 5.0, 8.0),
    ]
    assert found["spans"][0]["flow_in"] == ["8000000000000000"]
    assert steps.summaries()[0]["duration_s"] == 0.02


def test_without_a_step_the_page_shows_calls_outside_of_contexts() -> None:
    steps = Steps()
    steps.on_events([span(0, MS, 2 * MS)], 0)
    found = chosen(steps)
    assert (found["id"], len(found["spans"])) == (None, 1)


def test_the_time_of_a_message_uses_both_clocks() -> None:
    steps = Steps()
    measured = views(sent_ns=10 * MS, received_ns=4 * MS)
    steps.on_step(1, "driver", measured, 1.0, {"driver": 0, "worker0": 8 * MS})
    steps.on_step(2, "driver", measured, 1.0, {"driver": 0})  # the other clock is not known
    times = [chosen(steps, number)["graph"]["messages"][0]["time_s"] for number in (1, 2)]
    assert times == [0.002, None]


def test_what_is_kept_is_bounded() -> None:
    steps = Steps()
    for context_id in range(1, 1000):
        steps.on_events([span(context_id, number, number + 1) for number in range(10)], 0)
        steps.on_step(context_id, "driver", views(), float(context_id), {})
    steps.on_events([span(999, number, number + 1) for number in range(10_000)], 0)
    steps.on_events([span(0, number, number + 1) for number in range(10_000)], 0)
    assert len(steps.summaries()) == 30
    assert len(steps._spans) <= 300
    assert max(map(len, steps._spans.values())) <= 600
    assert chosen(steps)["id"] == "999"


@pytest.mark.parametrize("is_taken", [True, False])
def test_waits_follow_a_message_that_was_passed_on(is_taken: bool) -> None:
    """The middle worker passed the message on untouched, and the last one may have taken the shortcut."""
    waiting = (WaitingView(7, "middle", "forward", "train.py:8, in step"),)
    found = find_waits(
        [
            WorkerView("driver", passes=(PassView(3, "driver", "smart", "running", waiting=waiting),)),
            WorkerView("middle", passes=(PassView(3, "driver", "smart", "done", offered=(Shortcut(7, 8, "last"),)),)),
            WorkerView(
                "last",
                passes=(PassView(3, "driver", "smart", "running", num_running=1, taken=(8,) if is_taken else ()),),
            ),
        ]
    )
    shown = [(item["worker"], item["kind"], item["for"], item["via"]) for item in found]
    direct, through = (
        [("driver", "waits", "last", "middle")],
        [("driver", "waits", "middle", ""), ("middle", "passes on", "last", "")],
    )
    assert shown == [*(direct if is_taken else through), ("last", "computes", "", "")]
