"""Functions that start clusters in the programs of `gradwire.testing.check_cluster`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
from typing import Any

import ray
from ray._private import parameter

import quick_python
from gradwire import Cluster
from quick_ray import forked_workers

_until_the_end = contextlib.ExitStack()


def _let_ray_fork_workers() -> None:
    """For a Ray that this program starts; it also goes without processes that nobody here asks."""
    folder = os.environ["JOB_FOLDER"]
    os.makedirs(folder)
    forks = _until_the_end.enter_context(forked_workers(folder))
    atexit.register(_until_the_end.close)
    parameter.RayParams = functools.partial(parameter.RayParams, include_log_monitor=False, no_monitor=True, **forks)


def start_ray(num_workers: int, **options: Any) -> Cluster:
    if not ray.is_initialized():  # once for all clusters of the program
        starts_ray = not os.environ.get("RAY_ADDRESS")
        if starts_ray and os.environ.get(quick_python.NESTED):
            _let_ray_fork_workers()
        own = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
        ray.init(log_to_driver=False, **(own if starts_ray else {}))
    return Cluster.ray(num_workers, resources={"CPU": 0.5}, **options)


def start_slurm(num_workers: int, **options: Any) -> Cluster:
    return Cluster.slurm(1, num_workers, executor="local", folder=os.environ["JOB_FOLDER"], **options)


def start_from_env(num_workers: int, **options: Any) -> Cluster:
    return Cluster.from_env(**options)
