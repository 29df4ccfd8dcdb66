"""What can be chosen for a cluster on this machine."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradwire.config import Limits, WorkerConfig
from gradwire.errors import ConfigurationError
from gradwire.types import Trust, WorkerInfo

DRIVER = "driver"
_MAX_WORKERS = 65_535  # ranks are 16 bits, and the driver has the one after the workers'
_MAX_NAME_CHARS = 40  # the path of a socket is limited to 107 bytes
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """The options of `gradwire.Cluster.local`, checked when they are made; see there.

    Raises:
        ConfigurationError: One of them is wrong.
    """

    num_workers: int
    names: Sequence[str] | None = None
    num_worker_threads: int = 16
    rpc_timeout_s: float = 60.0
    threads_per_worker: int = 1
    start_timeout_s: float = 60.0
    environment: Mapping[str, str] | None = None
    imports: Sequence[str] = ()
    trust: Trust = "code"
    limits: Limits = field(default_factory=Limits)
    token: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)

    def __post_init__(self) -> None:
        _check_count("n", self.num_workers, _MAX_WORKERS)
        _check_count("threads_per_worker", self.threads_per_worker, 1 << 16)
        if not self.start_timeout_s > 0:
            raise ConfigurationError(f"start_timeout must be positive, not {self.start_timeout_s}")
        if not all(_is_text(text) for pair in (self.environment or {}).items() for text in pair):
            raise ConfigurationError(f"env must map text to text: {dict(self.environment or {})!r}")
        if isinstance(self.imports, str) or not all(_is_text(module) for module in self.imports):
            raise ConfigurationError(f"imports must be a list of modules' names, not {self.imports!r}")
        if not isinstance(self.limits, Limits):
            raise ConfigurationError(f"limits must be a gradwire.config.Limits, not {self.limits!r}")
        if self.names is not None:
            _check_names(self.names, self.num_workers)
        self.worker_config()

    def infos(self) -> list[WorkerInfo]:
        """The workers."""
        names = self.names or [f"worker{rank}" for rank in range(self.num_workers)]
        return [WorkerInfo(name, rank) for rank, name in enumerate(names)]

    def driver_info(self) -> WorkerInfo:
        """The driver, which is a worker like any other but was not started by us."""
        return WorkerInfo(DRIVER, self.num_workers)

    def worker_config(self) -> WorkerConfig:
        """How workers and driver run."""
        return WorkerConfig(
            num_worker_threads=self.num_worker_threads,
            rpc_timeout_s=self.rpc_timeout_s,
            trust=self.trust,
            limits=self.limits,
            transports=("unix",),
            token=self.token,
        )


def _check_count(option: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise ConfigurationError(f"{option} must be a whole number from 1 to {most:,}, not {value!r}")


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_names(names: Sequence[str], num_workers: int) -> None:
    if isinstance(names, str) or len(names) != num_workers:
        raise ConfigurationError(f"names must have one name for each of the {num_workers} workers, not {names!r}")
    for name in names:
        if not _is_text(name) or not _NAME.fullmatch(name) or len(name) > _MAX_NAME_CHARS:
            raise ConfigurationError(
                f"a worker's name has 1 to {_MAX_NAME_CHARS} letters, digits, dots, dashes, underscores; not {name!r}"
            )
    if len(set(names)) != len(names) or DRIVER in names:
        raise ConfigurationError(f'names must differ, and "{DRIVER}" is this process: {list(names)!r}')
