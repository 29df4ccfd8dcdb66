"""Random programs on four workers until so many were right.

    PYTHONPATH=tests:tests/integration python -m autograd.soak --programs 10000 --seed 0
    PYTHONPATH=tests:tests/integration python -m autograd.soak --only 1234

Every seed is one program (`autograd.programs`). It runs on workers and in one process; the gradients must be the same. A
program that fails is printed with its seed and the command that runs it again; the exit code is then 1. Some programs
also run in FAST mode, where unused results must end in a clear error.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from autograd.listing import describe
from autograd.programs import make_program
from autograd.running import check_program
from autograd.worlds import num_contexts
from gradwire.cluster.api import Cluster
from gradwire.testing import wait_until

_BLOCK = 100
_FAST_EVERY = 20


def main() -> int:
    """Reads the options and runs the programs."""
    parser = argparse.ArgumentParser(description="Random programs, with workers and in one process.")
    parser.add_argument("--programs", type=int, default=10_000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed; the others follow")
    parser.add_argument("--only", type=int, help="run the program of this seed, and print it")
    parser.add_argument("--mode", choices=("smart", "fast"), default="smart", help="for --only")
    parser.add_argument("--threads", type=int, default=2, help="programs at once")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with Cluster.local(3) as cluster:
        if options.only is not None:
            print(describe(make_program(options.only)))
            problem = check_program(options.only, options.mode)
            print(problem or "right")
            return bool(problem)
        return _soak(cluster, range(options.seed, options.seed + options.programs), options.threads)


def _soak(cluster: Cluster, seeds: range, num_threads: int) -> int:
    print(f"{len(seeds)} programs, seeds {seeds.start} to {seeds.stop - 1}, {num_threads} at once")
    started, num_failed = time.monotonic(), 0
    with ThreadPoolExecutor(num_threads, "soak") as pool:
        for first in range(seeds.start, seeds.stop, _BLOCK):
            block = range(first, min(first + _BLOCK, seeds.stop))
            problems = [problem for problem in pool.map(_check, block) if problem]
            num_failed += len(problems)
            sys.stdout.writelines(problems)
            done = block.stop - seeds.start
            rate = done / (time.monotonic() - started)
            print(f"seeds to {block.stop - 1}: {done} of {len(seeds)}, {num_failed} failed, {rate:.0f}/s", flush=True)
    wait_until(lambda: not num_contexts(cluster.workers), 10.0, "that every context is released")
    print("every program was right" if not num_failed else f"{num_failed} programs were not right")
    return bool(num_failed)


def _check(seed: int) -> str:
    fast = check_program(seed, "fast") if seed % _FAST_EVERY == 0 else ""
    return check_program(seed) + fast


if __name__ == "__main__":
    sys.exit(main())
