"""How findings are judged, at the limits; and that all checks run here."""

from __future__ import annotations

import re
import resource
import signal
from importlib.metadata import metadata

import pytest

from gradwire.cli import doctor
from gradwire.cli.doctor import Finding

_NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("finding", "level", "text"),
    [
        (doctor.judge_open_files(1024, 4096), "warn", "ulimit -n 4096"),
        (doctor.judge_open_files(1024, _NO_LIMIT), "warn", "ulimit -n 65536"),
        (doctor.judge_open_files(1024, 1024), "warn", "administrator"),
        (doctor.judge_open_files(4096, 4096), "ok", "up to 4,096"),
        (doctor.judge_open_files(_NO_LIMIT, _NO_LIMIT), "ok", "no limit"),
        (doctor.judge_tasks({}), "ok", "no limit"),
        (doctor.judge_tasks({"threads-max": 100_000, "cgroup": 100}), "warn", "100 processes and threads (cgroup)"),
        (doctor.judge_tasks({"threads-max": 100_000}), "ok", "100,000"),
        (doctor.judge_processors(64, 64, None, None), "ok", "64 of 64"),
        (doctor.judge_processors(64, 64, 2.5, None), "warn", "OMP_NUM_THREADS=2"),
        (doctor.judge_processors(64, 64, 2.5, "2"), "ok", "2.5"),
        (doctor.judge_processors(64, 1, None, None), "warn", "take turns"),
        (doctor.judge_memory(1 << 30, 64 << 30), "warn", "1.0 GiB (cgroup limit)"),
        (doctor.judge_memory(None, 64 << 30), "ok", "64.0 GiB"),
        (doctor.judge_shm(64 << 20, True), "warn", "--shm-size"),
        (doctor.judge_shm(1 << 30, True), "ok", "1,024 MiB"),
        (doctor.judge_shm(1 << 30, False), "warn", "not writable"),
        (doctor.judge_ports(32_768, 60_999), "ok", "32768 to 60999"),
        (doctor.judge_ports(50_000, 50_100), "warn", "only 101"),
        (doctor.judge_host("node1", ["127.0.1.1"]), "warn", "others cannot use it"),
        (doctor.judge_host("node1", ["10.0.0.4", "127.0.1.1"]), "ok", "10.0.0.4"),
        (doctor.judge_python(("3", "9", "1"), "python"), "fail", "3.10"),
        (doctor.judge_python(("3", "14", "0"), "python"), "ok", "3.14.0"),
        (doctor.judge_package("torch", None, (2, 8)), "fail", "pip install 'torch>=2.8'"),
        (doctor.judge_package("torch", "2.7.1+cpu", (2, 8)), "fail", "needs 2.8"),
        (doctor.judge_package("torch", "2.13.0+cpu", (2, 8)), "ok", "2.13.0+cpu"),
        (doctor.judge_package("torch", "10.0a1", (2, 8)), "ok", "10.0a1"),
        (doctor.judge_interrupt(signal.SIG_IGN), "warn", "ignored"),
        (doctor.judge_interrupt(signal.default_int_handler), "ok", "KeyboardInterrupt"),
        (doctor.judge_clock(0.0, 0), "fail", "1970-01-01"),
        (doctor.judge_clock(1_800_000_000.0, 5), "warn", "not synchronized"),
        (doctor.judge_clock(1_800_000_000.0, 0), "ok", "2027-01-15"),
    ],
)
def test_findings_are_judged_and_have_a_next_step(finding: Finding, level: str, text: str) -> None:
    assert finding.level == level
    assert text in f"{finding.detail} {finding.next_step}"
    assert bool(finding.next_step) == (level != "ok")


def test_every_extra_is_listed() -> None:
    listed = set(re.findall(r"\[(\w+)\]", " ".join(doctor._OPTIONAL.values())))
    assert listed == set(metadata("gradwire").get_all("Provides-Extra") or ()) - {"all", "dev", "docs", "release"}


def test_a_wrong_gradient_fails_and_a_slow_call_warns() -> None:
    start, call, gradient = doctor.judge_self_test(1.5, 2000.0, False, 1e-3)
    assert (start.level, call.level, gradient.level) == ("ok", "warn", "fail")
    assert "1.0e-03" in gradient.detail
    assert {item.level for item in doctor.judge_self_test(1.5, 40.0, True, 0.0)} == {"ok"}


def test_all_checks_run_here() -> None:
    found = list(doctor.run_checks(with_self_test=False))
    assert [item for item in found if item.level == "fail"] == []
    assert [item for item in found if item.section == "Other"] == []
    assert {"memfd", "pidfd", "open files", "processors", "/dev/shm", "torch", "clock"} <= {item.name for item in found}


def test_a_feature_that_is_missing_fails_with_a_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.pidfd_open")
    found = {item.name: item for item in doctor.run_checks(with_self_test=False)}
    assert found["pidfd"].level == "fail"
    assert "Linux 5.3" in found["pidfd"].next_step


def test_a_check_that_cannot_be_made_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", None)
    other = [item for item in doctor.run_checks(with_self_test=False) if item.section == "Other"]
    assert [item.level for item in other] == ["warn"]


def test_the_last_line_counts() -> None:
    assert doctor.summarize(30, 0, 0) == "30 checks: gradwire works here."
    assert doctor.summarize(30, 0, 1) == "30 checks, 1 warning: gradwire works here."
    assert doctor.summarize(30, 2, 1) == "30 checks, 2 failed, 1 warning: gradwire does not work here."
