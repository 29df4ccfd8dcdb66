"""The runner tells what happens in its ranks, and a few of PyTorch's tests of each kind pass on gradwire.

All of them: ``make conformance``. Here the runner is a program of its own: it forks, and this process has threads.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from conformance.expected import LIMITS, OPEN, reason_of
from conformance.report import Verdict, judge
from conformance.running import Outcome, Result
from conformance.suites import FAKES, SUITES

TESTS = Path(__file__).parents[1]
REPRESENTATIVE = (
    "DistAutogradTest.test_backward_multiple_round_trips",
    "DistAutogradTest.test_graph_for_py_nested_call",
    "DistAutogradTest.test_post_hooks",
    "DistAutogradTest.test_trainer_ps",
    "TensorPipeAgentDistAutogradTest.test_backward_rref_nested_sparse",
    "DistOptimizerTest.test_dist_optim",
    "RpcTest.test_async_function_chained_remote",
    "RpcTest.test_duplicate_name_2",
    "RpcTest.test_profiler_remote_events_profiled",
    "RpcTest.test_rref_context_debug_info",
    "TensorPipeAgentRpcTest.test_infer_backend_from_options",
    "ParameterServerTest.test_batch_updating_parameter_server",
    "RemoteModuleTest.test_remote_parameters",
    "DdpUnderDistAutogradTest.test_backward_ddp_outside_uneven_inputs",
    "DdpComparisonTest.test_ddp_comparison",
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the runner: exit code, output, and the tests by name."""

    code: int
    text: str
    results: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The fake suite and the representative tests, after one import."""
    results = tmp_path_factory.mktemp("conformance") / "results.json"
    suites = [word for suite in (FAKES, *SUITES) for word in ("--suite", suite)]
    pattern = "|".join(["^FakeTest", *(rf"^{re.escape(name)}$" for name in REPRESENTATIVE)])
    options = ["--json", str(results), "--limit", "40", "--jobs", "2", "-k", pattern, *suites]
    done = subprocess.run(
        [sys.executable, "-m", "conformance", *options],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert results.exists(), done.stdout + done.stderr
    return Run(done.returncode, done.stdout, {row["case"]: row for row in json.loads(results.read_text())})


@pytest.mark.slow
def test_the_runner_reports_what_its_ranks_do(run: Run) -> None:
    fakes = {name.removeprefix("FakeTest.test_"): row for name, row in run.results.items() if "FakeTest" in name}
    assert {name: row["outcome"] for name, row in fakes.items()} == {
        "passes": "passed",
        "fails": "failed",
        "hangs": "timed out",
        "crashes": "failed",
        "is_skipped": "skipped",
    }
    assert run.code == 1
    assert re.search(r"rank 1:.*AssertionError: on purpose", fakes["fails"]["detail"], re.DOTALL)
    assert "rank 2 did not end" in fakes["hangs"]["detail"]
    assert "in test_hangs" in fakes["hangs"]["detail"], "where its threads were"
    assert "code -11" in fakes["crashes"]["detail"]
    assert "on purpose" in run.text


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_few_of_each_suite_pass(run: Run, name: str) -> None:
    assert run.results[name]["verdict"] == "passed", run.results[name]["detail"]


@pytest.mark.parametrize(
    ("outcome", "listed", "verdict"),
    [
        (Outcome.PASSED, False, Verdict.PASSED),
        (Outcome.SKIPPED, False, Verdict.SKIPPED),
        (Outcome.FAILED, False, Verdict.FAILED),
        (Outcome.TIMED_OUT, False, Verdict.FAILED),
        (Outcome.FAILED, True, Verdict.LIMIT),
        (Outcome.PASSED, True, Verdict.STALE),
    ],
)
def test_a_result_is_held_against_the_list(outcome: Outcome, listed: bool, verdict: Verdict) -> None:
    name = next(iter(LIMITS)) if listed else "RpcTest.test_of_nobody"
    assert judge(Result(name, outcome, 1.0)) is verdict
    assert verdict.is_unexpected == (verdict in (Verdict.FAILED, Verdict.STALE))


def test_every_expected_failure_has_a_reason_and_few_are_open() -> None:
    assert LIMITS.keys().isdisjoint(OPEN)
    assert len(OPEN) < 10
    for name in [*LIMITS, *OPEN]:
        assert len(reason_of(name) or "") > 20, name
