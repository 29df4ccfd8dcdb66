"""How many functions one step enters, in both processes, and in how many files.

    python benchmarks/count_step.py
    python benchmarks/count_step.py --case noop --list
    python benchmarks/count_step.py --device-maps

A step is a tensor through `rpc_sync` in a context, then `backward`. Python's profiler counts in every thread of the caller
and of the callee: functions of gradwire, functions of Python in all, and calls of C functions. Counts repeat where times do
not. The figure is of a warm program, for one step of many, and for each function the fewest calls of all rounds: being woken
varies by a few calls from step to step, and more so on a busy machine. What only some steps enter is therefore left out;
and so is looking for an answer while waiting for it, since how often a thread looks depends on how long it waits.
"""

from __future__ import annotations

import argparse
import collections
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # works without an installed package, too

from gradwire import autograd, rpc  # noqa: E402

OWN = str(SOURCE / "gradwire") + "/"
NUM_ROUNDS = 60
NUM_STEPS = 5
CASES = ("context", "noop", "echo")
BUSY_POLLING = ("poll.poll", "sched_yield")

counts: collections.Counter[tuple[str, str]] = collections.Counter()  # by file and name; "C" for functions in C
is_counting = False


def count(frame: FrameType, event: str, argument: Any) -> None:
    """Note a call, as a profiler of one thread."""
    if is_counting:
        if event == "call":
            code = frame.f_code  # has its qualified name only from Python 3.11 on
            counts[code.co_filename, f"{code.co_name} (line {code.co_firstlineno})"] += 1
        elif event == "c_call":
            name = getattr(argument, "__qualname__", str(argument))
            if name not in BUSY_POLLING:
                counts["C", name] += 1


def options(meeting: str, has_device_maps: bool) -> rpc.TensorPipeRpcBackendOptions:
    """Options with which both processes find each other, and maybe maps that leave tensors on the CPU."""
    maps = {name: {"cpu": "cpu"} for name in ("caller", "callee")} if has_device_maps else {}
    return rpc.TensorPipeRpcBackendOptions(init_method=meeting, device_maps=maps)


def start() -> None:
    """Begin to count in this process."""
    global is_counting
    counts.clear()
    is_counting = True


def stop() -> list[tuple[str, str, int]]:
    """End it; return file, name and number of calls."""
    global is_counting
    is_counting = False
    return [(file, name, number) for (file, name), number in counts.items()]


def double(value: torch.Tensor) -> torch.Tensor:
    """The function that is called."""
    return value * 2


def noop() -> None:
    """A function that does nothing."""


def step(case: str, value: torch.Tensor) -> None:
    """One step of a case."""
    if case == "noop":
        rpc.rpc_sync("callee", noop)
    elif case == "echo":
        rpc.rpc_sync("callee", double, args=(value,))
    else:
        with autograd.context() as context_id:
            result = rpc.rpc_sync("callee", double, args=(value,))
            autograd.backward(context_id, [result.sum()])


def count_steps(case: str, num_steps: int) -> list[dict[tuple[str, str], float]]:
    """Calls of so many steps, by process."""
    value = torch.ones(4, requires_grad=case == "context")
    rpc.rpc_sync("callee", start)
    start()
    for _ in range(num_steps):
        step(case, value)
    here = stop()
    there = rpc.rpc_sync("callee", stop)
    return [{(file, name): number for file, name, number in found} for found in (here, there)]


def measure(case: str) -> list[dict[tuple[str, str], float]]:
    """Calls of one step: those of many without those of none, divided.

    On a busy machine threads are woken more often, so the path itself is what every round enters: for each function,
    the fewest calls of all rounds count.
    """
    count_steps(case, NUM_ROUNDS * NUM_STEPS)
    none = count_steps(case, 0)
    rounds = [count_steps(case, NUM_STEPS) for _ in range(NUM_ROUNDS)]
    return [
        {key: (min(found.get(key, 0) for found in process) - without.get(key, 0)) / NUM_STEPS for key in process[0]}
        for without, process in zip(none, zip(*rounds, strict=True), strict=True)
    ]


def summarize(found: list[dict[tuple[str, str], float]]) -> dict[str, float]:
    """The figures that bars are given for; functions and files entered at least every other step count."""
    entered = {key for one in found for key, number in one.items() if key[0].startswith(OWN) and number >= 0.5}

    def total(is_meant: Callable[[str], bool]) -> float:
        return round(sum(number for one in found for (file, _), number in one.items() if is_meant(file)), 1)

    return {
        "own_calls": total(lambda file: file.startswith(OWN)),
        "own_functions": len(entered),
        "own_files": len({file for file, _ in entered}),
        "python_calls": total(lambda file: file != "C"),
        "c_calls": total(lambda file: file == "C"),
        "all_calls": total(lambda file: True),
    }


def run(case: str, has_device_maps: bool) -> list[dict[tuple[str, str], float]]:
    """Start the callee, count, end both."""
    threading.setprofile(count)
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        more = ["--device-maps"] if has_device_maps else []
        callee = subprocess.Popen([sys.executable, __file__, "--callee", meeting, *more])
        try:
            rpc.init_rpc("caller", rank=0, world_size=2, rpc_backend_options=options(meeting, has_device_maps))
            sys.setprofile(count)
            found = measure(case)
            sys.setprofile(None)
            rpc.shutdown()
        finally:
            callee.wait(60)
    return found


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="context")
    parser.add_argument("--list", action="store_true", help="every function, with the number of its calls")
    parser.add_argument("--json", action="store_true", help="the figures alone")
    parser.add_argument("--device-maps", action="store_true", help="both processes have maps for each other")
    parser.add_argument("--callee", metavar="MEETING", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.callee:
        threading.setprofile(count)
        made = options(arguments.callee, arguments.device_maps)
        rpc.init_rpc("callee", rank=1, world_size=2, rpc_backend_options=made)
        rpc.shutdown()
        return
    found = run(arguments.case, arguments.device_maps)
    figures = summarize(found)
    if arguments.json:
        print(json.dumps(figures))
        return
    for title, one in zip(("caller", "callee"), found, strict=True):
        total = sum(one.values())
        own = sum(number for (file, _), number in one.items() if file.startswith(OWN))
        print(f"{title}: {own:.1f} calls of gradwire's functions, {total:.1f} in all")
        if arguments.list:
            for (file, name), number in sorted(one.items()):
                if number >= 0.05:
                    print(f"  {number:7.2f}  {file.removeprefix(OWN)}  {name}")
    print(
        f"one step ({arguments.case}): {figures['own_calls']} calls of {figures['own_functions']} functions of gradwire "
        f"in {figures['own_files']} files; {figures['all_calls']} calls in all, {figures['c_calls']} of them of C functions"
    )


if __name__ == "__main__":
    main()
