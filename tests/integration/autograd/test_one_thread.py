"""Workers that run one function at a time: what waits for gradients or for other workers must not keep the thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from autograd.running import check_program
from autograd.worlds import num_contexts
from gradwire.cluster.api import Cluster
from gradwire.testing import wait_until

_SEEDS = range(70_000, 70_120)


def test_programs_on_workers_with_one_thread() -> None:
    with Cluster.local(3, num_worker_threads=1) as cluster:
        with ThreadPoolExecutor(4) as pool:
            problems = list(pool.map(check_program, _SEEDS))
        assert not any(problems), "\n".join(filter(None, problems))
        wait_until(lambda: not num_contexts(cluster.workers), 10.0, "that every context is released")
