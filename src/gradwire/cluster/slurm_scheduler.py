"""`Cluster.slurm`: workers in a job that submitit gives to Slurm, or runs on this machine instead.

    driver --- submitit, sbatch ---> job: one task for each worker
       |                                   |
       +---- files in a private folder ----+      until the workers listen

The channel is a folder that both see through a shared file system, and that no other user can write to: as with
submitit's own files beside it, which hold what the job runs.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import secrets
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradwire import _interrupts
from gradwire.cluster.kv_store import FolderStore, make_private_folder
from gradwire.cluster.message_auth import NoAuth
from gradwire.cluster.network_address import ELSEWHERE, address_towards
from gradwire.cluster.remote_worker import RemoteWorker
from gradwire.cluster.scheduler import RemoteProcess
from gradwire.cluster.store_exchange import DriverExchange, ExchangeProcess, Hello, WorkerExchange
from gradwire.errors import ConfigurationError, RendezvousFailed, WorkerLost, WorkerStartFailed

_TOPIC = "slurm"
_LOOPBACK = "127.0.0.1"
_LOOK_AT_JOB_S = 2.0  # Slurm's accounting is a shared service
_END_S = 2.0  # for tasks to end by themselves
_LOOK_S = 0.05
_GLANCE_S = 0.05  # how long the watch over all workers waits for Slurm
_COMMAND_S = 10.0
_TAIL_BYTES = 4096
_SECONDS = (1, 60, 3600, 86400)
_UNFINISHED = frozenset(
    ("PENDING", "CONFIGURING", "RUNNING", "READY", "REQUEUED", "RESIZING", "SUSPENDED", "COMPLETING", "UNKNOWN")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """The Slurm options of `gradwire.Cluster.slurm`."""

    nodes: int
    workers_per_node: int
    time: str | int = 60
    partition: str | None = None
    account: str | None = None
    prologue: Sequence[str] = ()
    extra: Sequence[str] = ()
    folder: str | Path = "logs/%j"
    executor: Literal["slurm", "local"] = "slurm"

    def __post_init__(self) -> None:
        counts: dict[str, object] = {"nodes": self.nodes, "workers_per_node": self.workers_per_node}
        for option, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{option} must be an integer of at least 1, not {value!r}")
        if self.executor not in ("slurm", "local"):
            raise ConfigurationError(f'executor must be "slurm" or "local", not {self.executor!r}')
        if self.executor == "local" and self.nodes > 1:
            raise ConfigurationError(f'executor="local" runs on this machine only: nodes must be 1, not {self.nodes}')
        for option, lines in (("prologue", self.prologue), ("extra", self.extra)):
            if isinstance(lines, str) or not all(isinstance(line, str) for line in lines):
                raise ConfigurationError(f"{option} must be a list of strings, not {lines!r}")
        minutes_of(self.time)
        flags_of(self.extra)

    @property
    def num_workers(self) -> int:
        return self.nodes * self.workers_per_node


def minutes_of(limit: str | int) -> int:
    """Return a time limit in whole minutes, rounded up.

    Args:
        limit: Minutes, or a string in sbatch's format: ``30``, ``30:00``, ``1:30:00``, ``2-12``, ``2-12:30:00``.

    Raises:
        ConfigurationError: The limit is not valid.
    """
    days, has_days, rest = str(limit).rpartition("-")
    parts = rest.split(":")
    if not all(part.isdecimal() for part in parts) or len(parts) > 3 or (has_days and not days.isdecimal()):
        raise ConfigurationError(
            f'time must be a number of minutes or a string such as "1:30:00" or "2-12:00:00", not {limit!r}'
        )
    # With days the first part is hours; else one part is minutes, two are minutes and seconds.
    numbers = [int(part) for part in parts]
    first_unit = 2 if has_days or len(parts) == 3 else 1
    seconds = sum(number * _SECONDS[first_unit - index] for index, number in enumerate(numbers))
    seconds += int(days or 0) * _SECONDS[3]
    if not seconds:
        raise ConfigurationError(f"time must be positive, not {limit!r}")
    return math.ceil(seconds / 60)


def flags_of(extra: Sequence[str]) -> dict[str, str | bool]:
    """Return options of sbatch by name: ``["--constraint=a100", "--exclusive"]``.

    Raises:
        ConfigurationError: One is not in that form.
    """
    found: dict[str, str | bool] = {}
    for text in extra:
        match = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.+))?", text)
        if match is None:
            raise ConfigurationError(f'extra takes sbatch options such as "--name=value" or "--name", not {text!r}')
        found[match[1]] = True if match[2] is None else match[2]
    return found


def job_parameters(options: SlurmOptions, nodes: int, tasks_per_node: int) -> dict[str, Any]:
    """Return the arguments for `submitit.AutoExecutor.update_parameters`."""
    if options.executor == "local":
        more: dict[str, Any] = {"local_setup": list(options.prologue)} if options.prologue else {}
    else:
        more = {
            "slurm_partition": options.partition,
            "slurm_account": options.account,
            "slurm_setup": list(options.prologue) or None,
            # A worker that dies must not take the others down, and a requeued job would not find a driver.
            "slurm_srun_args": ["--kill-on-bad-exit=0", "--wait=0"],
            "slurm_additional_parameters": {"no-requeue": True, **flags_of(options.extra)},
        }
    return {
        "name": "gradwire",
        "timeout_min": minutes_of(options.time),
        "nodes": nodes,
        "tasks_per_node": tasks_per_node,
        **more,
    }


class SlurmScheduler:
    """Starts workers as tasks of jobs.

    Args:
        options: Options of the job.
        start_timeout_s: How long a task waits for the driver to make it a worker.
    """

    def __init__(self, options: SlurmOptions, start_timeout_s: float) -> None:
        self._options = options
        self._start_timeout_s = start_timeout_s
        self._submitit = _import_submitit()
        self._lock = threading.Lock()  # guards what follows, and the executor
        self._jobs: list[_Job] = []
        self._processes: list[SlurmProcess] = []
        self._num_tasks = 0
        self._is_closed = False
        folder = Path(options.folder).expanduser().absolute()
        base = self._submitit.core.utils.JobPaths.get_first_id_independent_folder(folder).resolve()
        make_private_folder(base)
        self._store = FolderStore(make_private_folder(base / f"exchange-{secrets.token_hex(8)}"))
        self._exchange = DriverExchange(self._store, _TOPIC, NoAuth(), "task")
        try:
            self._executor = self._submitit.AutoExecutor(_folder_of(folder, options.executor), cluster=options.executor)
        except RuntimeError as error:
            self._store.remove()
            raise ConfigurationError(
                f"Cluster.slurm cannot reach Slurm: {error} Run the program where srun and sbatch work, or try it on this "
                'machine with executor="local"'
            ) from error

    def launch(self, count: int, deadline: float, replaces: RemoteProcess | None = None) -> Sequence[SlurmProcess]:
        per_node = self._options.workers_per_node
        full_nodes, rest = divmod(count, per_node)
        with contextlib.ExitStack() as undo:  # a job in the queue would start later, for nothing
            jobs = []
            for nodes, num_tasks in ((full_nodes, per_node), (1, rest)):
                if nodes and num_tasks:
                    jobs.append(self._submit(nodes, num_tasks))
                    undo.callback(jobs[-1].cancel)
            tasks = {number: job for job in jobs for number in job.numbers}
            hellos = self._wait_hellos(tasks, jobs, deadline)
            processes = [
                SlurmProcess(self._exchange, number, hellos[number], job, self._store) for number, job in tasks.items()
            ]
            with self._lock:
                self._processes += processes
            undo.pop_all()
        return processes

    def _wait_hellos(self, tasks: Mapping[int, _Job], jobs: Sequence[_Job], deadline: float) -> Mapping[int, Hello]:
        def check(missing: set[int]) -> None:
            if self._is_closed:
                raise WorkerStartFailed("the cluster is closed")
            for job in jobs:
                job.check(missing)

        try:
            return self._exchange.wait_hellos(tasks, deadline, check)
        except WorkerStartFailed as error:
            raise WorkerStartFailed(f"{error}. {' '.join(job.state_text() for job in jobs)}") from error

    def bind_host(self) -> str:
        return _LOOPBACK if self._options.executor == "local" else address_towards(ELSEWHERE)

    def describe(self) -> str:
        return "\n".join(job.describe() for job in self._jobs) or "no job was submitted"

    def close(self) -> None:
        """End the jobs, cancelling those whose workers have not exited, and remove the folder of the channel."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            jobs, processes = list(self._jobs), list(self._processes)
        with contextlib.suppress(RendezvousFailed):
            self._exchange.give_up("the driver has exited")  # for tasks that are not workers yet
        deadline = time.monotonic() + _END_S
        while not all(job.has_ended() for job in jobs) and time.monotonic() < deadline:
            _interrupts.sleep(_LOOK_S)
        for job in jobs:
            job.cancel()
        for process in processes:
            process.close()
        self._store.remove()

    def _submit(self, nodes: int, tasks_per_node: int) -> _Job:
        # To the end: the executor has one set of parameters, for the next job, and `close` ends all jobs.
        with self._lock:
            if self._is_closed:
                raise WorkerStartFailed("no job was submitted: the cluster is closed")
            first = self._num_tasks
            self._num_tasks += nodes * tasks_per_node
            try:
                self._executor.update_parameters(**job_parameters(self._options, nodes, tasks_per_node))
                job = self._executor.submit(run_task, str(self._store.where), first, self._start_timeout_s)
            except Exception as error:  # whatever sbatch complains about
                scheduler = "Slurm" if self._options.executor == "slurm" else "submitit"
                text = f"{scheduler} did not accept the job: {type(error).__name__}: {error}"
                raise WorkerStartFailed(text) from error
            made = _Job(job, range(first, first + nodes * tasks_per_node), self._options.executor)
            self._jobs.append(made)
        return made


