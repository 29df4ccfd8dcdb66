"""Sends bad data to every operation of a worker until the time is over.

    PYTHONPATH=tests:tests/integration python -m fuzz.fuzz_operations --seconds 60 [--seed N] [--here] [--known]

A hostile worker that has shaken hands sends calls, control operations, notices and forged answers to a victim with
``trust="data"``: to everything in the victim's tables, so that what is new there is fuzzed, too. Ids are its own, those of
an honest third worker, and made up. Allowed outcomes: an answer, one of gradwire's errors, `TypeError` and `ValueError`, and
`RuntimeError` of torch. After every few messages the victim must answer the honest worker, and its tables and its memory
must be within bounds. In the end the honest worker's values are as they were, its backward pass, which was open all the
time, has the right gradients, and nothing is left of the hostile worker once it has gone. The exit code is 1 otherwise.

The victim is a child process, so that a crash is seen; with ``--here`` it is in this one. Findings that `KNOWN` lists are
counted and do not fail; with ``--known`` they do.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, get_args

import torch

import gradwire as gw
from fuzz import operation_world
from fuzz.operation_grammar import KEEPERS, Grammar, Pools, encodable
from fuzz.operation_world import ALLOWED, VictimDied, World, last_frame, make_world
from gradwire import rpc
from gradwire.autograd import current_context
from gradwire.autograd._backward_state import PassSnapshot
from gradwire.autograd.worker_views import WorkerView
from gradwire.errors import GradwireError
from gradwire.nn import RemoteModule
from gradwire.optim import DistributedOptimizer
from gradwire.rpc import functions, set_current_agent
from gradwire.rpc.interceptors import Envelope, Interceptor
from gradwire.rpc.pending_calls import PendingCall
from gradwire.rref import RRef, remote
from gradwire.testing import wait_until
from unit.autograd.layers import engine_of

CALL_S: Final = 0.3
CONTROL_S: Final = 0.05
"""Some operations answer when others have come; nobody else comes here."""
CANARY_EVERY: Final = 25
ANSWER_S: Final = 20.0
MEMORY_BYTES: Final = 400 << 20
"""How much the victim may grow."""

BOUNDS: Final = {
    "contexts": 2 + operation_world.LIMITS.autograd_bytes // 4096,
    "passes": operation_world.LIMITS.autograd_bytes // 8192,
    "ended passes": operation_world.LIMITS.autograd_bytes // 256,
    "recorded messages": 4096,
    "released contexts": 3 * 16_384,
    "rounds of gatherings": 4096,
    "values": 20_000,
    "references": 20_000,
    "children": 20_000,
    "messages about references": 20_000,
    "threads": 400,
}
"""How large the victim's tables may get, whatever it is sent."""

NOT_SENT: Final = (GradwireError, TypeError, ValueError, OverflowError)
"""The hostile worker could not send it: the connection was closed, or its own code refuses to pack it."""

KNOWN: Final[dict[str, str]] = {}
"""Findings that wait for a change elsewhere: the start of a finding's key, and what it waits for."""


@dataclass
class Finding:
    """Something that must not happen.

    Attributes:
        key: What tells it from others: operation, type of the error, and where it was raised.
        text: What happened, with the message that caused it.
    """

    key: str
    text: str

    @property
    def known(self) -> str:
        """What it waits for, if it is known."""
        return next((reason for start, reason in KNOWN.items() if self.key.startswith(start)), "")


@dataclass
class Outcome:
    """What came of a run."""

    sent: Counter[str] = field(default_factory=Counter)
    findings: dict[str, Finding] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, text: str) -> None:
        """Notes a finding, once."""
        self.findings.setdefault(key, Finding(key, text))

    def failures(self, with_known: bool = False) -> list[Finding]:
        """Findings that fail the run."""
        return [item for item in self.findings.values() if with_known or not item.known]


def become(agent: rpc.Agent | None) -> None:
    """Make calls of this thread those of that worker."""
    set_current_agent(None)
    set_current_agent(agent)


