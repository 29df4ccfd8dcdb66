"""Runs programs one after the other in one interpreter, each as the main module; what each prints goes to files.

torch is imported once for all of them, and once in the fork server of their clusters, instead of twice for each: most
of their time.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

NUM_THREADS, RANDOM_STATE = torch.get_num_threads(), torch.get_rng_state()


class Job(NamedTuple):
    """One run of a program. Its exit code and its output go to `results`, with the suffixes .code, .out and .err."""

    program: str
    folder: str  # where it is started
    results: str
    arguments: list[str]


def run(job: Job) -> int:
    """Return the exit code."""
    os.chdir(job.folder)
    sys.argv[:] = [job.program, *job.arguments]
    sys.path[0] = str(Path(job.program).parent)
    torch.set_num_threads(NUM_THREADS)
    torch.set_rng_state(RANDOM_STATE)
    environment, logger = dict(os.environ), logging.getLogger("gradwire")
    logging_state = logger.level, logger.propagate, list(logger.handlers)
    try:
        runpy.run_path(job.program, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        os.environ.clear()
        os.environ.update(environment)
        level, logger.propagate, logger.handlers[:] = logging_state
        logger.setLevel(level)
        if (module := sys.modules.get("gradwire.cluster.log_level")) is not None:
            module._of_workers = None  # type: ignore[attr-defined]
    return 0


def main(jobs: list[Job]) -> None:
    for job in jobs:
        for descriptor, suffix in ((1, ".out"), (2, ".err")):
            file = os.open(job.results + suffix, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(file, descriptor)
            os.close(file)
        code = run(job)
        sys.stdout.flush()
        sys.stderr.flush()
        Path(job.results + ".code").write_text(str(code))


if __name__ == "__main__":
    main([Job(*fields) for fields in json.loads(sys.argv[1])])
