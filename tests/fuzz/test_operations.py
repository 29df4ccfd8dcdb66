"""A short run of the fuzzer of operations, and messages that were found to do harm."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fuzz import fuzz_operations as fuzzer
from fuzz.fuzz_operations import Attack, Honest, Outcome
from fuzz.operation_grammar import Grammar, Pools
from fuzz.operation_world import make_world
from gradwire.errors import ConfigurationError, DecodeError
from gradwire.rpc import functions
from gradwire.rpc.device_maps import DeviceReport, check_device_maps
from gradwire.testing import LeakCheck
from gradwire.wire.messages import read_plain

NUM_MESSAGES = 400


def _chain(length: int) -> Any:
    """An exception with causes, as it travels."""
    return ["builtins:ValueError", "", "", "m", b"", _chain(length - 1) if length > 1 else None]


CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any] | None]] = {
    "more contexts than are kept": ("fuzz.echo", (), {"autograd": [(1 << 48) | 5, 0, 0]}),
    "message under the id of another worker": (
        "fuzz.double",
        (torch.ones(3, requires_grad=True),),
        {"autograd": [(1 << 48) | 6, (2 << 48) | 1, 1]},
    ),
    "negative context": ("fuzz.echo", (), {"autograd": [-1, 0, 0]}),
    "long text": ("fuzz.echo", (), {"autograd": [(1 << 48) | 7, 0, 0, False, "x" * 100_000]}),
    "handle instead of the name of a class": ("gradwire.nn.make", ([1], (), {}, "cpu", "snapshot"), None),
    "operation as a class": ("gradwire.nn.make", ("gradwire.nn.make", (), {}, "cpu", "snapshot"), None),
    "device that is a dtype": ("gradwire.nn.make", ("fuzz.Layer", (), {}, torch.float16, "snapshot"), None),
    "names that are not texts": ("gradwire.nn.load", (1, None, {1: 2}, {}, False), None),
    "context that is a text": ("gradwire.rref.backward", (1, None, "x", True), None),
}
"""By what is wrong: a call, its arguments and its notes."""

CONTROL: dict[str, tuple[str, tuple[Any, ...]]] = {
    "probe of a text": ("autograd.probe", ("x", 1)),
    "probe of a tensor": ("autograd.probe", (torch.ones(2), torch.ones(2))),
    "probe of a large number": ("autograd.probe", (2**80, 2**80)),
    "probe of the pass of another worker": ("autograd.probe", (1, (2 << 48) | 1)),
    "explanation of nothing": ("autograd.explain", ()),
}

NOTICES: dict[str, tuple[str, Any]] = {
    "pass of a worker that is not there": (
        "autograd.propagate",
        [(1 << 48) | 9, (9 << 48) | 1, [False, False, False, False, False, 600.0]],
    ),
    "pass without time": (
        "autograd.propagate",
        [(1 << 48) | 9, (1 << 48) | 1, [False, False, False, False, False, -1.0]],
    ),
    "shortcuts to all ranks": (
        "autograd.propagate",
        [
            *((1 << 48) | 9, (1 << 48) | 2, [False, False, False, False, False, 600.0], []),
            [[], [], [[5, [[rank, 5, 0, 1]]] for rank in range(100, 1000)]],
        ],
    ),
    "report with ranks that are none": ("autograd.report", [(1 << 48) | 9, (1 << 48) | 1, [[70_000], []]]),
    "deep chain of causes": ("autograd.abort", [5, (1 << 48) | 1, _chain(100)]),
    "release with a long text": ("autograd.release", [5, "x" * 100_000]),
}


@contextlib.contextmanager
def attacking() -> Iterator[tuple[Attack, Honest]]:
    """A victim, and a hostile worker that has settled in."""
    with make_world() as world:
        honest = Honest(world)
        attack = Attack(world, 0)
        try:
            attack.settle_in(honest)
            yield attack, honest
            attack.look(honest)
            for problem in honest.check():
                attack.outcome.add(problem, problem)
        finally:
            honest.close()
            fuzzer.become(None)
    check(attack.outcome)


def check(outcome: Outcome) -> None:
    failures = outcome.failures()
    assert not failures, "\n\n".join(f"{item.key}\n{item.text}" for item in failures)


def test_short_run() -> None:
    check(fuzzer.run(1, lambda count: count >= NUM_MESSAGES))


def test_messages_that_were_found_to_do_harm() -> None:
    """One after the other, each several times: the victim answers the honest worker after each of them."""
    with attacking() as (attack, honest):
        for name, args, notes in CALLS.values():
            for _ in range(2):
                attack._call(name, args, notes)
            attack.look(honest)
        for name, args in CONTROL.values():
            answers: list[Any] = []
            attack.world.hostile.control("v", name, args, 5.0, answers.append)
            attack.look(honest)
        for name, note in NOTICES.values():
            for _ in range(2):
                with contextlib.suppress(*fuzzer.NOT_SENT):
                    attack.world.hostile.notices.send("v", name, note)
            attack.look(honest)


def test_reports_of_devices() -> None:
    """A worker reports its devices when it joins, which the workers of the fuzzer have done."""
    grammar = Grammar(random.Random(0), Pools(workers=[(0, 1)]), lambda: ())
    num_read = 0
    for _ in range(300):
        try:
            report = read_plain(grammar.note(DeviceReport), DeviceReport, "not a report")
        except DecodeError:
            continue
        num_read += 1
        with contextlib.suppress(ConfigurationError):
            check_device_maps({"cpu": report, "to": DeviceReport({"cuda": 2})}, knows_all=True)
    assert num_read > 10


@pytest.mark.slow
def test_run_in_a_process_of_its_own(leak_check: LeakCheck) -> None:
    check(fuzzer.run(2, lambda count: count >= NUM_MESSAGES, own_process=True))


def test_new_operation_is_fuzzed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has to list it: it is called with what its parameters are named like, and an internal error is found."""

    def new_operation(context_id: int) -> Any:
        return {}[str(context_id)]

    monkeypatch.setitem(functions.exposed, "gradwire.new.operation", new_operation)
    found: Callable[[Attack], list[str]] = lambda attack: list(attack.outcome.findings)  # noqa: E731
    with make_world() as world:
        honest = Honest(world)
        attack = Attack(world, 3)
        try:
            attack.settle_in(honest)
            for _ in range(500):
                attack._send_call()
                if found(attack):
                    break
        finally:
            honest.close()
            fuzzer.become(None)
    assert any(key.startswith("gradwire.new.operation: KeyError") for key in found(attack)), found(attack)