class _Job:
    """One job of submitit."""

    def __init__(self, job: Any, numbers: range, executor: str) -> None:
        self.numbers = numbers
        self.id = str(job.job_id)
        self._job = job
        self._executor = executor
        self._process: subprocess.Popen[bytes] | None = getattr(job, "_process", None)  # of a job on this machine
        self._next_look = 0.0
        self._seen_state = "UNKNOWN"
        self._look_thread: threading.Thread | None = None

    def state(self, wait_s: float = _GLANCE_S, is_starting: bool = False) -> str:
        """Return the job's state from Slurm if it responds within `wait_s`; otherwise the last known one.

        During the start, Slurm is queried every few seconds. Later, submitit decides how often; most exits are detected by
        the end of a connection.
        """
        if time.monotonic() >= self._next_look and not (self._look_thread and self._look_thread.is_alive()):
            self._next_look = time.monotonic() + _LOOK_AT_JOB_S
            self._look_thread = _run_for(wait_s, self._look, "force" if is_starting else "standard")
        return self._seen_state

    def _look(self, mode: str) -> None:
        info = self._job.get_info(mode=mode)
        self._seen_state = str(info.get("State") or info.get("jobState") or "UNKNOWN")

    def is_over(self, is_starting: bool = False) -> bool:
        return self.state(is_starting=is_starting).split(" ")[0].upper() not in _UNFINISHED

    def check(self, missing: set[int]) -> None:
        """Raise if a task that has not arrived will not."""
        for number in sorted(missing & set(self.numbers)):
            if self.has_result(number) or self.is_over(is_starting=True):
                raise WorkerStartFailed(f"task {number} exited before it became a worker. {self.state_text(number)}")

    def has_result(self, number: int) -> bool:
        """Return whether submitit has recorded how a task ended."""
        return bool(self._paths(number).result_pickle.exists())

    def state_text(self, number: int | None = None) -> str:
        """Return a description of the job's current state, with the end of a task's log."""
        self._next_look = 0.0
        return self.describe_end(
            self.numbers[0] if number is None else number, self.state(_COMMAND_S, is_starting=True)
        )

    def describe_end(self, number: int, state: str) -> str:
        if state.startswith("PENDING"):
            return (
                f"Job {self.id} is {state}{_queue_reason(self.id)}; raise start_timeout_s (or timeout, for add_workers), or "
                "request fewer resources."
            )
        paths = self._paths(number)
        for log in (paths.stderr, paths.stdout):
            if text := _tail(log):
                return f"Job {self.id} is {state}; the end of {log}:\n{text}"
        return (
            f"Job {self.id} is {state}, and {paths.stderr} is missing or empty. If the job has run, check that its folder "
            "is on a file system that all machines share."
        )

    def describe(self) -> str:
        tasks = f"{len(self.numbers)} task{'s' if len(self.numbers) > 1 else ''}"
        if self._executor == "local":
            return f"job {self.id} on this machine, {tasks}, logs in {self._job.paths.folder}"
        script = self._job.paths.submission_file
        with contextlib.suppress(OSError):
            return f"Slurm job {self.id}, {tasks}, from {script}:\n{script.read_text()}"
        return f"Slurm job {self.id}, {tasks}, from {script}"

    def has_ended(self) -> bool:
        """Return whether all tasks have ended, as far as that is known without querying Slurm."""
        if self._process is not None:
            return self._process.poll() is not None
        return all(self.has_result(number) for number in self.numbers)

    def cancel(self) -> None:
        """Cancel the job if it is still running, and wait for its process if that is on this machine."""
        if self.has_ended():
            return
        _run_for(_COMMAND_S, self._cancel)
        if self._process is None:
            return
        try:
            self._process.wait(_COMMAND_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_COMMAND_S)

    def _cancel(self) -> None:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._job.cancel(check=False)

    def _paths(self, number: int) -> Any:
        return self._job.task(number - self.numbers[0]).paths


