"""Three workers for the fuzzer of operations: ``v``, which is attacked, ``m``, which attacks, and ``h``, which is honest.

The victim runs in this process, or in a child, so that a crash of it is seen:

    fuzzer: m, h  --------- unix sockets ---------  v (here, or in a child that ends with its standard input)
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import logging
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

import gradwire.checkpoint.owner
import gradwire.optim.local
import gradwire.shard.serialization
from gradwire import rpc
from gradwire.config import MIB, Limits, WorkerConfig
from gradwire.errors import GradwireError
from gradwire.rpc.agent import Agent
from gradwire.rpc.connection import current_request
from gradwire.rpc.peers import StaticDirectory
from gradwire.rref import context as references
from gradwire.runtime import start_worker
from gradwire.types import WorkerAddress, WorkerInfo

LIMITS = Limits(autograd_bytes=1 * MIB)
"""Small, so that a short run reaches them."""

ALLOWED = (GradwireError, TypeError, ValueError)
"""What operations may answer bad data with."""

SOURCES = str(Path(gradwire.checkpoint.__file__).parent.parent)


# -- what the victim's user has exposed ------------------------------------------------------------------------------------


@rpc.expose(name="fuzz.Layer")
class Layer(nn.Module):
    """A module with a parameter, a buffer and a method."""

    counter: torch.Tensor

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        if type(size) is not int or not 0 < size < 100:
            raise ValueError("size")
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            raise TypeError("x")
        return x * self.weight

    @rpc.expose(name="fuzz.Layer.scaled")
    def scaled(self) -> torch.Tensor:
        return self.weight.detach() * 2


@rpc.expose(name="fuzz.echo")
def echo(value: Any = None) -> Any:
    """Returns what came."""
    return value


@rpc.expose(name="fuzz.double")
def double(x: Any = None) -> Any:
    """A part of a forward pass."""
    return torch.tanh(x) * 2 if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else None


@rpc.expose(name="fuzz.make_tensor")
def make_tensor() -> torch.Tensor:
    """A value for references."""
    return torch.arange(3.0)


@rpc.expose(name="fuzz.call_back")
def call_back(name: Any, context_id: Any = 0) -> Any:
    """Has the victim call its caller, whose answer may be anything, and ask it about a context."""
    request = current_request()
    assert request is not None
    agent: Agent = request.source.server.agent
    context = agent.extensions["autograd"].container.find(context_id) if type(context_id) is int else None
    if context is not None:
        str(agent.extensions["autograd"].prober.explain(context))
        agent.extensions["autograd"].prober.graph(context, (), 1.0).to_svg()
    return agent.call(request.source.info.name, str(name)[:100], (torch.ones(3, requires_grad=True),), None, 1.0)


@rpc.expose(name="fuzz.state")
def state() -> dict[str, Any]:
    """How large the victim's tables are, and what went wrong on it."""
    request = current_request()
    assert request is not None
    return state_of(request.source.server.agent)


@rpc.expose(name="fuzz.collect")
def collect() -> None:
    """Collect garbage: errors and their frames know what was sent, and Python may leave them for long."""
    gc.collect()


def state_of(agent: Agent) -> dict[str, Any]:
    """As `state`, for any worker of this process."""
    autograd, known = agent.extensions["autograd"], references.of(agent)
    contexts = list(autograd.container)
    numbers = known.statistics()
    return {
        "rss_bytes": int(Path("/proc/self/statm").read_text().split()[1]) * 4096,
        "contexts": len(contexts),
        "passes": sum(len(item.passes) for item in contexts),
        "ended passes": sum(len(item.ended_passes) for item in contexts),
        "recorded messages": sum(len(item.exchanges) for item in contexts),
        "released contexts": len(autograd.container._released),
        "rounds of gatherings": len(agent.gathering._rounds),
        "values": numbers.num_values,
        "references": numbers.num_forks,
        "children": numbers.num_children,
        "messages about references": numbers.num_messages,
        "threads": threading.active_count(),
        "problems": PROBLEMS.take(agent.info.name),
        "examples": [f"{item!r} with {sorted(item.known_workers)}" for item in contexts[:5]],
    }


# -- what goes wrong without an answer -------------------------------------------------------------------------------------


