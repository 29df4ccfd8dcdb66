"""Which of PyTorch's tests are run, and how they are found in the installed torch.

A suite is a class of test methods that expects two things from whoever mixes it: an agent's fixture (options, error texts)
and a test case with ``rank`` and ``file_name``. torch's own test programs mix in its fixture and its multi-process test
case; here it is the same fixture and a plain test case, whose ranks are forked by `conformance.running`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import unittest
from dataclasses import dataclass
from typing import Any

_TORCH = "torch.testing._internal.distributed"
_FIXTURE = f"{_TORCH}.rpc.tensorpipe_rpc_agent_test_fixture"

SUITES = (
    f"{_TORCH}.rpc.dist_autograd_test:DistAutogradTest",
    f"{_TORCH}.rpc.dist_autograd_test:TensorPipeAgentDistAutogradTest",
    f"{_TORCH}.rpc.dist_optimizer_test:DistOptimizerTest",
    f"{_TORCH}.rpc.rpc_test:RpcTest",
    f"{_TORCH}.rpc.rpc_test:TensorPipeAgentRpcTest",
    f"{_TORCH}.rpc.examples.parameter_server_test:ParameterServerTest",
    f"{_TORCH}.rpc.examples.reinforcement_learning_rpc_test:ReinforcementLearningRpcTest",
    f"{_TORCH}.nn.api.remote_module_test:RemoteModuleTest",
    f"{_TORCH}.nn.api.remote_module_test:ThreeWorkersRemoteModuleTest",
    f"{_TORCH}.ddp_under_dist_autograd_test:DdpUnderDistAutogradTest",
    f"{_TORCH}.ddp_under_dist_autograd_test:DdpComparisonTest",
)
"""The suites in scope, as ``module:class``."""

LEFT_OUT = ("script", "jit", "cuda", "gpu")
"""TorchScript and GPUs are no part of gradwire yet: tests with these words in their name are not run."""


_kept: list[Any] = []  # process groups of this rank

FAKES = "conformance.fakes:FakeTest"
"""Shows what the runner does with tests that go wrong."""


@dataclass(frozen=True, slots=True)
class Case:
    """One test of one suite."""

    suite: type
    method: str

    @property
    def name(self) -> str:
        """As in ``RpcTest.test_add``."""
        return f"{self.suite.__name__}.{self.method}"


def load_cases(sources: tuple[str, ...] = SUITES) -> list[Case]:
    """Imports the suites and lists their tests, by suite and name."""
    cases = []
    for source in sources:
        suite = _load_suite(source)
        cases += [case for case in cases_of(suite) if not _is_left_out(case.method)]
    return cases


def cases_of(suite: type) -> list[Case]:
    """All tests of a suite, by name."""
    return [Case(suite, method) for method in unittest.TestLoader().getTestCaseNames(suite)]


def _is_left_out(method: str) -> bool:
    return any(word in method for word in LEFT_OUT)


def _load_suite(source: str) -> type:
    """The suite, mixed with the fixture and a test case. It is importable: tests send themselves to other ranks."""
    stand_in_for_expecttest()
    _meet_after_init()
    module, _, name = source.partition(":")
    suite = getattr(importlib.import_module(module), name)
    fixture = importlib.import_module(_FIXTURE).TensorPipeRpcAgentTestFixture
    base = importlib.import_module("torch.testing._internal.common_utils").TestCase
    mixed = type(name, (suite, fixture, base), {"__module__": __name__})
    setattr(sys.modules[__name__], name, mixed)
    return mixed


def stand_in_for_expecttest() -> None:
    """torch's test case derives from one of another package, for a feature that no suite here uses."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stand_in = types.ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        stand_in.ACCEPT = False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stand_in


def _meet_after_init() -> None:
    """Lets no rank go on before all have their process group.

    Suites call functions on other ranks that use it as soon as they have it themselves, and torch's calls are slow enough
    for that.
    """
    dist = importlib.import_module("torch.distributed")
    init = dist.init_process_group
    if init.__module__ == __name__:
        return

    def init_and_meet(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        # Freed with the GIL held, a group of torch 2.13 may wait for a thread of its own that wants the GIL, on torch, too.
        _kept.append(dist.group.WORLD)
        dist.barrier()

    dist.init_process_group = init_and_meet


def make_rank(case: Case, rank: int, file_name: str) -> Any:
    """The object whose method is one rank of a test."""
    made: Any = case.suite(case.method)
    made.rank = rank
    made.file_name = file_name
    return made


def num_ranks(case: Case) -> int:
    """How many processes the test is made for."""
    return int(getattr(make_rank(case, 0, ""), "world_size", 1))
