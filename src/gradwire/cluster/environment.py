"""Detect the launcher of this process: torchrun, mpirun, srun, SkyPilot, or a program that sets GRADWIRE_* variables.

`detect` only reads environment variables. `gradwire.cluster.environment_scheduler` makes a cluster from the result.

The more specific launcher wins, because launchers nest: torchrun runs under srun or on SkyPilot, and mpirun starts its
daemons with srun, whose variables the ranks then inherit.
"""

from __future__ import annotations

import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gradwire.errors import ConfigurationError

_FIRST_PORT = 20_000  # above those that Ray gives out, below those that the kernel does
_NUM_PORTS = 10_000
_MAX_RANKS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchEnvironment:
    """One rank of a program that was started on every rank.

    Attributes:
        launcher: Name of the launcher, e.g. ``torchrun``.
        run_id: The same on every rank of a run.
        rank: Rank of this process; 0 is the driver.
        world_size: Number of ranks, including the driver.
        master: Host and port of the store that all ranks use; None if they share a machine and need none.
        serves_store: Whether rank 0 serves the store; otherwise the launcher does.
        is_one_host: Whether all ranks share a machine; None if the launcher does not provide that.
        restart: Number of earlier starts of this rank, for messages only: it may differ between machines.
    """

    launcher: str
    run_id: str
    rank: int
    world_size: int
    master: tuple[str, int] | None = None
    serves_store: bool = True
    is_one_host: bool | None = None
    restart: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size <= _MAX_RANKS:
            raise ConfigurationError(
                f"{self.launcher} started this process as rank {self.rank} of {self.world_size}: ranks must be 0 to world "
                f"size - 1, with at most {_MAX_RANKS:,} of them"
            )

    @property
    def topic(self) -> str:
        """Identifies this run among others of the same user on the same machines."""
        where = "{}:{}".format(*self.master) if self.master else "-"
        return f"{self.launcher}/{self.run_id}/{where}/{self.world_size}"

    @property
    def shares_machine(self) -> bool:
        """Whether this rank is on the machine of rank 0, as far as that is known without contacting it."""
        return self.is_one_host is True or self.master is None or is_here(self.master[0])


