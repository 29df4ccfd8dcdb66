"""Puts a cluster on this machine together: launcher, driver's agent, workers."""

from __future__ import annotations

import contextlib
import time

from gradwire.cluster.launcher import WorkerHandle, WorkerSpec
from gradwire.cluster.local import LocalLauncher
from gradwire.cluster.options import LocalOptions
from gradwire.errors import ConfigurationError, NotInitialized
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent, set_current_agent
from gradwire.rpc.directory import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.types import WorkerAddress, WorkerInfo

_HOST = "local"
_ANY_INCARNATION = 0


def start_local(options: LocalOptions) -> tuple[LocalLauncher, Agent, list[WorkerHandle]]:
    """Starts everything, or nothing.

    Raises:
        ConfigurationError: This process has a worker already, or this platform cannot fork.
        WorkerStartFailed: A worker, or the template process, did not get ready.
    """
    _check_no_other()
    deadline = time.monotonic() + options.start_timeout_s
    launcher = LocalLauncher(options.start_timeout_s)
    agent: Agent | None = None
    try:
        members = [_address_of(info, launcher) for info in (*options.infos(), options.driver_info())]
        directory = StaticDirectory(members)
        directory.complete()
        agent = start_worker(options.driver_info(), options.worker_config(), directory, folder=launcher.folder)
        set_current_agent(agent)
        forget = agent.forget
        handles = launcher.start(
            [_spec_of(info, options, members) for info in options.infos()],
            on_lost=lambda handle: forget(handle.info.name, handle.exit_reason or "it ended"),
            timeout_s=max(0.0, deadline - time.monotonic()),
        )
    except BaseException:  # Ctrl-C as well
        if agent is not None:
            agent.shutdown(graceful=False)
            set_current_agent(None)
        launcher.close()
        raise
    return launcher, agent, list(handles)


def _check_no_other() -> None:
    with contextlib.suppress(NotInitialized):
        name = current_agent().info.name
        raise ConfigurationError(
            f"this process is a worker ({name}) of another cluster already; close that one first, with its close() or "
            f"by gradwire.rpc.shutdown()"
        )


def _address_of(info: WorkerInfo, launcher: LocalLauncher) -> WorkerAddress:
    return WorkerAddress(info, _ANY_INCARNATION, _HOST, (f"unix://{launcher.folder / info.name}.sock",))


def _spec_of(info: WorkerInfo, options: LocalOptions, members: list[WorkerAddress]) -> WorkerSpec:
    return WorkerSpec(
        info=info,
        config=options.worker_config(),
        addresses=tuple(members),
        num_threads=options.threads_per_worker,
        environment=dict(options.environment or {}),
        imports=tuple(options.imports),
    )
