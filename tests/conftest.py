"""For every test: the same random numbers each time, nothing may be left behind, and workers to call.

Hypothesis tries the same examples in every run, on every machine. ``GRADWIRE_HYPOTHESIS=explore`` with
``--hypothesis-seed`` tries others; `tests/explore.py` does that for a given time.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch

import quick_python
from file_order import is_slow, number_of
from gradwire.rpc.agent import Agent
from gradwire.testing import LeakCheck, local_agents, wait_until
from gradwire.testing.leaks import contexts_left
from hung_tests import pytest_configure, pytest_timeout_set_timer

__all__ = ["pytest_configure", "pytest_timeout_set_timer"]

MakeAgents = Callable[..., list[Agent]]

hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("explore", derandomize=False, database=None, deadline=None)
hypothesis.settings.load_profile(os.environ.get("GRADWIRE_HYPOTHESIS", "fixed"))

# Else each of the many processes that tests start compiles gradwire anew, and each process of pytest all tests.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# There are more processes than processors: a second thread of an operation would mostly wait to be run.
torch.set_num_threads(1)

_SET_BY_OTHERS = ("PYTEST_CURRENT_TEST", "KINETO_", "TORCH", "TRITON_")  # beginnings of variables of pytest and torch

# A job in the background ignores one of them, nohup the other, and programs of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: number_of(item.path))
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable garbage collection while tests are collected: nearly everything that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over modules and tests, which stay: each takes a third of a second otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_random_numbers() -> None:
    """A test's random tensors do not depend on the tests before it."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack each time, for CUDA


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder() -> Iterator[None]:
    """Workers' folders are told from those of other programs, and are short enough for the path of a socket."""
    before = tempfile.tempdir
    tempfile.tempdir = tempfile.mkdtemp(prefix="gwt-", dir="/tmp")
    yield
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    tempfile.tempdir = before


@pytest.fixture(scope="session", autouse=True)
def _quick_programs_end_with_the_session() -> Iterator[None]:
    quick_python.fork_fork_servers()
    yield
    quick_python.close()


def _process_state() -> dict[str, object]:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)
    log = logging.getLogger("gradwire")
    return {
        "folder": os.getcwd(),
        **{f"variable {name}": value for name, value in os.environ.items() if not name.startswith(_SET_BY_OTHERS)},
        **{f"handler of {number.name}": signal.getsignal(number) for number in signals},
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "log": (log.level, log.propagate, log.disabled),
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "torch": (torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_num_threads()),
    }


@pytest.fixture(scope="module", autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    """Fail a file that changes the state of the process: any other file may come next."""
    before = _process_state()
    yield
    after = _process_state()
    changed = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    assert changed == [], [(before.get(name), after.get(name)) for name in changed]


@pytest.fixture(autouse=True)
def leak_check(_own_temporary_folder: None) -> Iterator[LeakCheck]:
    """Fails the test that leaves a thread, descriptor, mapping, process, folder or context behind, and names it."""
    check = LeakCheck(timeout_s=15.0)
    yield check
    check.check()


@pytest.fixture
def make_agents(leak_check: LeakCheck) -> Iterator[MakeAgents]:
    """Makes workers of one cluster in this process: ``a, b = make_agents(2, "inproc", num_worker_threads=1)``."""
    with contextlib.ExitStack() as stack:

        def make(num_workers: int, transport: str = "unix", **config: Any) -> list[Agent]:
            return stack.enter_context(local_agents(num_workers, transport, **config))

        yield make
        wait_until(lambda: not contexts_left(), 20.0, "that no autograd context is left on a worker")
