"""Functions that start clusters in the programs of `gradwire.testing.check_cluster`."""

from __future__ import annotations

import os
from typing import Any

import ray

from gradwire import Cluster


def start_ray(num_workers: int, **options: Any) -> Cluster:
    if not ray.is_initialized():  # once for all clusters of the program
        own = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
        ray.init(log_to_driver=False, **({} if os.environ.get("RAY_ADDRESS") else own))
    return Cluster.ray(num_workers, resources={"CPU": 0.5}, **options)


def start_slurm(num_workers: int, **options: Any) -> Cluster:
    return Cluster.slurm(1, num_workers, executor="local", folder=os.environ["JOB_FOLDER"], **options)


def start_from_env(num_workers: int, **options: Any) -> Cluster:
    return Cluster.from_env(**options)
