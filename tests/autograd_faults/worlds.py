"""A cluster under test, and what must be true of it after every fault."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from autograd_faults import tasks
from cluster.processes import is_there
from gradwire.autograd.api import ContextId
from gradwire.cluster.api import Worker
from gradwire.testing import wait_until

CLEAN = (0, 0, 0, 0)
BOUND_S = 15.0
"""How long survivors may take to drop what has failed; usually milliseconds, but the machine may stall."""


def make_input() -> torch.Tensor:
    return torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)


def wait_clean(workers: Sequence[Worker], timeout_s: float = BOUND_S) -> None:
    """No context, pass, send or recv is left here and on these workers."""
    for worker in workers:
        _wait(lambda worker: worker.call(tasks.counts) == CLEAN, worker, timeout_s)
    wait_until(lambda: tasks.counts() == CLEAN, timeout_s, "that the driver is clean")


def wait_dropped(context_id: int, workers: Sequence[Worker], timeout_s: float = BOUND_S) -> None:
    """No pass of a context is left, and no gradient of it is to be seen."""
    with torch.no_grad():  # so that these calls have no part in the context
        for worker in workers:
            _wait(lambda worker: not worker.call(tasks.phases, int(context_id)), worker, timeout_s)
        assert [worker.call(tasks.num_gradients, int(context_id)) for worker in workers] == [0] * len(workers)
    assert not tasks.phases(int(context_id))
    assert tasks.num_gradients(int(context_id)) == 0


def _wait(condition: Callable[[Worker], bool], worker: Worker, timeout_s: float) -> None:
    wait_until(lambda: condition(worker), timeout_s, f"that {worker.name} is clean")


def check_works(workers: Sequence[Worker]) -> None:
    """A fresh forward and backward through all of these is equal to one process; nothing is left before and after."""
    wait_clean(workers)
    x = make_input()
    with gw.autograd.context() as ctx:
        value = workers[0].call(tasks.through, x, [worker.name for worker in workers[1:]])
        ctx.backward(value.sum(), timeout=20.0)
        parts = [worker.call(tasks.weight_gradient, int(ctx)) for worker in workers]
        of_input, of_weight = tasks.expected(len(workers), x)
        assert torch.allclose(ctx.gradients()[x], of_input, rtol=1e-12)
        assert torch.allclose(torch.stack([part for part in parts if part is not None]).sum(0), of_weight, rtol=1e-12)
    wait_clean(workers)


def kill(worker: Worker, number: int = signal.SIGKILL) -> None:
    """Ends a worker and waits until it is gone."""
    assert worker.pid is not None
    pid = worker.pid
    os.kill(pid, number)
    wait_until(lambda: not is_there(pid), 10.0, f"the end of {worker.name}")


class Background:
    """Something that runs in a thread meanwhile, with what came of it."""

    def __init__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.error: BaseException | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(function, args, kwargs), name="in-the-background")
        self._thread.start()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        started = time.monotonic()
        try:
            function(*args, **kwargs)
        except BaseException as error:
            self.error = error
        self.seconds = time.monotonic() - started

    def wait(self, timeout_s: float = 20.0) -> BaseException | None:
        """What it raised."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "it still runs"
        return self.error


def wait_for_file(folder: Path, name: str = "entered") -> None:
    wait_until((folder / name).exists, 20.0, f"that a worker has come to {name}")


def go_on(folder: Path) -> None:
    (folder / "go").touch()


def begin_backward(ctx: ContextId, loss: torch.Tensor, **options: Any) -> Background:
    return Background(ctx.backward, loss, **options)
