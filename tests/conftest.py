"""For every test: the same random numbers each time, nothing may be left behind, and workers to call.

Hypothesis tries the same examples in every run, on every machine. ``GRADWIRE_HYPOTHESIS=explore`` with
``--hypothesis-seed`` tries others; `tests/explore.py` does that for a given time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import torch

from gradwire.rpc.agent import Agent
from gradwire.testing import LeakCheck, local_agents, wait_until
from gradwire.testing.leaks import contexts_left

MakeAgents = Callable[..., list[Agent]]

hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("explore", derandomize=False, database=None, deadline=None)
hypothesis.settings.load_profile(os.environ.get("GRADWIRE_HYPOTHESIS", "fixed"))

# A job in the background ignores one of them, nohup the other, and programs of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


@pytest.fixture(autouse=True)
def _fixed_random_numbers() -> None:
    """A test's random tensors do not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder() -> Iterator[None]:
    """Workers' folders are told from those of other programs, and are short enough for the path of a socket."""
    before = tempfile.tempdir
    tempfile.tempdir = tempfile.mkdtemp(prefix="gwt-", dir="/tmp")
    yield
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    tempfile.tempdir = before


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
