"""`gradwire.set_log_level`: in this process, and in all workers of its cluster.

driver -- cluster.log_level(level) --> every worker     and every one that joins later or is restarted
"""

from __future__ import annotations

import contextlib
from typing import Annotated, Any

from msgspec import Meta

from gradwire.cluster.driver import CLUSTER
from gradwire.errors import GradwireError, NotInitialized
from gradwire.observe import log
from gradwire.observe.log import LogLevel
from gradwire.rpc.agent import Agent
from gradwire.rpc.api import current_agent
from gradwire.types import WorkerInfo

LOG_LEVEL = "cluster.log_level"

_TELL_S = 5.0
_of_workers: int | None = None

_Level = Annotated[int, Meta(ge=1, le=50)]


def serve_log_level(agent: Agent, driver: str) -> None:
    """Let the driver set the level of this worker's loggers."""

    def on_level(_: WorkerInfo, level: int) -> None:
        log.set_process_level(level)

    purpose = "set the log level of this worker"
    agent.server.register_control(LOG_LEVEL, on_level, _Level, only_for=driver, purpose=purpose)


def set_log_level(level: LogLevel | int, *, workers: bool = True) -> None:
    """Set which messages of gradwire are logged: those of this level and above.

    Messages are printed to stderr, unless the program has configured logging. Their loggers are ``gradwire`` and below, and
    their records have the attributes ``worker`` and ``context_id``.

    Args:
        level: ``"debug"``, ``"info"``, ``"warning"`` (Python's default), ``"error"``, ``"critical"``, or a numeric
            level of `logging`.
        workers: Also set it on all workers of the cluster that this process drives or starts later.

    Raises:
        ConfigurationError: There is no such level.
    """
    global _of_workers
    number = log.read_level(level)
    log.set_process_level(number)
    if workers:
        _of_workers = number
    with contextlib.suppress(NotInitialized):
        cluster: Any = current_agent().extensions.get(CLUSTER) if workers else None
        if cluster is not None:
            cluster._set_log_level(number)


def level_of_workers() -> int | None:
    """Return the level that workers of this process get; None if it was not set."""
    return _of_workers


def tell_level(agent: Agent, names: list[str], level: int) -> None:
    """Set the level on workers; those that do not answer within a few seconds keep theirs."""
    with contextlib.suppress(GradwireError):
        agent.ask_all(names, LOG_LEVEL, (level,), _TELL_S, None)
