"""Breadth-first over everything that may happen to a few workers, within bounds."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.rref._ownership import Ownership, ReferenceProtocol
from properties.ownership_items import Move, Violation
from properties.ownership_world import World


class Bounds(NamedTuple):
    """How often each kind of thing happens at most.

    Attributes:
        sends: References that people send.
        losses: Messages of people that are lost, or calls that are given up.
        repeats: Messages of any kind that arrive twice.
        asks: Questions for what is overdue, each about one reference.
        crashes: Workers that end.
        cuts: Times that a worker takes a living one for dead.
    """

    sends: int = 0
    losses: int = 0
    repeats: int = 0
    asks: int = 0
    crashes: int = 0
    cuts: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def fits(self, other: Bounds) -> bool:
        return all(mine <= its for mine, its in zip(self, other, strict=True))

    def less(self, kind: str) -> Bounds:
        return self._replace(**{kind: getattr(self, kind) - 1})


@dataclass(frozen=True)
class Found:
    """What a search has seen.

    Attributes:
        num_states: Different states.
        num_ends: Those of them in which everything had arrived and was dropped.
    """

    num_states: int
    num_ends: int


def first_world(
    values: str,
    num_workers: int = 3,
    make_machine: type[Ownership] = Ownership,
    make_protocol: type[ReferenceProtocol] = ReferenceProtocol,
) -> World:
    """Workers with values: "own" is one that worker 0 shares, "created" one that the last worker is making on worker 1,
    and "made" the same when it is there already.
    """
    world = World(num_workers, make_machine, make_protocol)
    if "own" in values:
        world.make(0)
    if "created" in values or "made" in values:
        world.create(num_workers - 1, 1)
    for _ in range(2 * ("made" in values)):
        world.apply(world.deliveries()[0])
    return world


def possible(world: World, left: Bounds) -> list[tuple[Move, Bounds]]:
    """What may happen next, and what may happen after that."""
    deliveries = world.deliveries()
    free = [*deliveries, *world.drops(), *world.notices(), *world.sights()]
    found = [(move, left) for move in free]
    if left.sends:
        found += [(move, left.less("sends")) for move in world.sends()]
    if left.losses:
        found += [(move, left.less("losses")) for move in (*world.losses(), *world.failures())]
    if left.repeats:
        found += [(move, left.less("repeats")) for move in world.repeats()]
    if left.asks:
        found += [(move, left.less("asks")) for move in world.overdues()]
    if left.crashes:
        found += [(("crash", rank), left.less("crashes")) for rank in world.alive]
    if left.cuts:
        pairs = [(a, b) for a in world.alive for b in world.alive if a != b and (a, b) not in world.noticed]
        found += [(("cut", *pair), left.less("cuts")) for pair in pairs]
    return found


def search(start: World, bounds: Bounds, max_states: int = 10_000_000) -> Found:
    """Visits every state that can be reached, those first for which least had to go wrong.

    Raises:
        Violation: In one of them a rule is broken; the message tells how to get there.
    """
    gc.disable()  # everything that is made here stays: looking for garbage again and again takes long and finds none
    try:
        return _search(start, bounds, max_states)
    finally:
        start.forget_steps()  # they refer to each other, and only a search for garbage would find them otherwise
        gc.enable()


def _search(start: World, bounds: Bounds, max_states: int) -> Found:
    key = start.key()
    came_from: dict[int, tuple[int, Move] | None] = {key: None}
    visited: dict[int, list[Bounds]] = {key: [bounds]}
    todo = [deque() for _ in range(bounds.total + 1)]
    todo[bounds.total].append((start, bounds, key))
    num_ends = 0
    while len(came_from) < max_states and (queue := next((queue for queue in reversed(todo) if queue), None)):
        world, left, here = queue.popleft()
        move: Move = ()
        try:
            num_ends += _check_end(world)
            world.check_agreement()
            for move, then in possible(world, left):
                after = world.copy()
                after.apply(move)
                if not bounds.cuts:
                    after.skip_noise()
                key = after.key()
                if not any(then.fits(known) for known in visited.get(key, ())):
                    visited.setdefault(key, []).append(then)
                    came_from.setdefault(key, (here, move))
                    todo[then.total].append((after, then, key))
        except Violation as error:
            raise Violation("\n".join([str(error), *_path(came_from, here), repr(move)])) from None
    return Found(len(came_from), num_ends)


def _check_end(world: World) -> bool:
    """Where nothing is under way any more, and nobody has anything, nothing may be left."""
    if not world.is_idle or world.held or world.needed or world.notices() or world.sights():
        return False
    world.copy().settle()
    return True


def _path(came_from: dict[int, tuple[int, Move] | None], key: int) -> list[str]:
    steps = []
    step = came_from[key]
    while step is not None:
        steps.append(repr(step[1]))
        step = came_from[step[0]]
    return steps[::-1]