def last_frame(text: str) -> str:
    """The innermost line of gradwire's code in a traceback, as ``file:function``; empty if that is elsewhere."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith('File "')]
    if not lines or SOURCES not in lines[-1]:
        return ""
    path, _, function = lines[-1].partition(", in ")
    return f"{path.partition('gradwire/')[2].partition(chr(34))[0]}:{function}"


class Problems(logging.Handler):
    """Keeps exceptions that were logged or ended a thread, unless they are of the kinds that bad data may cause."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._found: list[tuple[str, str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.add(str(record.msg % record.args if record.args else record.msg), record.exc_info[1])

    def add(self, where: str, error: BaseException) -> None:
        """Keeps an exception if it is an internal one."""
        if not isinstance(error, ALLOWED):
            text = "".join(traceback.format_exception(error))
            self._found.append((where, type(error).__name__, str(error)[:500], text[-4000:]))

    def take(self, name: str) -> list[tuple[str, str, str, str]]:
        """Returns what was kept since the last time."""
        found, self._found = self._found, []
        return found

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches logs and threads of this process."""
        log = logging.getLogger("gradwire")
        before, outer, propagates = log.level, threading.excepthook, log.propagate
        log.addHandler(self)
        log.setLevel(logging.WARNING)
        log.propagate = False  # what bad data causes is no news here
        threading.excepthook = lambda args: self.add(f"thread {args.thread}", args.exc_value or Exception())
        try:
            yield
        finally:
            log.removeHandler(self)
            log.setLevel(before)
            log.propagate = propagates
            threading.excepthook = outer


PROBLEMS = Problems()


# -- the three workers -----------------------------------------------------------------------------------------------------


class VictimDied(Exception):
    """The process of the victim has ended."""


@dataclass
class World:
    """The workers of one run.

    Attributes:
        victim: Where ``v`` is.
        hostile: ``m``.
        honest: ``h``.
        folder: Where the victim lets others write checkpoints.
        process: The victim's process, if it has one of its own.
    """

    victim: WorkerAddress
    hostile: Agent
    honest: Agent
    folder: str
    process: subprocess.Popen[bytes] | None = None

    def check_alive(self) -> None:
        """
        Raises:
            VictimDied: The victim's process has ended; says how.
        """
        if self.process is not None and self.process.poll() is not None:
            raise VictimDied(f"the victim ended with {self.process.returncode}")


def _config(token: bytes) -> WorkerConfig:
    return WorkerConfig(transports=("unix",), token=token, trust="data", limits=LIMITS, num_worker_threads=4)


@contextlib.contextmanager
def make_world(own_process: bool = False) -> Iterator[World]:
    """Starts the workers, and ends them.

    Args:
        own_process: Run the victim in a child.
    """
    token = secrets.token_bytes(16)
    directory = StaticDirectory()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gwf-"))
        stack.enter_context(PROBLEMS.watching())
        process = None
        if own_process:
            process, victim = stack.enter_context(_child(token, folder))
            directory.update(victim)
        else:
            stack.enter_context(_allowed(folder))
            agent = start_worker(WorkerInfo("v", 0), _config(token), directory)
            stack.callback(agent.close)
            victim = agent.address
        agents = []
        for rank, name in ((1, "m"), (2, "h")):
            agents.append(start_worker(WorkerInfo(name, rank), _config(token), directory))
            stack.callback(agents[-1].close)
        for item in agents:  # the victim learns where they are
            item.call("v", "fuzz.echo")
        yield World(victim, agents[0], agents[1], folder, process)


@contextlib.contextmanager
def _allowed(folder: str) -> Iterator[None]:
    allowed = gradwire.checkpoint.owner._allowed
    before = list(allowed)
    gradwire.checkpoint.owner.allow_directory(folder)
    try:
        yield
    finally:
        allowed[:] = before


@contextlib.contextmanager
def _child(token: bytes, folder: str) -> Iterator[tuple[subprocess.Popen[bytes], WorkerAddress]]:
    process = subprocess.Popen(
        [sys.executable, "-X", "faulthandler", "-c", "from fuzz import operation_world as w; w.run_victim()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps([base64.b64encode(token).decode(), folder]).encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise VictimDied(f"the victim did not start: {process.wait(10)}")
        yield process, msgspec.json.decode(line, type=WorkerAddress)
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)
        process.stdout.close()


def run_victim() -> None:
    """Be the child: a worker until standard input ends."""
    token, folder = json.loads(sys.stdin.readline())
    with PROBLEMS.watching(), _allowed(folder):
        agent = start_worker(WorkerInfo("v", 0), _config(base64.b64decode(token)), StaticDirectory())
        rpc.set_current_agent(agent)
        sys.stdout.write(msgspec.json.encode(agent.address).decode() + "\n")
        sys.stdout.flush()
        sys.stdin.read()
        agent.close()
