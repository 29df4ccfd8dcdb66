"""Random programs with tensors on the CPU and two devices: the gradients of three workers are those of one process."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from accelerator import device, mixed
from autograd.programs import Body, Call, Move, make_program
from gradwire.cluster.api import Cluster

_BLOCK = 50
_NUM_BLOCKS = 6


@pytest.mark.parametrize("block", range(_NUM_BLOCKS))
def test_gradients_are_those_of_one_process(cluster: Cluster, block: int) -> None:
    """Every other block has several contexts at once."""
    mixed.prepare(cluster)
    with ThreadPoolExecutor(4 if block % 2 else 1) as pool:
        problems = list(pool.map(mixed.check, range(block * _BLOCK, (block + 1) * _BLOCK)))
    assert not any(problems), "\n".join(filter(None, problems))


def test_programs_have_everything_in_them() -> None:
    """Every plan, every place, and what matters here about calls, often enough to mean something."""
    found: Counter[str] = Counter()
    for seed in range(_BLOCK * _NUM_BLOCKS):
        program = make_program(seed, mixed.SETTING)
        found[program.plan] += 1
        found.update(f"input at {place}" for place in program.places)
        _count(found, program.body)
    rare = {kind: number for kind, number in found.items() if number < 20}
    assert not rare
    assert {"once", "twice", "at once", "grad", "second order", "remote", "Hook", "Change"} <= found.keys()
    assert {f"{what} at {place}" for what in ("input", "moved") for place in range(3)} <= found.keys()


def _count(found: Counter[str], body: Body) -> None:
    for item in body.statements:
        if isinstance(item, Move):
            found[f"moved at {item.place}"] += 1
        elif isinstance(item, Call):
            found[item.way] += 1
            _count(found, item.body)
        else:
            found[type(item).__name__] += 1


def test_devices_are_mapped_between_workers(cluster: Cluster) -> None:
    mixed.prepare(cluster)
    assert cluster.workers[0].call(mixed.send_from_zero_and_back) == [f"{device.NAME}:1", f"{device.NAME}:0"]
