"""Where the time of a call goes: hottest lines of driver and server (py-spy), or a call tree (pyinstrument).

python benchmarks/profile_call.py --seconds 5
python benchmarks/profile_call.py --peer GradwireTcp --num-bytes 4096 --tree
"""

from __future__ import annotations

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # works without an installed package, too

from peers import PEERS

NUM_LINES = 20


def call_for(peer: Any, seconds: float, tensor: torch.Tensor | None) -> float:
    """Calls for so long; returns the mean seconds per call."""
    start, num_calls = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        peer.noop() if tensor is None else peer.echo(tensor)
        num_calls += 1
    return (time.perf_counter() - start) / num_calls


def record(pid: int, seconds: float, file: Path, is_gil_only: bool) -> subprocess.Popen[bytes]:
    """Starts py-spy on a process; it needs leave to trace (root, or kernel.yama.ptrace_scope = 0)."""
    rate, duration = ("--rate", "500"), ("--duration", str(round(seconds)))
    spy = Path(sys.executable).with_name("py-spy")
    command = [str(spy), "record", "--pid", str(pid), *rate, *duration, "--format", "raw", "--output", str(file)]
    command += ["--gil"] * is_gil_only
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def print_hottest(title: str, file: Path) -> None:
    """Samples by the line that was running, of all threads."""
    hits: collections.Counter[str] = collections.Counter()
    for line in file.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        hits[stack.split(";")[-1]] += int(count)
    print(f"\n{title}: {sum(hits.values())} samples")
    for place, count in hits.most_common(NUM_LINES):
        print(f"  {count / sum(hits.values()):6.1%}  {place}")


def profile_lines(peer: Any, seconds: float, tensor: torch.Tensor | None, is_gil_only: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = {pid: Path(folder) / str(pid) for pid in (os.getpid(), peer.servers[0].pid)}
        spies = [record(pid, seconds, file, is_gil_only) for pid, file in files.items()]
        call_for(peer, seconds + 1, tensor)  # longer than the recording, so that all of it is busy
        if any(spy.wait(60) for spy in spies):
            raise SystemExit("py-spy could not record; try --tree")
        for title, file in zip(("driver", "server"), files.values(), strict=True):
            print_hottest(title, file)


def profile_tree(peer: Any, seconds: float, tensor: torch.Tensor | None) -> None:
    import pyinstrument

    with pyinstrument.Profiler(interval=0.0005) as profiler:
        call_for(peer, seconds, tensor)
    print(profiler.output_text(show_all=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=PEERS, default="Gradwire")
    parser.add_argument("--num-bytes", type=int, default=0, help="echo a tensor of this size; 0 for no-ops")
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--waits", action="store_true", help="also lines that wait; without it, only Python at work")
    parser.add_argument("--tree", action="store_true", help="pyinstrument's call tree of the driver")
    arguments = parser.parse_args()
    tensor = torch.ones(arguments.num_bytes // 4) if arguments.num_bytes else None
    peer = PEERS[arguments.peer]()
    peer.start()
    try:
        print(f"{arguments.peer}: {call_for(peer, 1, tensor) * 1e6:.0f} us per call, unobserved")
        if arguments.tree:
            profile_tree(peer, arguments.seconds, tensor)
        else:
            profile_lines(peer, arguments.seconds, tensor, not arguments.waits)
    finally:
        peer.close()


if __name__ == "__main__":
    main()