class SlurmProcess(ExchangeProcess):
    """A task of a job."""

    def __init__(self, exchange: DriverExchange, number: int, hello: Hello, job: _Job, store: FolderStore) -> None:
        super().__init__(exchange, number, hello, place=f"job {job.id}, task {number - job.numbers[0]}")
        self._job = job
        self._store = store
        self._next_look = 0.0

    def end_reason(self) -> str | None:
        if super().end_reason() is None:
            now = time.monotonic()
            if now < self._next_look:
                return None
            self._next_look = now + _LOOK_AT_JOB_S
            if not self._job.has_result(self.number) and not self._job.is_over():
                return None
        with contextlib.suppress(RendezvousFailed):
            if self._store.get(_left_key(self.number)) is not None:
                return "it left"
        return f"its task exited. {self._job.describe_end(self.number, self._job.state())}"

    def kill(self) -> None:
        """Kill the process on this machine, or cancel the job of a task that has its own.

        Slurm cannot cancel a single task of several. It exits when it loses the driver, and with the job at the latest.
        """
        super().kill()
        if not self.is_here and len(self._job.numbers) == 1 and not self._job.is_over():
            self._job.cancel()


def run_task(folder: str, first: int, start_timeout_s: float) -> None:
    """Run a worker; the entry point of each task of a job."""
    environment = _import_submitit().JobEnvironment()
    number = first + environment.global_rank
    store = FolderStore(Path(folder))
    worker = RemoteWorker(local_index=number)
    exchange = WorkerExchange(store, _TOPIC, number, NoAuth())
    exchange.serve(worker.handle, lambda: worker.has_driver, time.monotonic() + start_timeout_s)
    lost_reason = worker.serve()
    if lost_reason is not None:
        raise WorkerLost(f"the driver was lost: {lost_reason}")
    with contextlib.suppress(RendezvousFailed):  # the driver has ended already
        store.set(_left_key(number), b"")


