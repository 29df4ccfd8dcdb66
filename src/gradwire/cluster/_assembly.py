"""Puts a cluster on this machine together: launcher, driver's agent, workers."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from gradwire.cluster.launcher import WorkerHandle, WorkerSpec
from gradwire.cluster.local import LocalLauncher
from gradwire.cluster.options import LocalOptions
from gradwire.errors import ConfigurationError, NotInitialized
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent, find_import, guard_hint, reserved_for, set_current_agent
from gradwire.rpc.directory import StaticDirectory
from gradwire.runtime import start_worker
from gradwire.types import WorkerAddress, WorkerInfo

_HOST = "local"
_ANY_INCARNATION = 0
CLUSTER = "cluster"  # where the driver's agent keeps the cluster that it belongs to


C = TypeVar("C")
MakeCluster = Callable[[LocalLauncher, Agent, list[WorkerHandle]], C]


def start_local(options: LocalOptions, make: MakeCluster[C]) -> C:
    """Start everything, or nothing.

    Args:
        options: What to start.
        make: Makes the cluster of what was started. If it fails, or Ctrl-C cuts it off, everything is ended.

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
        return make(launcher, agent, list(handles))
    except BaseException:  # Ctrl-C as well
        if agent is not None:
            agent.shutdown(graceful=False)
            set_current_agent(None)
        launcher.close()
        raise


def _check_no_other() -> None:
    hint = guard_hint("with gradwire.Cluster.local(...) as cluster:\n            ...")
    if (name := reserved_for()) is not None:
        raise ConfigurationError(f"{name} is a worker of a cluster: only the driver can start one{hint}")
    if _imports_the_script():
        raise ConfigurationError(f"the program's script was imported, and would start a second cluster{hint}")
    with contextlib.suppress(NotInitialized):
        agent = current_agent()
        if CLUSTER in agent.extensions:
            raise ConfigurationError(
                "a cluster is open in this process already. Use it (Cluster.current()), close it (Cluster.current().close() "
                f"or gradwire.rpc.shutdown()), or have the new one take its place: Cluster.local(..., replace=True){hint}"
            )
        raise ConfigurationError(
            f"this process is worker {agent.info.name} of a cluster already, by init_rpc; leave that one first, with "
            f"gradwire.rpc.shutdown(){hint}"
        )


def _imports_the_script() -> bool:
    """Whether this runs because the program's own script is imported: by itself, or where multiprocessing spawns."""
    importing = find_import()
    if importing is None:
        return False
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return importing.f_globals.get("__name__") == "__mp_main__" or (
        script is not None and os.path.realpath(script) == os.path.realpath(importing.f_code.co_filename)
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