class Liar(Interceptor):
    """Puts any note on the hostile worker's answers."""

    def __init__(self, name: str, grammar: Grammar) -> None:
        self.name = name
        self._grammar = grammar

    def wants_calls(self) -> bool:
        return False

    def outgoing(self, envelope: Envelope, tensors: Any) -> Any:
        note = self._grammar.any_note()
        return note if encodable(note) else None

    def incoming(self, envelope: Envelope, note: Any, tensors: Any) -> Any:
        if self.name == "autograd" and isinstance(note, list) and len(note) > 1 and type(note[1]) is int:
            self._grammar.pools.messages.append(note[1])  # one that the victim has recorded
        return tensors


class Attack:
    """One run: what the hostile worker has, and what it sends.

    Args:
        world: The workers.
        seed: Where everything random comes from.
    """

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.outcome = Outcome()
        self._rng = random.Random(seed)
        self._pools = Pools(directory=world.folder)
        self._references: list[RRef[Any]] = []
        self._last = ""
        self.grammar = Grammar(self._rng, self._pools, lambda: self._references)
        hostile = world.hostile
        self._exposed = [name for name in functions.exposed if name.startswith("gradwire.")]
        self._control = dict(hostile.server._control)
        self._notices = {name.removeprefix("~"): kind for name, kind in hostile.notices._kinds.items()}
        self._notes = [item.name for item in hostile.interceptors]
        self._keeper = hostile.server._keeper[0] if hostile.server._keeper is not None else ""
        hostile.interceptors[:] = [Liar(name, self.grammar) for name in self._notes]
        for name, answer in (("autograd.probe", PassSnapshot), ("autograd.explain", WorkerView)):
            kinds = get_args(hostile.server._control_kinds[f"~{name}"])
            hostile.server.register_control(name, partial(self._lie, answer), *kinds)
        for name in self._notices:
            if name.startswith("autograd."):  # it does not say what has become of contexts that it made up
                hostile.notices.register(name, lambda *_: None, Any)

    def _lie(self, kind: type, *_: Any) -> Any:
        """An answer to a question about a context or a pass: as it should be, but made up, or anything."""
        return self.grammar.note(kind) if self._rng.random() < 0.7 else self.grammar.value()

    # -- the hostile worker's own things ---------------------------------------------------------------------------------

    def settle_in(self, honest: Honest) -> None:
        """Gets references of its own, and guesses the ids of others."""
        world, pools = self.world, self._pools
        become(world.hostile)
        self._honest = [(rref._state.rref_id, rref._state.fork_id) for rref in honest.references]  # type: ignore[union-attr]
        pools.workers += [(0, world.victim.incarnation), (7, 1)]
        pools.workers += [(item.info.id, item.address.incarnation) for item in (world.hostile, world.honest)]
        self._guessed = list(honest.message_ids)
        for _ in range(4):
            self.renew()

    def renew(self) -> None:
        """Takes new ids, now and then: what was released or has ended takes no messages any more."""
        rng, pools = self._rng, self._pools
        container = engine_of(self.world.hostile).container
        # Not those of the honest worker: ids of contexts cannot be guessed, and who was told one may take part.
        rank = rng.choice((1, 1, 1, 0, 2, 9))
        context_id = (rank << 48) | rng.getrandbits(48)
        pools.contexts = [*pools.contexts[-7:], context_id]
        counter = container.new_message_id() & ((1 << 48) - 1)
        rank = rng.choice((1, 1, 1, 0, 2, 9))
        pools.passes = [*pools.passes[-7:], (rank << 48) | counter]
        pools.messages = [*pools.messages[-16:], (rank << 48) | counter, *self._guessed]
        if rng.random() < 0.5 or not self._references:
            self._make_references()
        # So that the victim has sends and receives to be asked about.
        for _ in range(rng.choice((0, 1, 2))):
            note = [context_id, container.new_message_id(), 1]
            self._call("fuzz.double", (torch.ones(3, requires_grad=True),), {"autograd": note})
        for _ in range(rng.choice((0, 0, 0, 0, 100))):  # many contexts at once
            note = [(1 << 48) | rng.getrandbits(48), 0, 0]
            self._call("fuzz.echo", (), {"autograd": note})

    def _make_references(self) -> None:
        """Has the victim make a tensor, a module and an optimizer: what was sent may have deleted those before."""
        pools = self._pools
        try:
            module = RemoteModule("v", "fuzz.Layer")
            parameters = module.remote_parameters()
            optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
            made = [remote("v", "fuzz.make_tensor"), module.module_rref, *parameters, *optimizer.remote_optimizers]
        except ALLOWED:  # the connection was just closed, or a reference that this worker has forged was taken for one
            self.world.check_alive()
            return
        self._references = made
        own = [(rref._state.rref_id, getattr(rref._state, "fork_id", 0)) for rref in made]
        pools.values = [value for value, _ in (*own, *own, *own, *self._honest)]
        pools.forks = [fork for _, fork in (*own, *own, *own, *self._honest)]

    # -- one message -----------------------------------------------------------------------------------------------------

    def send_one(self) -> None:
        """Sends something, and looks at what comes back."""
        rng = self._rng
        if rng.random() < 0.03:
            self.renew()
        kind, send = rng.choice(
            (
                ("call", self._send_call),
                ("call", self._send_call),
                ("recorded call", self._send_recorded_call),
                ("control", self._send_control),
                ("notice", self._send_notice),
                ("notice", self._send_notice),
                ("answer", self._send_answer),
            )
        )
        self.outcome.sent[kind] += 1
        send()

    def _send_call(self) -> None:
        name = self._rng.choice(self._exposed)
        self._call(name, self.grammar.arguments(functions.exposed[name]), self._any_notes(0.1))

    def _send_recorded_call(self) -> None:
        """A call of the user's, with any notes."""
        name = self._rng.choice(("fuzz.echo", "fuzz.double", "fuzz.make_tensor"))
        args = (self.grammar.tensor(),) if name == "fuzz.double" else ()
        self._call(name, args, self._any_notes(0.8))

    def _any_notes(self, chance: float) -> dict[str, Any] | None:
        if self._rng.random() > chance:
            return None
        notes = {}
        for name in self._rng.sample([*self._notes, self._keeper], self._rng.choice((1, 1, 2))):
            kinds = {item.name: item.note_type for item in self.world.honest.interceptors} | KEEPERS
            is_right = name in kinds and self._rng.random() < 0.9
            note = self.grammar.note(kinds[name]) if is_right else self.grammar.any_note()
            if encodable(note):
                notes[name] = note
        return notes

    def _call(self, name: str, args: tuple[Any, ...], notes: dict[str, Any] | None) -> None:
        caller = self.world.hostile.client
        self._last = f"{name}{args!r} with {notes!r}"
        try:
            call = caller.start("v", name, args, None, CALL_S, notes=notes)
            if not call.is_done:
                caller.wait(call)
        except NOT_SENT:
            self.world.check_alive()
            return
        if call.error is not None:
            self._judge(name, call.error)

    def _send_control(self) -> None:
        name = self._rng.choice(list(self._control))
        args = self.grammar.arguments(self._control[name], skip=1)
        done = threading.Event()
        answer: list[PendingCall] = []

        def on_done(call: PendingCall) -> None:
            answer.append(call)
            done.set()

        self._last = f"{name}{args!r}"
        try:
            self.world.hostile.control("v", name.removeprefix("~"), args, CONTROL_S, on_done)
        except NOT_SENT:
            self.world.check_alive()
            return
        if not done.wait(ANSWER_S):
            self.outcome.add(f"{name}: no answer", self._last)
        elif answer[0].error is not None:
            self._judge(name, answer[0].error)

    def _send_notice(self) -> None:
        rng = self._rng
        name = rng.choice(list(self._notices))
        note = self.grammar.note(self._notices[name]) if rng.random() < 0.9 else self.grammar.any_note()
        tensors = [self.grammar.tensor() for _ in range(rng.choice((0, 0, 0, 1, 2)))]
        if not encodable(note):
            return
        self._last = f"notice {name} {note!r} with {tensors!r}"
        for _ in range(rng.choice((1, 1, 1, 2))):
            try:
                self.world.hostile.notices.send("v", name, note, tensors, time.monotonic() + CALL_S)
            except NOT_SENT:
                self.world.check_alive()

    def _send_answer(self) -> None:
        """Has the victim call the hostile worker, which answers with any notes, or asks it about a context."""
        name = self._rng.choice(("fuzz.echo", "fuzz.double", "fuzz.make_tensor", "gradwire.rref.fetch"))
        context_id = self._rng.choice(self._pools.contexts)
        message = [context_id, self.grammar.integer("message_id"), 1]
        self._call("fuzz.call_back", (name, context_id), {"autograd": message})

    # -- what comes of it ------------------------------------------------------------------------------------------------

    def _judge(self, name: str, error: Exception) -> None:
        if isinstance(error, ALLOWED):
            return
        text = str(getattr(error.__cause__, "traceback", ""))
        place = last_frame(text)
        if type(error) in (RuntimeError, NotImplementedError) and not place:  # torch's word for bad tensors
            return
        self.outcome.add(
            f"{name}: {type(error).__name__} in {place or 'elsewhere'}", f"{self._last}\n{error!r}\n{text}"
        )

    def look(self, honest: Honest) -> None:
        """Asks the victim, as the honest worker, how it is."""
        self.world.check_alive()
        try:
            found = honest.ask()
        except Exception as error:
            self.world.check_alive()
            self.outcome.add(f"canary: {type(error).__name__}", f"after {self._last}\n{error!r}")
            return
        del found["examples"]
        for where, kind, message, text in found.pop("problems"):
            key = f"{where.split(' from ')[0]}: {kind} in {last_frame(text) or 'elsewhere'}"
            self.outcome.add(key, f"{message}\n{text}\nlast sent: {self._last}")
        for name, number in found.items():
            self.outcome.largest[name] = max(self.outcome.largest.get(name, 0), number)
            if name in BOUNDS and number > BOUNDS[name]:
                self.outcome.add(f"bounds: {name}", f"{number} {name}; at most {BOUNDS[name]} are expected")
        if found["rss_bytes"] > honest.rss_bytes + MEMORY_BYTES:
            self.outcome.add("bounds: memory", f"grew by {(found['rss_bytes'] - honest.rss_bytes) >> 20} MiB")

    def leave(self) -> None:
        """The hostile worker goes."""
        self._references.clear()
        become(self.world.honest)
        self.world.hostile.close()


