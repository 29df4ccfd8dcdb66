"""Backward passes of random programs under a seeded scheduler: right everywhere, or failed everywhere, and always over.

More seeds: ``GRADWIRE_SIMULATION_SEEDS=0-99999 python -m pytest tests/simulation``.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from gradwire.autograd._backward_state import BackwardState, Mode, Termination
from simulation import simulator
from simulation.local_engine import AbstractGraph, LocalRun
from simulation.programs import RandomProgram
from simulation.recording import Kind, Node, Record, Recording, Value
from simulation.simulator import Crash, Outcome, Simulation, Trouble
from simulation.workers import Violation

_CHUNK = 250  # seeds in one test, so that many of them still keep within its time
_SEEDS = os.environ.get("GRADWIRE_SIMULATION_SEEDS", "0-1499")

Run = Callable[[int], Outcome]


def chunks(share: float = 1.0) -> list[range]:
    """The seeds to try, or the first part of them."""
    first, _, last = _SEEDS.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    seeds = seeds[: max(1, int(share * len(seeds)))]
    return [seeds[start : start + _CHUNK] for start in range(0, len(seeds), _CHUNK)]


def each_chunk(share: float = 1.0) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("seeds", chunks(share), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")


def run_all(seeds: Iterable[int], run: Run, test: str) -> Counter[Outcome]:
    """How the passes ended; says how to run those again that ended as none may."""
    outcomes: Counter[Outcome] = Counter()
    broken = []
    for seed in seeds:
        try:
            outcomes[run(seed)] += 1
        except Exception as error:
            again = f"GRADWIRE_SIMULATION_SEEDS={seed} python -m pytest tests/simulation -k {test}"
            broken.append(f"{again}\n    {type(error).__name__}: {error}")
    assert not broken, "\n".join([f"{len(broken)} seeds went wrong:", *broken])
    return outcomes


@each_chunk()
def test_smart_pass_is_right_or_fails_cleanly(seeds: range) -> None:
    outcomes = run_all(seeds, lambda seed: Simulation(seed).run(), "smart_pass_is")
    assert outcomes.keys() <= {Outcome.COMMITTED, Outcome.FAILED, Outcome.ROOT_LOST}
    assert outcomes.total() == len(seeds)


@each_chunk(0.5)
def test_smart_pass_is_committed_where_nothing_fails(seeds: range) -> None:
    outcomes = run_all(
        seeds, lambda seed: Simulation(seed, trouble=Trouble(repeats=0.2)).run(), "smart_pass_is_committed"
    )
    assert outcomes == {Outcome.COMMITTED: len(seeds)}


@each_chunk(0.5)
def test_fast_pass_is_right_or_says_that_it_stalls(seeds: range) -> None:
    outcomes = run_all(seeds, lambda seed: Simulation(seed, Mode.FAST).run(), "fast_pass")
    assert outcomes.total() == len(seeds)


@each_chunk(0.2)
def test_one_seed_is_one_course_of_events(seeds: range) -> None:
    for seed in seeds[:20]:
        assert Simulation(seed).run() is Simulation(seed).run()


# -- whether the simulation is worth anything ---------------------------------------------------------------------------


def test_all_outcomes_occur() -> None:
    smart = Counter(Simulation(seed).run() for seed in range(200))
    fast = Counter(Simulation(seed, Mode.FAST).run() for seed in range(200))
    assert smart[Outcome.COMMITTED] > 60
    assert min(smart[Outcome.FAILED], smart[Outcome.ROOT_LOST]) > 10
    assert fast[Outcome.STALLED] > 60
    assert min(fast[Outcome.COMMITTED], fast[Outcome.FAILED], fast[Outcome.ROOT_LOST]) > 5


def test_programs_are_of_all_kinds() -> None:
    found: Counter[str] = Counter()
    for seed in range(200):
        simulation = Simulation(seed, trouble=Trouble())
        program = simulation.program
        exchanges = [(rank, item) for rank, record in enumerate(program.records) for item in record.exchanges]
        arrived = {item.message_id for _, item in exchanges if not item.is_send}
        found["a call to itself"] += any(item.peer == rank for rank, item in exchanges)
        found["a message that nobody recorded"] += any(send not in arrived for send in program.sends)
        found["calls under way"] += bool(program.tasks)
        found["several roots"] += len(program.roots) > 1
        found["gradients on several workers"] += sum(map(bool, program.gradients_in_one_process())) > 1
        found["a gradient that cancels out"] += any(0 in item.values() for item in program.gradients_in_one_process())
        simulation.run()
        components = [item for worker in simulation.workers for item in worker.components]
        found["sends that share a component"] += any(len(item.sends) > 1 for item in components)
        found["a send tied to the roots"] += any(item.has_roots and item.sends for item in components)
        found["a gradient that takes a shortcut"] += any(worker.num_shortcuts for worker in simulation.workers)
        found["a shortcut not taken"] += any(worker.num_withdrawn for worker in simulation.workers)
        found["a report with the last answer"] += any(worker.num_early for worker in simulation.workers)
    assert len(found) == 11
    assert min(found.values()) > 5, found


def _give_nothing(*_: Any) -> None:
    return None


_make_run = LocalRun.__init__


def _gate_oldest_first(run: LocalRun, *args: Any) -> None:
    _make_run(run, *args)
    run._gates.reverse()


BROKEN_RULES: dict[str, tuple[Any, str, Any]] = {
    "nobody introduces itself": (BackwardState, "introduction_to", _give_nothing),
    "nobody is woken": (BackwardState, "_peers_to_wake", lambda *_: []),
    "dead branches are not answered": (BackwardState, "_answer_nothing", _give_nothing),
    "gates are passed oldest first": (LocalRun, "__init__", _gate_oldest_first),
    "all recvs count as reached": (AbstractGraph, "reached_by", lambda graph, index, _: graph.components[index].recvs),
    "a shortcut not taken is forgotten": (BackwardState, "_withdraw", lambda state, send: state._offered.pop(send)),
    "losses do not matter": (BackwardState, "worker_lost", lambda *_: []),
    "the root waits for nobody": (Termination, "missing", property(lambda _: frozenset())),
    "aborts are not passed on": (BackwardState, "_others", lambda _: set()),
    "every silence is a stall": (simulator, "is_stalled", lambda before, _: bool(before)),
}


@pytest.mark.parametrize("rule", BROKEN_RULES)
def test_broken_rule_is_found(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN_RULES[rule])
    with pytest.raises(Violation):
        Counter(Simulation(seed).run() for seed in range(500))


# -- courses of events that chance would take long to find ------------------------------------------------------------------


def make_last_gradient_from_the_dead() -> Recording:
    """Worker 3 uses what worker 1 sent it in a call of worker 2: nothing ever goes from 3 back to 1 but a gradient.

    0 (root) <- 2 <- 3 <- 1, and 0 <- 1
    """
    program = Recording(0, [Record([Node(Kind.LEAF, rank)]) for rank in range(4)])
    leaves = [Value(record.leaves[0]) for record in program.records]

    def move(sender: int, to: int, value: Value) -> Value:
        return program.record_recv(to, sender, program.record_send(sender, to, [value]))[0]

    kept = move(1, 3, leaves[1])
    used = program.operate(3, [kept], [(1,)])
    there = move(2, 0, *program.operate(2, [move(3, 2, *used), leaves[2]], [(2,), (3,)]))
    (loss,) = program.operate(0, [there, move(1, 0, leaves[1]), leaves[0]], [(1,), (5,), (7,)])
    program.roots = [(loss, 1)]
    return program


@pytest.mark.parametrize("survives", [0.3, 0.6])
@pytest.mark.parametrize("num_messages", [1, 2, 3])
def test_gradient_that_dies_with_its_sender_is_missed(num_messages: int, survives: float) -> None:
    """The dead worker's report arrives, its gradient does not, and who waits for that has heard of the death first."""
    trouble = Trouble(crashes=(Crash(3, num_messages=num_messages),), survives=survives)
    outcomes = run_all(
        range(150),
        lambda seed: Simulation(seed, trouble=trouble, program=make_last_gradient_from_the_dead()).run(),
        "dies",
    )
    assert outcomes[Outcome.FAILED] > 10
    assert outcomes.total() == 150


def test_gradient_that_dies_unmissed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Termination, "mistaken", frozenset())
    trouble = Trouble(crashes=(Crash(3, num_messages=2),), survives=0.5)
    program = make_last_gradient_from_the_dead
    # Worker 1 must hear of the death before it hears of the pass: one seed in some thousands, of which one is among these.
    with pytest.raises(Violation, match="worker 1 has"):
        Counter(Simulation(seed, trouble=trouble, program=program()).run() for seed in range(2400, 2500))


def test_gradients_of_a_made_up_program() -> None:
    """By hand, so that the oracle has one, too."""
    program = make_last_gradient_from_the_dead()
    found = [list(item.values()) for item in program.gradients_in_one_process()]
    assert found == [[7], [5 + 2], [3], []]
    assert Simulation(1, trouble=Trouble(), program=program).run() is Outcome.COMMITTED


def test_program_is_made_from_the_seed_alone() -> None:
    one, other = (RandomProgram(random.Random(5), 4) for _ in range(2))
    assert [record.exchanges for record in one.records] == [record.exchanges for record in other.records]
    assert any(record.exchanges for record in one.records)
