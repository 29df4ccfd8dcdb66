"""The contract of clusters, for any way of starting workers.

    check_cluster("my_package.launchers:start")

`start` names a function that takes the number of workers and the options that all clusters share (``imports=``), and returns
a `gradwire.Cluster`. Checks run in separate programs, which can be interrupted and killed, as a driver may be:

    <command> -m gradwire.testing.cluster_program <start> <check> ...

If another program starts the driver, as torchrun does, pass it as `command`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import operator
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import gradwire as gw
from gradwire.cluster import Cluster
from gradwire.dashboard.worker_report import REPORT, WorkerReport
from gradwire.errors import AuthenticationFailed, GradwireError, WorkerLost, WorkerStartFailed
from gradwire.observe.recorder import decode_events
from gradwire.testing.agents import wait_until

__all__ = ["CLUSTER_CHECKS", "check_cluster"]

NUM_WORKERS = 2
_PROGRAM = "gradwire.testing.cluster_program"
_SERVE = "gradwire-contract-pids:"
_ENDED = ("ctrl_c", "driver_death")  # checks whose driver is ended
_PASSED = "gradwire-contract: passed"
_GONE_S = 20.0
_REPORT_S = 10.0
_OTHER_VERSION = "0.0.0+other"

Start = Callable[..., Cluster]


def check_cluster(
    start: str,
    command: Sequence[str] = (sys.executable,),
    checks: Sequence[str] | None = None,
    can_repeat: bool = True,
    timeout_s: float = 120.0,
) -> None:
    """Run the checks of the contract, and raise for the first one that fails.

    Args:
        start: The function that starts the cluster, as ``"module:function"``.
        command: Command that runs a Python module: an interpreter, or torchrun and its options.
        checks: Some of `CLUSTER_CHECKS`; all of them by default.
        can_repeat: Whether a program can start one cluster after another; then fewer programs are started.
        timeout_s: Seconds a program may take.

    Raises:
        AssertionError: A check failed; the message has the output of its program.
    """
    wanted = CLUSTER_CHECKS if checks is None else checks
    programs = [[check] for check in wanted]
    if can_repeat:  # all checks that end normally in one program
        programs = [
            [check for check in wanted if check not in _ENDED],
            *([check] for check in wanted if check in _ENDED),
        ]
    for program in filter(None, programs):
        watch = _WATCHERS.get(program[0], _watch_success)
        _Program([*command, "-m", _PROGRAM, start, *program], timeout_s).run(watch)


class _Program:
    """The driver of one check, in a separate process."""

    def __init__(self, command: Sequence[str], timeout_s: float) -> None:
        self._command = command
        self._deadline = time.monotonic() + timeout_s
        self._lines: list[str] = []
        self._process: subprocess.Popen[str] | None = None

    def run(self, watch: Callable[[_Program], None]) -> None:
        with subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            self._process = process
            reader = threading.Thread(target=self._read, name="gradwire-testing-output", daemon=True)
            reader.start()
            try:
                watch(self)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                reader.join(5.0)

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # it was closed
            for line in self._process.stdout:
                self._lines.append(line.rstrip("\n"))

    @property
    def output(self) -> str:
        return "\n".join(self._lines)

    def fail(self, text: str) -> AssertionError:
        return AssertionError(f"{text}\n$ {' '.join(self._command)}\n{self.output}")

    def wait_exit(self) -> int:
        assert self._process is not None
        try:
            return self._process.wait(max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self.fail("the program of this check did not end") from None

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it has printed a line that matches the pattern."""
        assert self._process is not None
        found: list[re.Match[str]] = []

        def look() -> bool:
            found[:] = [match for line in list(self._lines) if (match := re.search(pattern, line))]
            if not found and self._process is not None and self._process.poll() is not None:
                raise self.fail(f"the program of this check ended before it printed {pattern!r}")
            return bool(found)

        try:
            wait_until(look, max(0.1, self._deadline - time.monotonic()))
        except TimeoutError:
            raise self.fail(f"the program of this check did not print {pattern!r}") from None
        return found[0]

    def end_driver(self, signum: int) -> None:
        """Wait until the cluster is up, send the driver a signal, and check that all workers end."""
        driver, *workers = (int(pid) for pid in self.wait_for(f"{_SERVE} ([0-9 ]+)")[1].split())
        begun = {pid: _start_time(pid) for pid in workers}
        assert all(begun.values()), f"not all of the workers {workers} are processes of this machine"
        os.kill(driver, signum)
        try:
            wait_until(lambda: all(_start_time(pid) != start for pid, start in begun.items()), _GONE_S)
        except TimeoutError:
            left = [pid for pid, start in begun.items() if _start_time(pid) == start]
            raise self.fail(f"workers are still running {_GONE_S:g} s after the driver ended: {left}") from None