class Honest:
    """What the honest worker has on the victim, and how it knows that all is well there.

    Attributes:
        rss_bytes: The victim's memory in the beginning.
    """

    def __init__(self, world: World) -> None:
        self._agent = world.honest
        become(world.honest)
        self._module = RemoteModule("v", "fuzz.Layer")
        self._value = remote("v", "fuzz.make_tensor")
        self._value.to_here()
        parameters = self._module.remote_parameters()
        self._optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
        self.references = [self._module.module_rref, self._value, *parameters, *self._optimizer.remote_optimizers]
        context = engine_of(world.honest).container.new_context()
        self.context_id = context.context_id
        self._x = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
        token = current_context.current_context.set(self.context_id)
        try:
            self._loss = rpc.rpc_sync("v", "fuzz.double", args=(self._x,)).sum()
        finally:
            current_context.leave(token)
        self.message_ids = list(context.sends)
        self.before = self.ask()
        self.rss_bytes: int = self.before["rss_bytes"]

    def ask(self) -> dict[str, Any]:
        """What the victim says of itself; that it says anything is the canary."""
        assert self._agent.call("v", "fuzz.echo", ("canary",), timeout_s=ANSWER_S) == "canary"
        found: dict[str, Any] = self._agent.call("v", "fuzz.state", timeout_s=ANSWER_S)
        return found

    def collect(self) -> None:
        """Has the victim collect garbage."""
        self._agent.call("v", "fuzz.collect", timeout_s=ANSWER_S)

    def check(self) -> Iterator[str]:
        """What is not as it was."""
        become(self._agent)
        if not torch.equal(self._value.to_here(timeout=ANSWER_S), torch.arange(3.0)):
            yield "the value of a reference has changed"
        state = self._module.state_dict()
        if not torch.equal(state["weight"], torch.ones(3)):
            yield f"a parameter has changed: {state}"
        if not torch.equal(self._module(torch.ones(3)).detach(), torch.ones(3)):
            yield "the module gives another result"
        local = self._x.detach().clone().requires_grad_()
        (expected,) = torch.autograd.grad((torch.tanh(local) * 2).sum(), local)
        gw.autograd.backward(self.context_id, [self._loss], timeout=ANSWER_S)
        if not torch.equal(gw.autograd.get_gradients(self.context_id)[self._x], expected):
            yield "a gradient is wrong"

    def close(self) -> None:
        """Lets go of everything."""
        become(self._agent)
        engine_of(self._agent).release(self.context_id)


