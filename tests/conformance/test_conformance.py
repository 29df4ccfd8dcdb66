"""The runner tells what happens in its ranks, and a few of PyTorch's tests of each kind pass on gradwire.

All of them: ``make conformance``. Here the runner is a program of its own: it forks, and this process has threads.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import quick_python
from conformance.checkout import load_checkout, to_cpu
from conformance.expected import LIMITS, OPEN, SHARD_LEFT_OUT, SHARD_LIMITS, reason_of
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
    "RpcTest.test_invalid_names",
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


def run_runner(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "conformance", *options]
    return quick_python.run(command, timeout=110, env={**os.environ, "PYTHONPATH": str(TESTS)})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The fake suite and the representative tests, after one import."""
    results = tmp_path_factory.mktemp("conformance") / "results.json"
    suites = [word for suite in (FAKES, *SUITES) for word in ("--suite", suite)]
    pattern = "|".join(["^FakeTest", *(rf"^{re.escape(name)}$" for name in REPRESENTATIVE)])
    options = ["--json", str(results), "--limit", "40", "--jobs", "2", "-k", pattern, *suites]
    done = run_runner(*options)
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
    listed = [*LIMITS, *SHARD_LIMITS, *OPEN]
    assert len({*listed, *SHARD_LEFT_OUT}) == len(listed) + len(SHARD_LEFT_OUT)
    assert len(OPEN) < 10
    for name in listed:
        assert len(reason_of(name) or "") > 20, name


# -- tests of a checkout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = 'rank:0/cuda:0'", "x = 'rank:0/cpu'"),
        ("x = f'rank:{r}/cuda:{r % 2}'", "x = f'rank:{r}/cpu'"),
        ("x = torch.rand(2, device=f'cuda:{self.rank}')", "x = torch.rand(2, device=f'cpu')"),
        ("x = 'cuda:foo'", "x = 'cuda:foo'"),
        ("x = model.cuda(self.rank).t()", "x = model.cpu().t()"),
        ("x = torch.device(1)", "x = torch.device('cpu')"),
        ("f(backend='nccl')", "f(backend='gloo')"),
        ("options.set_device_map('worker1', {0: 1})", "pass"),
    ],
)
def test_gpus_become_the_cpu(source: str, expected: str) -> None:
    assert ast.unparse(to_cpu(source)) == expected


CHECKOUT = """
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.testing._internal.common_distributed import requires_nccl, skip_if_lt_x_gpu
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed._shard.sharded_tensor import ShardedTensorTestBase, with_comms


class TestOnRanks(ShardedTensorTestBase):
    @with_comms
    @skip_if_lt_x_gpu(4)
    @requires_nccl()
    def test_ones(self):
        spec = ChunkShardingSpec(0, [f"rank:{r}/cuda:{r}" for r in range(4)])
        made = sharded_tensor.ones(spec, 8, 2, init_rrefs=True)
        assert type(made).__module__.startswith("gradwire.")
        assert len(made.remote_shards()) == 3
        assert torch.equal(made.local_tensor(), torch.ones(2, 2).cuda(self.rank))

    @with_comms(init_rpc=False)
    def test_fails(self):
        assert self.rank != 2, "on purpose"


class TestAlone(TestCase):
    def test_device(self):
        assert torch.device("cuda:1").type == "cpu"
"""


@pytest.mark.slow
def test_a_checkout_is_run_on_the_cpu(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "distributed" / "_shard"
    folder.mkdir(parents=True)
    (folder / "test_something.py").write_text(CHECKOUT)
    results = tmp_path / "results.json"
    done = run_runner("--pytorch", str(tmp_path), "--json", str(results), "--limit", "40")
    assert results.exists(), done.stdout + done.stderr
    found = {row["case"]: row["outcome"] for row in json.loads(results.read_text())}
    assert found == {
        "TestOnRanks.test_fails": "failed",
        "TestOnRanks.test_ones": "passed",
        "TestAlone.test_device": "passed",
    }, done.stdout
    assert done.returncode == 1
    assert list(folder.rglob("*.pyc")) == []


def test_a_folder_that_is_not_a_checkout_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="point to a checkout of PyTorch's sources"):
        load_checkout(tmp_path)
