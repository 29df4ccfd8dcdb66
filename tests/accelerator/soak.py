"""Random programs on devices until so many were right.

    PYTHONPATH=tests:tests/integration python -m accelerator.soak --programs 1000 --seed 0
    PYTHONPATH=tests:tests/integration python -m accelerator.soak --only 1234

As `autograd.soak`, with values on the CPU and two stand-in devices of each worker.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from accelerator import mixed
from autograd.listing import describe
from autograd.programs import make_program
from gradwire.cluster.api import Cluster


def main() -> int:
    """Read the options and run the programs."""
    parser = argparse.ArgumentParser(description="Random programs on devices, with workers and in one process.")
    parser.add_argument("--programs", type=int, default=1000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="the first one's seed; the others follow")
    parser.add_argument("--only", type=int, help="run the program of this seed, and print it")
    parser.add_argument("--mode", choices=("smart",), default="smart", help="of the backward pass")
    parser.add_argument("--threads", type=int, default=2, help="programs at once")
    options = parser.parse_args()
    with Cluster.local(3) as cluster:
        mixed.prepare(cluster)
        if options.only is not None:
            print(describe(make_program(options.only, mixed.SETTING)))
            problem = mixed.check(options.only)
            print(problem or "right")
            return bool(problem)
        with ThreadPoolExecutor(options.threads, "soak") as pool:
            seeds = range(options.seed, options.seed + options.programs)
            problems = [problem for problem in pool.map(mixed.check, seeds) if problem]
        print(*problems, f"{len(seeds)} programs from seed {options.seed} on, {len(problems)} failed", sep="\n")
        return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