def run(
    seed: int,
    is_over: Callable[[int], bool],
    own_process: bool = False,
    progress: Callable[[Outcome], None] | None = None,
) -> Outcome:
    """Attack a victim.

    Args:
        seed: Where everything random comes from.
        is_over: Told how many messages were sent, whether that is enough.
        own_process: Whether the victim is a child process.
        progress: Told what came of it so far, now and then.
    """
    with make_world(own_process) as world:
        honest = Honest(world)
        attack = Attack(world, seed)
        outcome = attack.outcome
        try:
            attack.settle_in(honest)
            count = 0
            while not is_over(count):
                attack.send_one()
                count += 1
                if count % CANARY_EVERY == 0:
                    attack.look(honest)
                    if progress is not None:
                        progress(outcome)
            attack.look(honest)
            _check_end(attack, honest)
        except VictimDied as error:
            outcome.add("the victim died", f"{error}; last sent: {attack._last}")
        finally:
            with contextlib.suppress(Exception):
                honest.close()
            become(None)
        return outcome


def _check_end(attack: Attack, honest: Honest) -> None:
    """The honest worker's things are as they were, and nothing is left of the hostile one once it has gone."""
    outcome = attack.outcome
    try:
        for problem in honest.check():
            outcome.add(f"honest worker: {problem.partition(':')[0]}", problem)
    except Exception as error:
        outcome.add(f"honest worker: {type(error).__name__}", repr(error))
    attack.leave()
    kept = ("contexts", "passes", "rounds of gatherings", "values", "references")

    def left() -> dict[str, int]:
        honest.collect()
        found = honest.ask()
        return {name: found[name] for name in kept if found[name] > honest.before[name]}

    def is_clean() -> bool:
        return all(Finding(f"left behind: {name}", "").known for name in left())

    with contextlib.suppress(TimeoutError):
        wait_until(is_clean, ANSWER_S)
    if found := left():
        examples = honest.ask()["examples"]
        for name, number in found.items():
            outcome.add(f"left behind: {name}", f"{number} {name}; {honest.before[name]} before; contexts: {examples}")


def report(outcome: Outcome, seed: int, with_known: bool) -> int:
    """Prints what was found; returns the exit code."""
    print(f"seed {seed}: {sum(outcome.sent.values())} messages {dict(outcome.sent)}; largest: {outcome.largest}")
    for finding in outcome.findings.values():
        print(f"\n{'KNOWN (' + finding.known + ')' if finding.known else 'FOUND'} {finding.key}\n{finding.text}")
    return 1 if outcome.failures(with_known) else 0


def main() -> int:
    """Runs from the command line."""
    parser = argparse.ArgumentParser(description="Send bad data to every operation of a worker.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--here", action="store_true", help="no child process")
    parser.add_argument("--known", action="store_true", help="fail for known findings, too")
    args = parser.parse_args()
    seed = secrets.randbelow(2**32) if args.seed is None else args.seed
    until = time.monotonic() + args.seconds
    outcome = run(seed, lambda _: time.monotonic() > until, own_process=not args.here)
    return report(outcome, seed, args.known)


if __name__ == "__main__":
    sys.exit(main())