def _start_time(pid: int) -> str | None:
    """Return when a process started, which distinguishes it from a later one with the same id; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


# In the process that runs the checks.


def _watch_success(program: _Program) -> None:
    program.wait_for(f"^{_PASSED}$")
    program.wait_exit()  # its code is that of the launcher, which may count a refused worker as a failure


def _watch_output(program: _Program) -> None:
    for rank in range(NUM_WORKERS):
        name = program.wait_for(f"workers: rank {rank} is ([A-Za-z0-9_.-]+)")[1]
        program.wait_for(rf"{re.escape(name)}\b.*printed by rank {rank} on stdout")
        program.wait_for(rf"{re.escape(name)}\b.*printed by rank {rank} on stderr")
    _watch_success(program)


def _watch_interrupt(program: _Program) -> None:
    program.end_driver(signal.SIGINT)
    if program.wait_exit() == 0:
        raise program.fail("a program that was interrupted exited with 0")


def _watch_kill(program: _Program) -> None:
    program.end_driver(signal.SIGKILL)


_WATCHERS = {
    "works": _watch_output,
    "ctrl_c": _watch_interrupt,
    "driver_death": _watch_kill,
}


# In the driver of a check.


def _add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def _fail(text: str) -> None:
    raise KeyError(text)


def _print_both(rank: int) -> None:
    print(f"printed by rank {rank} on stdout")
    print(f"printed by rank {rank} on stderr", file=sys.stderr)


def _wait_forever() -> None:
    threading.Event().wait()


def _double(x: gw.rpc.RRef[Tensor]) -> Tensor:
    return x.to_here() * 2


def check_calls(cluster: Cluster) -> None:
    """Check calls, futures, map, names and ranks."""
    workers = cluster.workers
    assert len(workers) == NUM_WORKERS
    assert [worker.rank for worker in workers] == sorted(worker.rank for worker in workers)
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    for worker in workers:
        assert torch.equal(worker.call(_add, x, y), x + y)
        # Strides do not travel, and some processors round a product with a transposed operand differently.
        assert torch.allclose(worker.submit(torch.mm, x, y.T).wait(), x @ y.T)
        assert worker.call(gw.rpc.get_worker_info) == worker.info
        big = torch.rand(1 << 20)
        assert torch.equal(worker.call(torch.neg, big), -big)
    assert cluster.map(abs, [-1, 2, -3]) == [1, 2, 3]
    first, last = workers[0], workers[-1]
    # From worker to worker, without the driver.
    assert torch.equal(first.call(gw.rpc.rpc_sync, last.name, _add, (x, y)), x + y)
    status = cluster.status()
    assert [row.name for row in status] == [worker.name for worker in workers]
    assert {row.state for row in status} == {"running"}
    assert all(worker.name in cluster.describe() for worker in workers)


def check_references(cluster: Cluster) -> None:
    """Check references to values on other workers."""
    owner, user = cluster.workers[0], cluster.workers[-1]
    reference = gw.rpc.remote(owner.name, torch.full, args=((2, 2), 21.0))
    assert reference.owner() == owner.info
    assert torch.equal(reference.to_here(), torch.full((2, 2), 21.0))
    assert torch.equal(user.call(_double, reference), torch.full((2, 2), 42.0))


def _gradients(context_id: int, module: gw.rpc.RRef[nn.Module]) -> list[Tensor]:
    gradients = gw.autograd.get_gradients(context_id)
    return [gradients[parameter] for parameter in module.local_value().parameters()]


def _make_layer(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(4, 4)


def _loss(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> Tensor:
    for layer in layers:
        x = torch.tanh(layer(x))
    return x.square().sum()


def check_autograd(cluster: Cluster) -> None:
    """Check that gradients of a model that is split over the workers equal those of one process."""
    remote = [worker.module(_make_layer, worker.rank) for worker in cluster.workers]
    local = [_make_layer(worker.rank) for worker in cluster.workers]
    x = torch.rand(8, 4, requires_grad=True)
    torch.autograd.backward(_loss(local, x))
    with gw.autograd.context() as ctx:
        ctx.backward(_loss(remote, x))
        torch.testing.assert_close(gw.autograd.get_gradients(ctx)[x], x.grad)
        for worker, there, here in zip(cluster.workers, remote, local, strict=True):
            expected = [parameter.grad for parameter in here.parameters() if parameter.grad is not None]
            found = worker.call(_gradients, int(ctx), there.get_module_rref())
            torch.testing.assert_close(found, expected)  # on the driver: its first call takes a second


def check_optimizer(cluster: Cluster) -> None:
    """Check that steps of a distributed optimizer equal those of one process."""
    remote = [worker.module(_make_layer, worker.rank) for worker in cluster.workers]
    local = nn.ModuleList(_make_layer(worker.rank) for worker in cluster.workers)
    x = torch.rand(8, 4)
    ours = gw.optim.DistributedOptimizer(torch.optim.AdamW, remote, lr=0.05)
    torchs = torch.optim.AdamW(local.parameters(), lr=0.05)
    for _ in range(3):
        torchs.zero_grad()
        expected = _loss(list(local), x)
        torch.autograd.backward(expected)
        torchs.step()
        with gw.autograd.context() as ctx:
            loss = _loss(remote, x)
            ctx.backward(loss)
            ours.step(ctx)
        torch.testing.assert_close(loss, expected)


def check_checkpoint(cluster: Cluster) -> None:
    """Check that objects on workers can be saved and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        x = torch.rand(8, 4)
        saved = [worker.module(_make_layer, worker.rank) for worker in cluster.workers]
        gw.checkpoint.save(folder, {"layers": saved, "step": 7})
        loaded = [worker.module(_make_layer, 99) for worker in cluster.workers]
        assert gw.checkpoint.load(folder, {"layers": loaded}) == {"step": 7}
        assert torch.equal(_loss(loaded, x), _loss(saved, x))