def detect(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Detect the launcher and this process's rank from environment variables.

    Args:
        environ: The variables; those of this process if not given.

    Raises:
        ConfigurationError: No launcher was found, or its variables are inconsistent.
    """
    env = os.environ if environ is None else environ
    for is_there, read in _LAUNCHERS:
        if is_there(env):
            return read(env)
    raise ConfigurationError(_not_found_text(env))


def _not_found_text(env: Mapping[str, str]) -> str:
    slurm = ""
    if "SLURM_JOB_ID" in env:
        slurm = (
            f"This process is inside Slurm job {env['SLURM_JOB_ID']}, but srun did not start it: put srun in front of the "
            "command (srun python script.py). "
        )
    return (
        "Cluster.from_env found no launcher. "
        + slurm
        + "Looked for GRADWIRE_RANK (gradwire run), TORCHELASTIC_RUN_ID (torchrun), OMPI_COMM_WORLD_RANK (mpirun), "
        "PMI_RANK (mpiexec), SLURM_PROCID with SLURM_STEP_ID (srun) and SKYPILOT_NODE_RANK (SkyPilot). Start the program "
        "with one of them, e.g. `torchrun --standalone --nproc-per-node=4 script.py`, or use Cluster.local(n)"
    )


def _read_own(env: Mapping[str, str]) -> LaunchEnvironment:
    master = None
    if text := env.get("GRADWIRE_MASTER"):
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigurationError(
                f"GRADWIRE_MASTER must be host:port, the address at which rank 0 listens, not {text!r}"
            )
        master = (host.strip("[]"), int(port))
    run_id = env.get("GRADWIRE_RUN_ID", "")
    if master is None and not run_id:
        raise ConfigurationError(
            "GRADWIRE_RANK is set: set GRADWIRE_RUN_ID as well (any text, the same on every rank) if all ranks share a "
            "machine, or GRADWIRE_MASTER=host:port, the address at which rank 0 listens, if they do not"
        )
    return LaunchEnvironment(
        launcher=env.get("GRADWIRE_LAUNCHER") or "GRADWIRE_RANK",
        run_id=run_id,
        rank=_number(env, "GRADWIRE_RANK"),
        world_size=_number(env, "GRADWIRE_WORLD_SIZE"),
        master=master,
        is_one_host=True if master is None else None,
    )


def _read_torchrun(env: Mapping[str, str]) -> LaunchEnvironment:
    world_size = _number(env, "WORLD_SIZE")
    return LaunchEnvironment(
        launcher="torchrun",
        run_id=env["TORCHELASTIC_RUN_ID"],
        rank=_number(env, "RANK"),
        world_size=world_size,
        master=(_text(env, "MASTER_ADDR"), _number(env, "MASTER_PORT")),
        serves_store=env.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        is_one_host=_number(env, "LOCAL_WORLD_SIZE", default=0) == world_size or None,
        restart=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _read_open_mpi(env: Mapping[str, str]) -> LaunchEnvironment:
    return _read_mpi(
        env,
        "mpirun",
        _number(env, "OMPI_COMM_WORLD_RANK"),
        _number(env, "OMPI_COMM_WORLD_SIZE"),
        _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", default=0),
        env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid"),
    )


def _read_pmi(env: Mapping[str, str]) -> LaunchEnvironment:
    rank, world_size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    return _read_mpi(env, "mpiexec", rank, world_size, _number(env, "MPI_LOCALNRANKS", default=0), env.get("PMI_JOBID"))


def _read_mpi(
    env: Mapping[str, str], launcher: str, rank: int, world_size: int, num_local: int, run_id: str | None
) -> LaunchEnvironment:
    is_one_host = num_local == world_size or None
    master = None
    if "MASTER_ADDR" in env:
        master = (env["MASTER_ADDR"], _number(env, "MASTER_PORT", default=_port_for(run_id or launcher)))
    elif not is_one_host:
        raise ConfigurationError(
            f"{launcher} started {world_size} ranks, which may be on several machines, and does not provide the address of "
            "rank 0: set MASTER_ADDR to its host name on every rank (e.g. mpirun -x MASTER_ADDR=node1), and MASTER_PORT "
            "to a free port"
        )
    elif run_id is None:
        run_id = _parent_id()  # all ranks have the same parent on one machine
    return LaunchEnvironment(
        launcher=launcher,
        run_id=run_id or "",
        rank=rank,
        world_size=world_size,
        master=master,
        is_one_host=is_one_host,
    )


def _read_slurm(env: Mapping[str, str]) -> LaunchEnvironment:
    run_id = f"{_text(env, 'SLURM_JOB_ID')}.{env['SLURM_STEP_ID']}"
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    host = env.get("MASTER_ADDR") or first_host(nodes)
    num_nodes = _number(env, "SLURM_STEP_NUM_NODES", default=_number(env, "SLURM_NNODES", default=0))
    if not host and num_nodes != 1:
        raise ConfigurationError(
            "srun does not provide the address of rank 0 (SLURM_STEP_NODELIST): set MASTER_ADDR to its host name"
        )
    return LaunchEnvironment(
        launcher="srun",
        run_id=run_id,
        rank=_number(env, "SLURM_PROCID"),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS", default=_number(env, "SLURM_NTASKS", default=1)),
        master=(host, _number(env, "MASTER_PORT", default=_port_for(run_id))) if host else None,
        is_one_host=num_nodes == 1 or None,
    )


def _read_skypilot(env: Mapping[str, str]) -> LaunchEnvironment:
    run_id = env.get("SKYPILOT_TASK_ID", "")
    hosts = _text(env, "SKYPILOT_NODE_IPS").split()
    return LaunchEnvironment(
        launcher="SkyPilot",
        run_id=run_id,
        rank=_number(env, "SKYPILOT_NODE_RANK"),
        world_size=_number(env, "SKYPILOT_NUM_NODES", default=len(hosts)),
        master=(env.get("MASTER_ADDR") or hosts[0], _number(env, "MASTER_PORT", default=_port_for(run_id))),
    )


def _has(*names: str) -> Callable[[Mapping[str, str]], bool]:
    return lambda env: all(name in env for name in names)


_LAUNCHERS: list[tuple[Callable[[Mapping[str, str]], bool], Callable[[Mapping[str, str]], LaunchEnvironment]]] = [
    (_has("GRADWIRE_RANK"), _read_own),
    (_has("TORCHELASTIC_RUN_ID", "RANK"), _read_torchrun),
    (_has("OMPI_COMM_WORLD_RANK"), _read_open_mpi),
    (_has("PMI_RANK", "MPI_LOCALRANKID"), _read_pmi),  # mpiexec of MPICH or Intel; srun sets PMI_RANK alone
    (_has("SLURM_PROCID", "SLURM_STEP_ID"), _read_slurm),  # without a step it is a batch script that forgot srun
    (_has("PMI_RANK", "PMI_SIZE"), _read_pmi),
    (_has("SKYPILOT_NODE_RANK"), _read_skypilot),
]


def _text(env: Mapping[str, str], name: str) -> str:
    if not env.get(name):
        raise ConfigurationError(f"the launcher did not set {name}, which Cluster.from_env needs; set it on every rank")
    return env[name]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and not env.get(name):
        return default
    text = _text(env, name)
    if not text.isdecimal():
        raise ConfigurationError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _port_for(run_id: str) -> int:
    """Return a port that all ranks of a run agree on, and that two runs on one machine rarely share."""
    return _FIRST_PORT + zlib.crc32(run_id.encode()) % _NUM_PORTS


def first_host(node_list: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[003-005,7],login1`` begins with ``gpu003``."""
    first = re.match(r"(?:[^,\[\]]|\[[^\]]*\])*", node_list)
    text = first.group() if first else ""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", text)


def _parent_id() -> str:
    """Return an identifier of the parent process that is unique until the machine reboots."""
    pid = os.getppid()
    try:
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start = ""
    return f"parent-{pid}-{start}"


def is_here(host: str) -> bool:
    """Return whether a host name or address belongs to this machine (and network namespace)."""
    if host in (socket.gethostname(), socket.getfqdn(), "localhost"):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
                return True
        except OSError:
            continue
    return False
