"""What a walk through torch's graph finds: components, recvs and leaves."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from gradwire._torch import leaf_hooks
from gradwire.autograd._graph import LocalGraph
from gradwire.autograd.context import RESULT, RecordedRecv, RecordedSend
from gradwire.autograd.functions import AccumulateGrad, RecvNode, make_recv, make_send

CONTEXT = 1


def leaf() -> torch.Tensor:
    return torch.ones((), requires_grad=True)


def hooked_leaf() -> torch.Tensor:
    found = leaf()
    found.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
    return found


class Came:
    """A message that arrived."""

    def __init__(self, outputs: tuple[torch.Tensor, ...] = ()) -> None:
        self._recv = RecordedRecv(0, 0, "f", outputs[0].grad_fn, tuple(map(weakref.ref, outputs))) if outputs else None

    @property
    def is_watched(self) -> bool:
        return self._recv is not None and self._recv.is_watched

    @property
    def num_tensors(self) -> int:
        return self._recv.num_tensors if self._recv is not None else 0


CAME: dict[int, Came] = {}
KEPT: list[RecordedSend] = []  # the nodes of a send live as long as it does


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    yield
    CAME.clear()
    KEPT.clear()


def recv(message_id: int, num_tensors: int = 1) -> tuple[torch.Tensor, ...]:
    outputs = make_recv(CONTEXT, message_id, [torch.ones(()) for _ in range(num_tensors)])
    CAME[message_id] = Came(outputs)
    return outputs


def walk(
    roots: Sequence[torch.Tensor] = (), recvs: Sequence[int] = (), **sends: torch.Tensor | tuple[torch.Tensor, ...]
) -> LocalGraph:
    """The graph of a worker; sends are named ``s<message id>``, in the order in which they are made."""
    nodes = {}
    for name, values in sends.items():
        tensors = values if isinstance(values, tuple) else (values,)
        KEPT.append(RecordedSend(int(name[1:]), 0, "f", RESULT, list(tensors)))
        nodes[int(name[1:])] = KEPT[-1].start
    return LocalGraph([root.grad_fn for root in roots], nodes, {item: CAME.get(item) or Came() for item in recvs})


def sources_of(graph: LocalGraph) -> list[tuple[bool, tuple[int, ...]]]:
    return [(item.has_roots, item.sends) for item in graph.components]


class TestComponents:
    def test_sends_that_share_nothing_are_apart(self) -> None:
        graph = walk(s1=leaf() * 2, s2=leaf() * 2)
        assert sources_of(graph) == [(False, (1,)), (False, (2,))]

    def test_a_shared_leaf_ties_nothing(self) -> None:
        weight = leaf()
        graph = walk([weight * 2], s1=weight * 3, s2=weight)
        assert sources_of(graph) == [(True, ()), (False, (1,)), (False, (2,))]
        assert [list(map(id, leaves)) for leaves in graph.leaves] == [[id(weight)]] * 3

    def test_a_shared_node_ties_in_the_order_of_the_sends(self) -> None:
        hidden = leaf() * 2
        graph = walk(s3=hidden + 1, s1=leaf() * 2, s2=hidden * 3)
        assert sources_of(graph) == [(False, (3, 2)), (False, (1,))]

    def test_roots_are_one_source(self) -> None:
        graph = walk([leaf() * 2, leaf() * 3], s1=leaf() * 2)
        assert sources_of(graph) == [(True, ()), (False, (1,))]

    def test_skip_connection_ties_a_send_to_the_roots(self) -> None:
        hidden = leaf() * 2
        (there,) = recv(2)
        graph = walk([hidden + there], [2], s1=hidden)
        assert sources_of(graph) == [(True, (1,))]
        assert graph.components[0].recvs == {2}

    def test_ties_join_all_that_they_connect(self) -> None:
        one, two, three = leaf() * 2, leaf() * 2, leaf() * 2
        graph = walk(s1=one, s2=two, s3=three, s4=(one, two), s5=(two, three))
        assert sources_of(graph) == [(False, (1, 2, 3, 4, 5))]
        assert len(graph.leaves[0]) == 3

    def test_no_roots_no_component_for_them(self) -> None:
        assert walk().components == []
        assert walk(s1=leaf()).components[0].has_roots is False


class TestHooks:
    def test_leaf_with_hooks_ties(self) -> None:
        weight = leaf()
        handle = weight.register_hook(lambda _: None)
        assert leaf_hooks(weight)
        assert sources_of(walk(s1=weight * 2, s2=weight * 3)) == [(False, (1, 2))]
        handle.remove()
        assert not leaf_hooks(weight)
        assert len(walk(s1=weight * 2, s2=weight * 3).components) == 2

    def test_leaf_is_listed_once_in_what_it_ties(self) -> None:
        weight = hooked_leaf()
        graph = walk(s1=weight * 2, s2=(weight * 3, leaf()))
        assert len(graph.leaves[0]) == 2
        assert graph.leaves[0][0] is weight

    def test_hooks_that_look_at_grad_do_not_tie(self) -> None:
        """They run at the end of the worker's part."""
        weight = leaf()
        weight.register_post_accumulate_grad_hook(lambda _: None)
        assert len(walk(s1=weight * 2, s2=weight * 3).components) == 2

    def test_plain_leaf_has_none(self) -> None:
        assert not leaf_hooks(leaf())