def check_exceptions(cluster: Cluster) -> None:
    """Check that an exception arrives as its own type, with the remote traceback."""
    for worker in cluster.workers:
        with _raises(KeyError, "lost property", worker.name):
            worker.call(_fail, "lost property")
        assert worker.call(abs, -1) == 1


def check_output(cluster: Cluster) -> None:
    """Check that the output of workers appears here, with their names."""
    for worker in cluster.workers:
        print(f"workers: rank {worker.rank} is {worker.name}", flush=True)
        worker.call(_print_both, worker.rank)


def check_trace(cluster: Cluster) -> None:
    """Check that one trace has the calls of all workers, and arrows between them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json")
        with cluster.trace(path) as trace:
            for worker in cluster.workers:
                worker.call(abs, -1)
        assert [item.problem for item in trace.workers] == [None] * (1 + len(cluster.workers))
        entries = json.loads(path.read_text())["traceEvents"]
    runs = [item["pid"] for item in entries if item["name"] == "run abs"]
    assert len(set(runs)) == len(runs) == len(cluster.workers)
    sent, received = ({item["id"] for item in entries if item["ph"] == kind} for kind in "sf")
    assert sent == received
    assert len(sent) == 2 * len(cluster.workers)


def check_reports(cluster: Cluster) -> None:
    """Check that every worker tells the driver what the dashboard shows; its server need not be installed."""
    names = [worker.name for worker in cluster.workers]
    for _ in range(2):  # the first lets the workers observe
        reports = cluster._agent.ask_all(names, REPORT, (), _REPORT_S, WorkerReport)
        for worker in cluster.workers:
            worker.call(abs, -1)
    assert list(reports) == names
    assert all(decode_events(report.events, name) for name, report in reports.items())


def check_failed_start(start: Start) -> None:
    """Check that a worker that cannot start raises an error with its traceback, and leaves nothing behind."""
    with _raises(WorkerStartFailed, "ModuleNotFoundError", "gradwire_has_no_such_module"):
        start(NUM_WORKERS, imports=("gradwire_has_no_such_module",))
    assert Cluster.current() is None


def check_worker_death(start: Start) -> None:
    """Check that the death of a worker fails the calls to it, and only those."""
    with start(NUM_WORKERS) as cluster:
        first, last = cluster.workers[0], cluster.workers[-1]
        future = first.submit(_wait_forever)
        begun = time.monotonic()
        with contextlib.suppress(GradwireError):
            first.call(os.kill, first.call(os.getpid), signal.SIGKILL)
        with _raises(WorkerLost, first.name):
            future.wait()
        assert time.monotonic() - begun < 10
        with _raises(WorkerLost, first.name):
            last.call(gw.rpc.rpc_sync, first.name, abs, (-1,))
        assert last.call(abs, -2) == 2
        wait_until(lambda: not first.is_alive, 10.0)


def check_other_version(start: Start) -> None:
    """Check that a worker of another version is refused, with both versions in the error."""
    kinds = (WorkerStartFailed, AuthenticationFailed, WorkerLost)
    imports = ("gradwire.testing._other_version",)
    with _raises(kinds, _OTHER_VERSION, gw.__version__), start(NUM_WORKERS, imports=imports) as cluster:
        cluster.workers[0].call(abs, -1)


def _serve(start: Start) -> None:
    with start(NUM_WORKERS) as cluster:
        futures = [worker.submit(_wait_forever) for worker in cluster.workers]
        pids = [os.getpid(), *(worker.call(os.getpid) for worker in cluster.workers)]
        print(_SERVE, *pids, flush=True)
        for future in futures:
            future.wait()


def check_ctrl_c(start: Start) -> None:
    """Check that Ctrl-C in the driver ends all workers."""
    _serve(start)


def check_driver_death(start: Start) -> None:
    """Check that the death of the driver ends all workers."""
    _serve(start)


@contextlib.contextmanager
def _raises(kind: type[Exception] | tuple[type[Exception], ...], *texts: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        said = "".join(traceback.format_exception(error))  # with its cause: the traceback of the worker
        missing = [text for text in texts if text not in said]
        assert not missing, f"the error does not mention {missing}: {said}"
    else:
        raise AssertionError(f"{kind} was not raised")


_ON_ONE_CLUSTER = (
    check_calls,
    check_references,
    check_autograd,
    check_optimizer,
    check_checkpoint,
    check_exceptions,
    check_output,
    check_trace,
    check_reports,
)


def check_works(start: Start) -> None:
    """Run all checks that use a working cluster."""
    with start(NUM_WORKERS) as cluster:
        for check in _ON_ONE_CLUSTER:
            print(check.__doc__, flush=True)
            check(cluster)


_CHECKS: dict[str, Callable[[Start], None]] = {
    check.__name__.removeprefix("check_"): check
    for check in (
        check_works,
        check_worker_death,
        check_failed_start,
        check_other_version,
        check_ctrl_c,
        check_driver_death,
    )
}
CLUSTER_CHECKS = tuple(_CHECKS)
"""The names of all checks."""


def run_checks(start: str, *checks: str) -> None:
    """Run checks in this process, as their driver."""
    module, _, function = start.partition(":")
    found: Start = operator.attrgetter(function)(importlib.import_module(module))
    for check in checks:
        _CHECKS[check](found)
    print(_PASSED, flush=True)