def _run_for(seconds: float, function: Callable[..., None], *args: object) -> threading.Thread:
    """Run a Slurm query with a timeout: submitit has none, and a controller may not respond for minutes."""
    thread = threading.Thread(target=function, args=args, name="gradwire-driver-slurm", daemon=True)
    thread.start()
    thread.join(seconds)
    return thread


def _left_key(number: int) -> str:
    return f"{number}.left"


def _import_submitit() -> Any:
    try:
        return importlib.import_module("submitit")
    except ImportError as error:
        raise ConfigurationError(f"Cluster.slurm needs submitit ({error}): pip install 'gradwire[slurm]'") from error


def _folder_of(folder: Path, executor: str) -> Path:
    """Return submitit's folder, with a generated name for the local executor, which opens files before it creates one."""
    return Path(str(folder).replace("%j", f"local-{secrets.token_hex(4)}")) if executor == "local" else folder


def _tail(log: Path) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode("utf-8", "replace").strip()
    except OSError:
        return ""


def _queue_reason(job_id: str) -> str:
    text = _run("squeue", "--noheader", "--jobs", job_id, "--format=%r")
    return f" ({text})" if text else ""


def _run(*command: str) -> str:
    """Run a Slurm command, if it is installed, and return its output."""
    if shutil.which(command[0]) is None:
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)
        return done.stdout.strip()
    return ""
