"""Numbers as metrics of Prometheus."""

from __future__ import annotations

import math
import re

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conftest import MakeAgents
from gradwire.telemetry.measurements import BUCKETS_S, Counter, Histogram, Traffic, WorkerNumbers
from gradwire.telemetry.metrics import MetricsCollector, Scraped

_NAME = 'f"\\'
_COUNTS = (0, 3, *(0 for _ in BUCKETS_S[2:]), 1)
_NUMBERS = WorkerNumbers(
    *(1, 1 << 20, 7, 1, 2, 3, 4, 5, 6),
    (Traffic("driver", 100, 200),),
    (Counter("calls", (_NAME, "ok"), 4), Counter("backward_passes", ("smart", "ok"), 2), Counter("unknown", ("x",), 1)),
    (Histogram("call_duration", (_NAME,), _COUNTS, 2.5), Histogram("call_duration", ("too", "many"), _COUNTS, 2.5)),
)


def samples() -> dict[tuple[str, ...], float]:
    text = MetricsCollector(lambda: [Scraped("w0", _NUMBERS, 1), Scraped("w1", None)]).render().decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_of_a_worker_that_answers_and_of_one_that_does_not() -> None:
    found = {(name, *sorted(labels)): value for (name, *labels), value in samples().items()}

    def value(name: str, *labels: str) -> float:
        return found[(name, *sorted(("w0", *labels)))]

    assert value("gradwire_worker_up") == 1
    assert found["gradwire_worker_up", "w1"] == 0
    assert value("gradwire_worker_restarts_total") == 1
    assert value("gradwire_calls_served_total") == 7
    assert value("gradwire_contexts") == 3
    assert value("gradwire_rrefs", "owned") == 5
    assert value("gradwire_wire_bytes_total", "received", "driver") == 200
    assert value("gradwire_calls_total", _NAME, "ok") == 4
    assert value("gradwire_backward_passes_total", "smart", "ok") == 2
    assert value("gradwire_call_duration_seconds_bucket", _NAME, "0.00025") == 3
    assert value("gradwire_call_duration_seconds_bucket", _NAME, "+Inf") == 4
    assert value("gradwire_call_duration_seconds_sum", _NAME) == 2.5
    assert not any("w1" in key for key in found if not key[0].startswith("gradwire_worker_"))
    assert any(key[0] == "gradwire_build_info" for key in found)


def test_names_follow_the_conventions() -> None:
    families = list(MetricsCollector(lambda: [Scraped("w0", _NUMBERS)]).collect())
    for family in families:
        assert re.fullmatch(r"gradwire_[a-z_]+", family.name)
        assert family.documentation.endswith(".")
    assert len({family.name for family in families}) == len(families)


def test_a_series_that_a_worker_repeats_is_told_once() -> None:
    more = (Traffic("driver", 300, 400),), (Counter("calls", (_NAME, "ok"), 9),), (_NUMBERS.histograms[0],)
    doubled = msgspec.structs.replace(
        _NUMBERS,
        traffic=_NUMBERS.traffic + more[0],
        counters=_NUMBERS.counters + more[1],
        histograms=_NUMBERS.histograms + more[2],
    )
    text = MetricsCollector(lambda: [Scraped("w0", doubled)]).render().decode()
    series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(set(series)) == len(series)
    assert "9.0" in text


@pytest.mark.parametrize("sum_s", [math.inf, math.nan, -1.0])
def test_sums_are_finite(sum_s: float) -> None:
    data = msgspec.to_builtins(Histogram("call_duration", (_NAME,), _COUNTS, sum_s))
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(data, Histogram)


@pytest.mark.parametrize("number", [-1, 1.5, "1"])
def test_numbers_are_checked(make_agents: MakeAgents, number: object) -> None:
    a, b = make_agents(2)
    b.server.register_control("numbers", lambda _: [number, *[0] * 8, [], [], []])
    assert a.ask_all(["b"], "numbers", (), 5.0, WorkerNumbers) == {}
