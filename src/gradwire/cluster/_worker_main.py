"""The main function of a forked worker process.

The main thread only watches the lifeline to the driver; the worker's agent has threads of its own for calls. When the
lifeline ends without a `Leave`, the driver is gone, and the worker ends at once.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import io
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from gradwire.cluster._control import (
    Leave,
    Listening,
    WorkerStart,
    read_start,
    receive_message,
    send_message,
)
from gradwire.cluster._process import name_process
from gradwire.cluster.cluster_metrics import serve_numbers
from gradwire.cluster.driver import DRIVER
from gradwire.cluster.log_level import serve_log_level
from gradwire.cluster.membership import follow_driver
from gradwire.cluster.trace_server import serve_traces
from gradwire.cluster.usage import serve_usage
from gradwire.dashboard.worker_report import serve_reports
from gradwire.observe.log import print_records
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import refuse_shutdown, reserve_process, set_current_agent
from gradwire.rpc.peers import StaticDirectory
from gradwire.runtime import start_worker


class WorkerFds(NamedTuple):
    """The descriptors that the driver sends along for a new worker."""

    start: int
    stdout: int
    stderr: int
    lifeline: int

    def redirect_output(self) -> None:
        """Make file descriptors 1 and 2 of this process lead to the driver."""
        os.dup2(self.stdout, 1)
        os.dup2(self.stderr, 2)

    def close(self) -> None:
        for fd in self:
            os.close(fd)


def run_worker(fds: WorkerFds) -> None:
    """Run a worker in a freshly forked process until it is told to leave."""
    start = read_start(fds.start)
    spec = start.spec
    reserve_process(spec.info.name)  # before any import of the user's
    os.close(fds.stdout)
    os.close(fds.stderr)
    lifeline = socket.socket(fileno=fds.lifeline)
    _settle_in(start)
    directory = StaticDirectory(spec.addresses)
    agent = start_worker(spec.info, spec.config, directory, folder=Path(start.socket_folder), after=spec.after)
    directory.complete()
    serve_driver(agent, DRIVER)
    set_current_agent(agent, refuse_shutdown)
    send_message(lifeline, Listening(agent.address))
    with lifeline:
        _wait_for_leave(lifeline)
    if agent.is_quiet:  # else the end of the process is the end of what still runs: it has had its time
        agent.shutdown(graceful=False)
    set_current_agent(None)
    # The usual end of an interpreter would wait for the user's threads and take torch apart; neither is of use.
    atexit._run_exitfuncs()


def serve_driver(agent: Agent, driver: str) -> None:
    """Register all operations that the driver of a cluster asks any of its workers for."""
    for serve in (follow_driver, serve_usage, serve_reports, serve_log_level, serve_numbers, serve_traces):
        serve(agent, driver)


def flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the driver is gone, or the user's code closed it
            stream.flush()


def _settle_in(start: WorkerStart) -> None:
    """Undo unwanted sharing after the fork, and apply the driver's settings."""
    name_process(start.spec.info.name)
    faulthandler.enable()  # a crash in native code prints where it happened
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    start.surroundings.adopt()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    print_records(shows_worker=False)  # the driver puts the name in front of each line
    torch.set_num_threads(start.spec.num_threads)
    reset_seeds(start.spec.info.id)
    for module in start.spec.imports:
        importlib.import_module(module)


def reset_seeds(rank: int) -> None:
    """Make the workers' random numbers differ.

    Python and numpy start from the system's entropy, as in any new process. torch starts every process from the same
    number, so that runs can be repeated; workers keep that and differ by their rank.
    """
    random.seed()
    torch.manual_seed(torch.initial_seed() + 1 + rank)
    if numpy_random := sys.modules.get("numpy.random"):  # numpy imports it when it is first used, and seeds it then
        numpy_random.seed()


def _wait_for_leave(lifeline: socket.socket) -> None:
    """Watch the lifeline until the driver releases this worker; exit the process if the driver has died or abandoned it."""
    while True:
        message, _ = receive_message(lifeline)  # no deadline: it lasts as long as the worker
        if message is None:
            os._exit(1)
        if isinstance(message, Leave):
            return
