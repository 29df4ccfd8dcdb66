"""What observing costs: a no-op call and a tiny context, with nothing observed, and while all events are recorded.

    python benchmarks/observe_overhead.py
    git worktree add /tmp/before COMMIT && python benchmarks/observe_overhead.py --before /tmp/before/src

Each system is a caller and a callee. They take turns of a few milliseconds, every other time in reverse order. A ratio is
computed inside each round, between neighbours in time. `off` is this code while nothing is observed; `on` records events of
both workers in memory. With ``--before``, `off` is compared with the code in that folder as well; with this folder itself,
that shows how far apart equal times are on this machine. Times of a busy machine say little about 1 %, so the looks at
`events.sink` that a step takes are counted as well, and one look is timed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from statistics import median
from typing import Any

SOURCE = Path(__file__).resolve().parents[1] / "src"
CASES = {"noop": 60, "context": 15}  # steps in one turn
NUM_ROUNDS = 150
NUM_REPEATS = 7
NUM_COUNTED = 50


def noop() -> None:
    """A function that does nothing."""


def double(value: Any) -> Any:
    return value * 2


def observe(is_on: bool) -> None:
    """Record events in this process, or not."""
    if is_on:
        from gradwire.observe.recorder import Recorder
        from gradwire.rpc import current_agent

        Recorder(current_agent().info.name, 200_000).start()


def drive(role: str, meeting: str, is_on: bool) -> None:
    """Be the caller, which reads commands and prints seconds, or the callee."""
    import torch

    from gradwire import autograd, rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting)
    rpc.init_rpc(role, rank=int(role == "callee"), world_size=2, rpc_backend_options=options)
    observe(is_on)
    if role == "caller":
        value = torch.ones(4, 4, requires_grad=True)

        def step(case: str) -> None:
            if case == "noop":
                rpc.rpc_sync("callee", noop)
            else:
                with autograd.context() as context_id:
                    result = rpc.rpc_sync("callee", double, args=(value,))
                    autograd.backward(context_id, [result.sum()])

        print("ready", flush=True)
        for line in sys.stdin:
            case, num_steps = line.split()
            times = []
            for _ in range(int(num_steps)):
                began = time.perf_counter()
                step(case)
                times.append(time.perf_counter() - began)
            print(median(times[len(times) // 5 :]), flush=True)  # the first ones warm up
    rpc.shutdown()


class System:
    """Two processes that run the code of one folder."""

    def __init__(self, source: Path, folder: str, is_on: bool) -> None:
        meeting = f"file://{tempfile.mkdtemp(dir=folder)}/meeting"
        environment = {**os.environ, "PYTHONPATH": str(source)}
        command = [sys.executable, __file__, *(["--on"] if is_on else []), "--drive", meeting]
        self._callee = subprocess.Popen([*command, "callee"], env=environment)
        self._caller = subprocess.Popen(
            [*command, "caller"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> str:
        assert self._caller.stdout is not None
        line = self._caller.stdout.readline()
        if not line:
            raise SystemExit("a process has ended")
        return line

    def take_turn(self, case: str) -> float:
        """Seconds of a step."""
        assert self._caller.stdin is not None
        self._caller.stdin.write(f"{case} {CASES[case]}\n")
        self._caller.stdin.flush()
        return float(self._read())

    def close(self) -> None:
        self._caller.communicate(timeout=60)
        self._callee.wait(60)


def measure(systems: dict[str, System], case: str, num_rounds: int) -> dict[str, list[float]]:
    rounds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(num_rounds):
        for name in list(systems)[:: -1 if number % 2 else 1]:
            rounds[name].append(systems[name].take_turn(case))
    return rounds


def count_hooks() -> dict[str, Any]:
    """How often a step looks whether something is observed, at both ends together, and what one look takes.

    Both ends are in this process. The time is the shortest of many, so it is the same on a busy machine.
    """
    sys.path.insert(0, str(SOURCE))
    import types

    import torch

    from gradwire import autograd, rpc
    from gradwire.observe import events
    from gradwire.testing import local_agents

    num_looks = 0

    class Counting(types.ModuleType):
        @property
        def sink(self) -> None:
            nonlocal num_looks
            num_looks += 1

    found: dict[str, Any] = {}
    with local_agents(2) as agents:
        rpc.set_current_agent(agents[0])
        value = torch.ones(4, 4, requires_grad=True)
        for case in CASES:
            for number in range(NUM_COUNTED + 20):
                if number == 20:
                    num_looks, events.__class__ = 0, Counting
                if case == "noop":
                    rpc.rpc_sync("b", noop)
                else:
                    with autograd.context() as context_id:
                        autograd.backward(context_id, [rpc.rpc_sync("b", double, args=(value,)).sum()])
            time.sleep(0.2)  # releases are not waited for
            events.__class__ = types.ModuleType
            found[case] = round(num_looks / NUM_COUNTED, 1)
        rpc.set_current_agent(None)
    look = "began_ns = clock() if events.sink is not None else 0\nif began_ns:\n    pass\nif began_ns:\n    pass"
    surroundings = {"events": events, "clock": time.monotonic_ns}
    times = [min(timeit.repeat(code, globals=surroundings, number=1000, repeat=300)) for code in (look, "pass")]
    found["ns of a look"] = round((times[0] - times[1]) * 1e6, 1)
    return found


def compare(rounds: dict[str, list[float]], name: str, base: str) -> float:
    """The median of the ratios of all rounds."""
    return median(one / other for one, other in zip(rounds[name], rounds[base], strict=True))


def measure_once(before: Path | None, num_rounds: int, is_reversed: bool) -> dict[str, dict[str, list[float]]]:
    """Times of all rounds, by case and system, of new processes: two that run the same code may differ while they live."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = [("off", SOURCE, False), ("on", SOURCE, True)]
        if before is not None:
            wanted.append(("before", before, False))
        systems = {name: System(source, folder, is_on) for name, source, is_on in wanted[:: -1 if is_reversed else 1]}
        found = {}
        for case in CASES:
            measure(systems, case, 20)
            found[case] = measure(systems, case, num_rounds)
        for system in systems.values():
            system.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="SOURCE", help="the folder src of other code to compare with")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS)
    parser.add_argument("--repeats", type=int, default=NUM_REPEATS, help="how often new processes are started")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--drive", nargs=2, metavar=("MEETING", "ROLE"), help=argparse.SUPPRESS)
    parser.add_argument("--on", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments.drive[1], arguments.drive[0], arguments.on)
        return
    before = None if arguments.before is None else arguments.before.absolute()
    repeats = [measure_once(before, arguments.rounds, number % 2 == 1) for number in range(arguments.repeats)]
    figures: dict[str, Any] = {"hooks": count_hooks()}
    print("hooks", json.dumps(figures["hooks"]), flush=True)
    for case in CASES:
        found = [repeat[case] for repeat in repeats]
        us = {name: round(median(median(one[name]) for one in found) * 1e6, 1) for name in found[0]}
        figures[case] = {"us": us}
        for name, base in (("off", "before"), ("on", "off")):
            if base in us:
                ratios = sorted(round(compare(one, name, base), 4) for one in found)
                figures[case][f"{name} / {base}"] = {"median": median(ratios), "of each repeat": ratios}
        print(case, json.dumps(figures[case]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