class TestRecvs:
    def test_shared_one_ties_its_sources(self) -> None:
        one, two = recv(7, num_tensors=2)
        graph = walk([leaf() * 2], [7], s1=one * 2, s2=two)
        assert sources_of(graph) == [(True, ()), (False, (1, 2))]
        assert [item.recvs for item in graph.components] == [frozenset(), {7}]

    def test_each_component_has_those_that_it_reaches(self) -> None:
        (one,), (two,), _unused = recv(1), recv(2), recv(3)
        graph = walk(recvs=[1, 2, 3], s4=one * leaf(), s5=two)
        assert [item.recvs for item in graph.components] == [{1}, {2}]

    def test_of_another_context_is_no_part(self) -> None:
        (foreign,) = recv(9)
        graph = walk(recvs=[1], s2=foreign * 2)
        assert graph.components[0].recvs == frozenset()

    def test_changed_in_place_is_still_reached(self) -> None:
        (value,) = recv(1)
        value.mul_(2)
        assert walk([value * leaf()], [1]).components[0].recvs == {1}

    def test_walk_ends_there(self) -> None:
        """What is behind a recv, the anchor of all of them, is nobody's leaf."""
        (value,) = recv(1)
        assert walk([value * 2], [1]).leaves == [[]]


class TestReachedBy:
    def test_only_from_the_given_sends(self) -> None:
        (one,), (two,) = recv(1), recv(2)
        hidden = leaf() * one
        graph = walk(recvs=[1, 2], s3=hidden, s4=hidden * two)
        assert sources_of(graph) == [(False, (3, 4))]
        assert graph.reached_by(0, [3, 4]) == {1, 2}
        assert graph.reached_by(0, [3]) == {1}
        assert graph.reached_by(0, []) == set()

    def test_from_the_roots_in_any_case(self) -> None:
        (one,), (two,) = recv(1), recv(2)
        hidden = leaf() * one
        graph = walk([hidden * 2], [1, 2], s3=hidden * two)
        assert graph.reached_by(0, []) == {1}
        assert graph.reached_by(0, [3]) == {1, 2}

    def test_roots_of_another_component_do_not_count(self) -> None:
        (one,), (two,) = recv(1), recv(2)
        graph = walk([one * 2], [1, 2], s3=two * 2)
        assert graph.reached_by(1, []) == set()
        assert graph.reached_by(1, [3]) == {2}

    def test_diamond_is_walked_once(self) -> None:
        (value,) = recv(1)
        for _ in range(60):  # 2 to the 60 paths
            value = value + value
        assert walk([value], [1]).reached_by(0, []) == {1}


class TestInputs:
    def test_leaves_and_others_where_they_are_reached(self) -> None:
        here, there, nowhere = leaf(), leaf(), leaf()
        hidden = there * 2
        graph = walk([here * 2], s1=hidden * 3)
        wanted = [nowhere, hidden, here, there, nowhere * 2]
        assert list(map(id, graph.inputs_in(0, wanted))) == [id(here)]
        assert list(map(id, graph.inputs_in(1, wanted))) == [id(hidden), id(there)]

    def test_each_once(self) -> None:
        here = leaf()
        assert len(walk([here * 2]).inputs_in(0, [here, here])) == 1


class TestDirectLeaves:
    def test_send_of_leaves_alone(self) -> None:
        one, two = leaf(), leaf()
        graph = walk([two * 2], s1=(one, two, one), s2=(one, two * 2))
        assert graph.direct[0] is None
        assert graph.direct[1] is not None
        assert list(map(id, graph.direct[1])) == [id(one), id(two), id(one)]
        assert graph.direct[2] is None

    def test_what_came_and_goes_on_untouched(self) -> None:
        weight, (_, second), (other,) = leaf(), recv(1, 2), recv(2)
        graph = walk(recvs=[1, 2], s3=(second, weight, other, second))
        assert graph.direct[0] == [(1, 1), weight, (2, 0), (1, 1)]
        assert graph.components[0].recvs == {1, 2}
        changed = recv(1)[0].mul_(2)
        assert walk(recvs=[1], s3=changed).direct == [None]
        assert walk(s3=recv(1)[0]).direct == [None]  # of another context: the engine says what is wrong

    @pytest.mark.parametrize("watch", ["hook", "dropped", "node", "before the node", "retained"])
    def test_not_if_somebody_watches_what_came(self, watch: str) -> None:
        (value,) = recv(1)
        node: Any = value.grad_fn
        handle = make_send(2, [value])
        sent = handle.grad_fn
        assert LocalGraph([], {2: sent}, CAME).direct == [[(1, 0)]]
        if watch in ("hook", "dropped"):
            value.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
        elif watch == "node":
            node.register_hook(lambda *_: None)
        elif watch == "before the node":
            node.register_prehook(lambda *_: None)
        else:
            value.retain_grad()
        if watch == "dropped":
            del value
        assert LocalGraph([], {2: sent}, CAME).direct == [None]

    def test_not_with_hooks_or_company(self) -> None:
        weight, (value,) = hooked_leaf(), recv(1)
        graph = walk(recvs=[1], s2=weight, s3=value, s4=value)
        assert graph.direct == [None, None]


