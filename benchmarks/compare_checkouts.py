"""The tiny context of this checkout and of another one, in turns.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/compare_checkouts.py /tmp/before

Each checkout has a caller and a callee of its own. One of them runs a burst of steps while the other is stopped, then they
change places, every other round in reverse order. A ratio is that of neighbours in time; the figures are the median of those
and its quartiles. Below 1, this checkout is faster. Processor time, of both processes, varies less than time on a machine
that has other things to do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from processes import signal_all, with_descendants

HERE = Path(__file__).resolve().parents[1]
NUM_WARM_UP, NUM_STEPS, NUM_BURSTS = 300, 100, 5
ANSWER_S = 120.0


def step(rpc: Any, autograd: Any, torch: Any) -> None:
    """A 4 x 4 matrix product on the callee, and its backward pass."""
    x = torch.ones(4, 4, requires_grad=True)
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("callee", torch.mm, args=(x, x)).sum()])


def used_s() -> float:
    """Processor time of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def drive(meeting: str, name: str) -> None:
    """Be the caller or the callee. The caller runs a burst for each line, and answers with time and processor time."""
    import torch  # not in the process that compares

    from gradwire import autograd, rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting)
    rpc.init_rpc(name, rank=int(name == "callee"), world_size=2, rpc_backend_options=options)
    if name == "caller":
        for _ in range(NUM_WARM_UP):
            step(rpc, autograd, torch)
        print("ready", flush=True)
        for _ in sys.stdin:
            times = []
            before = used_s() + rpc.rpc_sync("callee", used_s)
            for _ in range(NUM_STEPS):
                begun = time.perf_counter()
                step(rpc, autograd, torch)
                times.append(time.perf_counter() - begun)
            used = used_s() + rpc.rpc_sync("callee", used_s) - before
            print(statistics.median(times), used / NUM_STEPS, flush=True)
    rpc.shutdown()


class Checkout:
    """Both processes of one checkout, stopped unless it is their turn."""

    def __init__(self, path: Path, stack: contextlib.ExitStack) -> None:
        meeting = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/meeting"
        environment = {**os.environ, "PYTHONPATH": str(path / "src")}
        command = [sys.executable, __file__, "--meeting", meeting, "--name"]
        callee = subprocess.Popen([*command, "callee"], env=environment)
        self._caller = subprocess.Popen(
            [*command, "caller"], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._pids = [callee.pid, self._caller.pid]
        stack.callback(self._end, callee)
        assert self._read() == "ready", f"{path}: the caller has ended"
        self._signal(signal.SIGSTOP)

    def run(self) -> list[tuple[float, float]]:
        """Return seconds and seconds of processor time of a step, of each burst."""
        with self._awake():
            found = []
            for _ in range(NUM_BURSTS):
                assert self._caller.stdin is not None
                print("run", file=self._caller.stdin, flush=True)
                seconds, used = map(float, self._read().split())
                found.append((seconds, used))
        return found

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _read(self) -> str:
        assert self._caller.stdout is not None
        return self._caller.stdout.readline().strip()

    def _signal(self, number: signal.Signals) -> None:
        signal_all(with_descendants(self._pids), number)

    def _end(self, callee: subprocess.Popen[bytes]) -> None:
        self._signal(signal.SIGCONT)
        assert self._caller.stdin is not None
        self._caller.stdin.close()
        for process in (self._caller, callee):
            try:
                process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                process.kill()


def compare(other: Path, num_rounds: int) -> None:
    """Let both take turns, and print the ratios."""
    paths = {"this": HERE, "other": other}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in paths}
    with contextlib.ExitStack() as stack:
        checkouts = {name: Checkout(path, stack) for name, path in paths.items()}
        for number in range(num_rounds):
            for name in list(paths)[:: -1 if number % 2 else 1]:
                bursts = checkouts[name].run()
                found[name].append((min(item[0] for item in bursts), min(item[1] for item in bursts)))
    for column, what in enumerate(("time", "processor time")):
        ratios = [this[column] / before[column] for this, before in zip(found["this"], found["other"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        this, before = (statistics.median(item[column] for item in found[name]) * 1e6 for name in paths)
        print(f"{what}: {this:.0f} us here, {before:.0f} us there; ratio {middle:.3f} ({low:.3f} to {high:.3f})")


def main() -> None:
    """Read the options, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.meeting:
        drive(arguments.meeting, arguments.name)
    elif arguments.other is None or not (arguments.other / "src" / "gradwire").is_dir():
        parser.error("give the folder of another checkout of gradwire")
    else:
        compare(arguments.other, arguments.rounds)


if __name__ == "__main__":
    main()
