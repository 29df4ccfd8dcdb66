"""Random programs: the gradients of four workers are those of one process."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from autograd.programs import Body, Call, Program, make_program
from autograd.running import check_program
from gradwire.cluster.api import Cluster

_BLOCK = 50
_NUM_BLOCKS = 20
_FAST_SEEDS = range(24)
_SEEDS_AT_ONCE = range(10_000, 10_060)


@pytest.mark.parametrize("block", range(_NUM_BLOCKS))
def test_gradients_are_those_of_one_process(cluster: Cluster, block: int) -> None:
    problems = [check_program(seed) for seed in range(block * _BLOCK, (block + 1) * _BLOCK)]
    assert not any(problems), "\n".join(filter(None, problems))


def test_fast_mode_is_right_or_names_what_is_unused(cluster: Cluster) -> None:
    with ThreadPoolExecutor(4) as pool:  # where something is unused, it waits until nothing has moved for a while
        problems = list(pool.map(lambda seed: check_program(seed, "fast"), _FAST_SEEDS))
    assert not any(problems), "\n".join(filter(None, problems))


def test_programs_at_once(cluster: Cluster) -> None:
    with ThreadPoolExecutor(6) as pool:
        problems = list(pool.map(check_program, _SEEDS_AT_ONCE))
    assert not any(problems), "\n".join(filter(None, problems))


def test_a_seed_always_gives_the_same_program() -> None:
    assert [make_program(seed) for seed in range(20)] == [make_program(seed) for seed in range(20)]


def test_programs_have_everything_in_them() -> None:
    """Every kind of statement, every way to call and every plan, often enough to mean something."""
    programs = [make_program(seed) for seed in range(_BLOCK * _NUM_BLOCKS)]
    found = Counter(kind for program in programs for kind in _kinds(program))
    rare = {kind: number for kind, number in found.items() if number < 20}
    assert not rare
    assert {"Compute", "Take", "Detach", "Change", "Hook", "Wait"} <= found.keys()
    assert {"sync", "async", "then", "relay", "no_grad", "fail", "cancel", "nested", "to oneself"} <= found.keys()
    assert {"several results", "the same twice", "forwarded", "never taken"} <= found.keys()
    assert {"once", "twice", "at once", "grad", "second order", "large"} <= found.keys()


def _kinds(program: Program) -> list[str]:
    found: list[str] = [program.plan, *(["large"] if program.size > 3 else [])]
    _add_kinds(found, program.body, program.runner, 0)
    return found


def _add_kinds(found: list[str], body: Body, worker: str, depth: int) -> None:
    calls = [item for item in body.statements if isinstance(item, Call)]
    found += [type(item).__name__ for item in body.statements]
    num_taken = sum(type(item).__name__ == "Wait" for item in body.statements)
    found += ["never taken"] * (sum(call.way in ("async", "then") for call in calls) - num_taken)
    for call in calls:
        found.append(call.way)
        found += ["nested"] * (depth > 0) + ["to oneself"] * (call.to == worker)
        found += ["several results"] * (len(call.body.results) > 1)
        found += ["the same twice"] * (len(set(call.args)) < len(call.args))
        found += ["forwarded"] * any(number < len(call.args) for number in call.body.results)
        _add_kinds(found, call.body, call.to, depth + 1)