def test_room_is_made_below_nodes_of_new_threads() -> None:
    """Numbers count from 0 in every thread: what a new one makes first would come after the gates."""
    made: list[torch.Tensor] = []

    def compute() -> None:
        first = leaf() * 2
        made.extend([first, first * 3])

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join(10)
    first, second = (node_of(value) for value in made)
    assert first._sequence_nr() == 0
    after = second._sequence_nr()
    graph = walk([made[1]])
    graph.make_room_below()
    assert first._sequence_nr() == 1
    assert second._sequence_nr() == after


def node_of(value: torch.Tensor) -> Any:
    assert value.grad_fn is not None
    return value.grad_fn


# -- the same by brute force ------------------------------------------------------------------------------------------------


def reached_from(node: Any) -> Iterator[Any]:
    """All nodes behind a node and itself, but not what is behind recvs."""
    seen, stack = {node}, [node]
    while stack:
        yield (found := stack.pop())
        for following, _ in () if type(found) is RecvNode else found.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def make_random_graph(rng: random.Random) -> tuple[list[torch.Tensor], dict[int, tuple[torch.Tensor, ...]], list[int]]:
    """Roots, sends and recvs of a random worker."""
    leaves = [hooked_leaf(), leaf(), leaf()]
    recvs = list(range(100, 100 + rng.randint(0, 4)))
    values = [*leaves, *(value for number in recvs for value in recv(number, rng.randint(1, 2)))]
    for _ in range(rng.randint(0, 6)):
        values.append(sum(rng.choices(values[-4:], k=2), torch.zeros(())))
    sends = {number: tuple(rng.sample(values, rng.randint(1, 2))) for number in range(1, 1 + rng.randint(0, 5))}
    roots = [value for value in values if value.grad_fn is not None][-rng.randint(0, 2) :]
    return (roots if rng.random() < 0.5 else []), sends, recvs


@pytest.mark.parametrize("seed", range(100))
def test_random_graph(seed: int) -> None:
    roots, sends, recvs = make_random_graph(random.Random(seed))
    graph = walk(roots, recvs, **{f"s{number}": values for number, values in sends.items()})
    starts: dict[int, list[Any]] = {0: [node_of(root) for root in roots]} if roots else {}
    handles = {number: make_send(number, values) for number, values in sends.items()}
    starts |= {number: [node_of(handle)] for number, handle in handles.items()}
    reached = {source: {node for start in nodes for node in reached_from(start)} for source, nodes in starts.items()}
    expected = {frozenset({source}) for source in starts}
    for one, first in reached.items():
        for other, second in reached.items():
            if any(type(node) is not AccumulateGrad or leaf_hooks(node.variable) for node in first & second):
                tied = {group for group in expected if group & {one, other}}
                expected = (expected - tied) | {frozenset().union(*tied)}
    found = {frozenset([*item.sends, *([0] if item.has_roots else [])]) for item in graph.components}
    assert found == expected
    for index, item in enumerate(graph.components):
        nodes = set().union(*(reached[source] for source in [*item.sends, *([0] if item.has_roots else [])]))
        assert item.recvs == {node.message_id for node in nodes if type(node) is RecvNode}
        assert item.recvs == graph.reached_by(index, item.sends)
        assert set(map(id, graph.leaves[index])) == {
            id(node.variable) for node in nodes if type(node) is AccumulateGrad
        }


# -- what only passes through ------------------------------------------------------------------------------------------


def test_sends_of_what_came_from_others() -> None:
    (one, other), (third,), (used,) = recv(11, 2), recv(12), recv(13)
    found = walk([used * 2], [11, 12, 13], s1=(other, third, other), s2=one * 2, s3=used)
    assert found.untouched == {}  # a part of message 11 is used besides, and 13 by the root
    (one, other), (third,) = recv(11, 2), recv(12)
    found = walk([], [11, 12], s1=(other, third, other))
    assert found.untouched == {1: ((11, 1, 2), (12, 0, 1), (11, 1, 2))}


def test_sends_with_anything_else_are_not_untouched() -> None:
    (came,), (watched,) = recv(11), recv(12)
    watched.register_hook(lambda _: None)  # type: ignore[no-untyped-call]
    assert walk([], [11, 12], s1=(came, leaf()), s2=watched, s3=leaf()).untouched == {}
