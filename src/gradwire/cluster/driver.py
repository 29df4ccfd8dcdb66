"""Options common to all clusters, and the check whether this process can be a driver."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.cluster.launcher import WorkerSpec
from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError, NotInitialized
from gradwire.rpc.api import current_agent, find_import, guard_hint, reserved_for
from gradwire.types import WorkerAddress, WorkerInfo

CLUSTER = "cluster"  # where the driver's agent keeps the cluster that it belongs to
DRIVER = "driver"

MAX_WORKERS = 65_535  # ranks are 16 bits, and the driver has the one after the workers'
_MAX_NAME_CHARS = 40  # the path of a socket is limited to 107 bytes
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options that every kind of cluster takes, checked when they are made; see `gradwire.Cluster.local`."""

    num_workers: int
    names: Sequence[str] | None = None
    roles: Mapping[str, int] | None = None  # how many workers have each role: ps0, ps1, trainer0, ...
    threads_per_worker: int = 1
    start_timeout_s: float = 60.0
    environment: Mapping[str, str] | None = None
    imports: Sequence[str] = ()
    config: WorkerConfig = field(default_factory=WorkerConfig)
    token: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        check_count("n", self.num_workers, MAX_WORKERS)
        check_count("threads_per_worker", self.threads_per_worker, 1 << 16)
        if not self.start_timeout_s > 0:
            raise ConfigurationError(f"start_timeout_s must be positive, not {self.start_timeout_s}")
        pairs = (self.environment or {}).items()
        wrong = [pair[0] for pair in pairs if not all(isinstance(text, str) for text in pair)]
        if wrong:  # values are not shown: they may be secrets
            raise ConfigurationError(
                f"env must map strings to strings; these keys or their values are not strings: {wrong}"
            )
        if isinstance(self.imports, str) or not all(isinstance(module, str) for module in self.imports):
            raise ConfigurationError(f"imports must be a list of module names, not {self.imports!r}")
        if self.roles is not None:
            self._check_roles(self.roles)
        check_names(self._names(), self.num_workers)
        unknown = sorted(set(self.config.device_maps) - {*self._names(), DRIVER})
        if unknown:
            raise ConfigurationError(
                f"device_maps has invalid target node names: {', '.join(unknown)}; there are "
                f"{', '.join((*self._names(), DRIVER))}"
            )

    def _check_roles(self, roles: Mapping[str, int]) -> None:
        if self.names is not None:
            raise ConfigurationError("pass either names or roles, not both: a role names its workers")
        for role, count in roles.items():
            check_count(f"roles[{role!r}]", count, MAX_WORKERS)
        if sum(roles.values()) != self.num_workers:
            raise ConfigurationError(
                f"roles add up to {sum(roles.values())} workers, but the cluster has {self.num_workers}: {dict(roles)!r}"
            )

    def _names(self) -> Sequence[str]:
        if self.roles is not None:
            return [f"{role}{index}" for role, count in self.roles.items() for index in range(count)]
        return self.names if self.names is not None else [f"worker{rank}" for rank in range(self.num_workers)]

    def roles_by_name(self) -> dict[str, str]:
        """Return the role of each worker; empty without roles."""
        each = [role for role, count in (self.roles or {}).items() for _ in range(count)]
        return dict(zip(self._names(), each, strict=False))

    def infos(self) -> list[WorkerInfo]:
        """Return names and ranks of the workers, followed by those of the driver."""
        return [WorkerInfo(name, rank) for rank, name in enumerate((*self._names(), DRIVER))]

    def spec(self, info: WorkerInfo, config: WorkerConfig, addresses: tuple[WorkerAddress, ...] = ()) -> WorkerSpec:
        """Return the spec from which a launcher starts that worker."""
        return WorkerSpec(
            info=info,
            config=config,
            addresses=addresses,
            num_threads=self.threads_per_worker,
            environment=dict(self.environment or {}),
            imports=tuple(self.imports),
            role=self.roles_by_name().get(info.name, "worker"),
        )


def check_count(option: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigurationError(f"{option} must be a whole number from 1 to {most:,}, not {value!r}")


def check_names(names: Sequence[object], num_workers: int) -> None:
    if isinstance(names, str) or len(names) != num_workers:
        raise ConfigurationError(f"names must be a list of {num_workers} names, one for each worker, not {names!r}")
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _MAX_NAME_CHARS:
            raise ConfigurationError(
                f"a worker's name must be 1 to {_MAX_NAME_CHARS} letters, digits, dots, dashes or underscores, not {name!r}"
            )
    if len(set(names)) != len(names) or DRIVER in names:
        raise ConfigurationError(f'names must be unique, and "{DRIVER}" is reserved for this process: {list(names)!r}')


def check_no_other() -> None:
    """Refuse to start a cluster in a process that belongs to one."""
    hint = guard_hint("with gradwire.Cluster.local(...) as cluster:\n            ...")
    if (name := reserved_for()) is not None:
        raise ConfigurationError(f"{name} is a worker of a cluster, and only a driver can start a cluster{hint}")
    if _imports_the_script():
        raise ConfigurationError(f"the program's script was imported and would start a second cluster{hint}")
    with contextlib.suppress(NotInitialized):
        agent = current_agent()
        if CLUSTER in agent.extensions:
            raise ConfigurationError(
                "a cluster is already open in this process. Use it (Cluster.current()), close it (Cluster.current().close() "
                f"or gradwire.rpc.shutdown()), or replace it: Cluster.local(..., replace=True){hint}"
            )
        raise ConfigurationError(
            f"this process is already worker {agent.info.name}, started by init_rpc; call gradwire.rpc.shutdown() "
            f"first{hint}"
        )


def _imports_the_script() -> bool:
    """Return whether this runs because the program's own script is imported: by itself, or where multiprocessing spawns."""
    importing = find_import()
    if importing is None:
        return False
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return importing.f_globals.get("__name__") == "__mp_main__" or (
        script is not None and os.path.realpath(script) == os.path.realpath(importing.f_code.co_filename)
    )
