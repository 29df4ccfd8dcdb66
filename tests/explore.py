"""Look for what the fixed examples of the test suite do not show: new seeds, for a given time.

    PYTHONPATH=tests:tests/integration python -m explore --seconds 1800
    PYTHONPATH=tests:tests/integration python -m explore --seconds 1800 --seed 1234

Rounds of each kind take turns: properties (Hypothesis), the ownership of references, simulated backward passes, random
programs on workers, random training programs, bad bytes. Each round is a process of its own and prints its seed. A round
that fails prints the end of its output and the command that runs it again; the exit code is then 1. The round that is under
way when the time is over is cut off, and does not count.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_TESTS = Path(__file__).parent
_ROUND_S = 900.0  # a round that takes longer hangs
_NUM_LINES = 60


@dataclass(frozen=True)
class Command:
    """One round.

    Attributes:
        arguments: Of Python, in the folder of the project.
        environment: What it needs besides.
    """

    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = "".join(f"{name}={shlex.quote(value)} " for name, value in self.environment.items())
        return f"{settings}.venv/bin/python {shlex.join(self.arguments)}"


Kind = Callable[[int], Command]


def property_files() -> list[str]:
    """The tests that ask Hypothesis for examples; the ownership of references has rounds of its own."""
    files = [path for path in sorted(_TESTS.rglob("test_*.py")) if "from hypothesis" in path.read_text()]
    return [path.relative_to(_TESTS.parent).as_posix() for path in files if path.name != "test_ownership_steps.py"]


def properties(seed: int) -> Command:
    """All properties, with other examples."""
    return _pytest([*property_files(), f"--hypothesis-seed={seed}"], GRADWIRE_HYPOTHESIS="explore")


def ownership(seed: int) -> Command:
    """References of four workers under loss, repeats, cuts and death."""
    arguments = ["tests/properties/test_ownership_steps.py", f"--hypothesis-seed={seed}"]
    return _pytest(arguments, GRADWIRE_HYPOTHESIS="explore", GRADWIRE_OWNERSHIP_EXAMPLES="400")


def simulation(seed: int) -> Command:
    """Backward passes of random programs under a random scheduler."""
    return _pytest(["tests/simulation"], GRADWIRE_SIMULATION_SEEDS=f"{seed}-{seed + 1499}")


def programs(seed: int) -> Command:
    """Random programs with autograd, on workers and in one process."""
    path = "tests:tests/integration"
    return Command(("-m", "autograd.soak", "--programs", "300", "--seed", str(seed)), {"PYTHONPATH": path})


def devices(seed: int) -> Command:
    """Random programs with autograd on the CPU and two stand-in devices, on workers and in one process."""
    path = "tests:tests/integration"
    return Command(("-m", "accelerator.soak", "--programs", "300", "--seed", str(seed)), {"PYTHONPATH": path})


def training(seed: int) -> Command:
    """Random training programs with optimizers, on workers and in one process."""
    return _pytest(["tests/integration/optim/test_random_programs.py"], GRADWIRE_TRAINING_SEEDS=f"{seed}-{seed + 11}")


def wire(seed: int) -> Command:
    """Bad bytes for the decoder of messages."""
    return Command(("tests/fuzz/fuzz_wire.py", "--seconds", "20", "--seed", str(seed)))


KINDS: tuple[Kind, ...] = (ownership, properties, simulation, programs, devices, training, wire)


def _pytest(arguments: Sequence[str], **environment: str) -> Command:
    limit = f"--timeout={_ROUND_S:g}"  # a round has more examples than the suite
    return Command(("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", limit, *arguments), environment)


def explore(kinds: Sequence[Kind], seconds: float, seed: int) -> int:
    """Run rounds until the time is over; return the exit code."""
    end, num_done, again = time.monotonic() + seconds, dict.fromkeys(kinds, 0), []
    dice = random.Random(seed)
    print(f"explore: seed {seed}, {seconds:g} s; again: make explore EXPLORE_SECONDS={seconds:g} EXPLORE_SEED={seed}")
    for number, kind in enumerate(itertools.cycle(kinds)):
        if time.monotonic() >= end:
            break
        command = kind(dice.randrange(1 << 31))
        print(f"explore: round {number}, {kind.__name__}: {command}", flush=True)
        is_right = _run(command, end)
        if is_right is None:
            break
        num_done[kind] += 1
        if not is_right:
            again.append(str(command))
    counts = ", ".join(f"{count} {kind.__name__}" for kind, count in num_done.items())
    print(f"explore: {sum(num_done.values())} rounds ({counts}), {len(again)} with a finding", flush=True)
    for line in again:
        print(f"explore: again: {line}")
    return bool(again)


def _run(command: Command, end: float) -> bool | None:
    """Whether a round found nothing; None if its time was cut short."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *command.arguments],
            cwd=_TESTS.parent,
            env={**os.environ, **command.environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(max(0.0, min(_ROUND_S, end - started)))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                return None
            code = -signal.SIGKILL
            print(f"explore: the round did not end within {_ROUND_S:g} s")
        finally:
            _end(process)
        if code != 0:
            print("".join(_last_lines(output)))
            print(f"explore: FAILED with exit code {code}; again: {command}", flush=True)
    return code == 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a round: it has a session of its own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10.0)


def _last_lines(output: IO[str]) -> list[str]:
    output.seek(0)
    return output.readlines()[-_NUM_LINES:]


def main() -> int:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description="Try new seeds of all random tests for a given time.")
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, help="of the whole run; taken from the clock by default")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % (1 << 32)
    return explore(KINDS, options.seconds, seed)


if __name__ == "__main__":
    sys.exit(main())
