"""The list of errors on the page."""

from __future__ import annotations

import pytest

from gradwire.dashboard.problems import Problems, describe_failure
from gradwire.observe.events import Event


def test_the_same_problem_counts_and_moves_to_the_front() -> None:
    problems = Problems()
    problems.add("worker0", "run", "f: ValueError", 1.0)
    problems.add("worker1", "worker", "lost: killed by SIGKILL", 2.0)
    problems.add("worker0", "run", "f: ValueError", 3.0)
    first, second = problems.as_data()
    assert (first["worker"], first["count"], first["first_at"], first["last_at"]) == ("worker0", 2, 1.0, 3.0)
    assert (second["text"], second["count"]) == ("lost: killed by SIGKILL", 1)


def test_number_and_length_are_bounded() -> None:
    problems = Problems()
    for number in range(1000):
        problems.add("worker0", "run", f"{number}: " + "x" * 10_000, 1.0)
    found = problems.as_data()
    assert len(found) == 100
    assert max(len(item["text"]) for item in found) == 2000
    assert found[0]["text"].startswith("999:")


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Event("connection", "end", "a", 0, 0, peer="b", outcome="ConnectionLost"), "connection to b lost"),
        (Event("connection", "end", "a", 0, 0, peer="b", outcome="DecodeError"), "connection to b lost: DecodeError"),
        (Event("call", "m:f", "a", 0, 0, peer="b", outcome="WorkerLost"), "call m:f on b failed: WorkerLost"),
        (Event("run", "m:f", "b", 0, 0, peer="a", outcome="ValueError"), "run m:f for a failed: ValueError"),
        (Event("backward", "smart", "a", 0, 0, outcome="BackwardFailed"), "backward smart failed: BackwardFailed"),
    ],
)
def test_failures_are_described_for_people(event: Event, text: str) -> None:
    assert f"{event.kind} {describe_failure(event)}" == text
