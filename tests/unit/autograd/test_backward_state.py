"""The rules of a backward pass on one worker, each by a small case; when it ends, and when it never will."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import pytest

from gradwire.autograd._backward_state import (
    Abort,
    Action,
    BackwardState,
    Commit,
    Component,
    ComponentPhase,
    Fail,
    Firing,
    Introduction,
    Mode,
    Origin,
    PassPhase,
    PassSnapshot,
    Report,
    Route,
    RunComponent,
    Tell,
    Termination,
    WaitingSend,
    is_stalled,
)

# -- The rules of a backward pass on one worker, each by a small case ---------------------------------------------------


OWN, B, C = 0, 1, 2


class Exchange(NamedTuple):
    message_id: int
    peer: int
    is_send: bool


def sent(message_id: int, peer: int = B) -> Exchange:
    return Exchange(message_id, peer, is_send=True)


def came(message_id: int, peer: int = B) -> Exchange:
    return Exchange(message_id, peer, is_send=False)


def tied(*sends: int, recvs: Collection[int] = (), has_roots: bool = False) -> Component:
    return Component(sends, frozenset(recvs), has_roots)


def make_state(
    exchanges: Sequence[Exchange],
    *components: Component,
    reached: Mapping[int, Collection[int]] | None = None,
    mode: Mode = Mode.SMART,
    lost: Collection[int] = (),
    untouched: Mapping[int, tuple[Origin, ...]] | None = None,
    root: int = OWN,
) -> BackwardState:
    """A pass on worker 0.

    Args:
        exchanges: In the order in which they were made.
        components: Of its graph.
        reached: Which recvs each send reaches, where not all of its component; -1 stands for the roots.
        mode: SMART or FAST.
        lost: Workers that are gone.
        untouched: Sends of what came from others.
        root: The worker that called backward.
    """

    def reached_by(index: int, sends: Collection[int]) -> set[int]:
        sources = [*sends, -1] if components[index].has_roots else list(sends)
        table = reached or {}
        return {recv for source in sources for recv in table.get(source, components[index].recvs)}

    return BackwardState(OWN, mode, exchanges, components, reached_by, lost, untouched, root)


def begun(state: BackwardState, heard: Collection[int] = (B, C)) -> BackwardState:
    """The same, joined by messages of workers that need not be woken."""
    state.begin(heard)
    return state


def give(state: BackwardState, *sends: int, peer: int = B) -> list[Action]:
    return state.message_received(peer, None, dict.fromkeys(sends, True))


def deny(state: BackwardState, *sends: int, peer: int = B) -> list[Action]:
    return state.message_received(peer, None, dict.fromkeys(sends, False))


def routes_of(state: BackwardState, recv: int) -> tuple[Route, ...] | None:
    """Where the gradient of a recv goes that fires now; None to its sender."""
    firing = state.recv_fired(recv)
    assert firing is not None
    return firing.routes


class TestRuns:
    def test_one_source_runs_when_it_is_settled(self) -> None:
        state = make_state([came(1), sent(2)], tied(2, recvs=[1]))
        assert state.begin({B}) == []
        assert state.phases == (ComponentPhase.WAITING,)
        assert give(state, 2) == [RunComponent(0, (2,))]
        assert state.phases == (ComponentPhase.RUNNING,)
        state.recv_fired(1)
        assert state.component_finished(0) == [Report((B,))]
        assert state.phases == (ComponentPhase.DONE,)

    def test_roots_run_at_once_and_wait_inside_for_sends_they_are_tied_to(self) -> None:
        state = make_state([sent(1), came(2)], tied(1, recvs=[2], has_roots=True))
        assert state.begin() == [RunComponent(0, (1,))]
        assert give(state, 1) == []  # the run picks it up
        assert state.is_settled(1)

    def test_roots_and_free_sends_run_side_by_side(self) -> None:
        state = make_state([sent(1), came(2)], tied(recvs=[2], has_roots=True), tied(1))
        assert state.begin() == [RunComponent(0, ())]
        assert give(state, 1) == [RunComponent(1, (1,))]

    def test_sources_that_share_a_node_run_once_from_the_last_on(self) -> None:
        state = begun(make_state([sent(1), sent(2), sent(3)], tied(1, 2, 3)))
        assert give(state, 1) == []
        assert give(state, 3) == [RunComponent(0, (1, 2, 3))]
        assert give(state, 2) == []
        assert state.component_finished(0) == [Report((B,))]

    def test_source_without_gradient_is_left_out(self) -> None:
        state = begun(make_state([sent(1), sent(2)], tied(1, 2)))
        assert give(state, 1) == []
        assert deny(state, 2) == [RunComponent(0, (1,))]

    def test_nothing_for_an_earlier_source_does_not_start_a_run(self) -> None:
        state = begun(make_state([sent(1), sent(2)], tied(1, 2)))
        assert deny(state, 1) == []
        assert give(state, 2) == [RunComponent(0, (2,))]

    def test_component_without_any_gradient_does_not_run(self) -> None:
        state = begun(make_state([came(1), came(2, C), sent(3), sent(4)], tied(3, 4, recvs=[1, 2])))
        assert deny(state, 3) == []
        assert sorted(map(repr, deny(state, 4))) == sorted(map(repr, [Tell(B, (1,)), Tell(C, (2,)), Report((B, C))]))
        assert state.phases == (ComponentPhase.DONE,)

    def test_end_of_a_run_is_told_once(self) -> None:
        state = make_state([], tied(has_roots=True))
        state.begin()
        assert state.component_finished(0) == [Report(())]
        assert state.component_finished(0) == []


class TestRecvs:
    def test_those_that_nothing_reaches_are_answered_on_joining(self) -> None:
        state = make_state([came(1), came(2), came(3, C), sent(4)], tied(4, recvs=[2]))
        assert state.begin() == [Tell(B, (1,)), Tell(C, (3,))]
        assert state.recv_fired(1) is None
        assert state.recv_fired(2) is not None

    def test_those_of_one_worker_are_answered_together(self) -> None:
        state = make_state([came(1), came(2)])
        assert state.begin({B}) == [Tell(B, (1, 2)), Report((B,))]

    def test_those_cut_off_are_answered_as_soon_as_that_is_known(self) -> None:
        state = begun(
            make_state([came(1), came(2, C), sent(3), sent(4)], tied(3, 4, recvs=[1, 2]), reached={3: [1], 4: [1, 2]})
        )
        assert deny(state, 4) == [Tell(C, (2,))]
        assert give(state, 3) == [RunComponent(0, (3,))]

    def test_roots_keep_what_they_reach(self) -> None:
        state = make_state(
            [came(1), came(2, C), sent(3, OWN)], tied(3, recvs=[1, 2], has_roots=True), reached={-1: [1], 3: [2]}
        )
        assert state.begin() == [Tell(C, (2,)), RunComponent(0, ())]

    def test_what_the_engine_never_reaches_is_answered_when_it_is_done(self) -> None:
        state = begun(make_state([came(1), came(2), sent(3)], tied(3, recvs=[1, 2])))
        give(state, 3)
        state.recv_fired(1)
        assert state.component_finished(0) == [Tell(B, (2,)), Report((B,))]

    def test_fires_once_and_makes_its_worker_a_peer(self) -> None:
        state = make_state([came(1, C)], tied(recvs=[1], has_roots=True))
        state.begin()
        assert not state.peers
        assert state.recv_fired(1) == Firing(None, is_last=True, is_lost=False)
        assert state.recv_fired(1) is None
        assert state.recv_fired(99) is None
        assert state.peers == (C,)
        assert state.component_finished(0) == [Report((C,))]

    def test_the_last_takes_the_report_along(self) -> None:
        state = begun(make_state([came(1), sent(2)], tied(2, recvs=[1]), root=B), {B})
        give(state, 2)
        state.recv_fired(1)
        assert state.report_early() == Report((B,))
        assert state.phase is PassPhase.DONE
        assert state.report_early() is None
        assert state.component_finished(0) == []
        assert state.abort() == Abort((B,), ends=False)  # from now on the root decides

    def test_the_report_waits_for_what_else_runs(self) -> None:
        state = begun(make_state([came(1), sent(2), sent(3)], tied(2, recvs=[1]), tied(3), root=B), {B})
        give(state, 2, 3)
        state.recv_fired(1)
        assert state.report_early() is None
        assert state.component_finished(0) == []
        assert state.component_finished(1) == [Report((B,))]

    def test_of_another_context_counts_as_fired(self) -> None:
        assert make_state([]).recv_fired(5) is None


class TestWaking:
    def test_destinations_of_sends_are_told_of_the_pass(self) -> None:
        state = make_state([sent(1), sent(2), sent(3, C)], tied(1), tied(2), tied(3))
        assert state.begin() == [Tell(B), Tell(C)]
        assert state.peers == (B, C)

    def test_not_who_will_certainly_get_an_answer(self) -> None:
        """The recv is younger than all sends to that worker, so what fires it needs no help of that worker."""
        state = make_state([sent(1), came(2)], tied(1), tied(recvs=[2], has_roots=True))
        assert state.begin() == [RunComponent(1, ())]

    def test_but_who_has_got_something_since(self) -> None:
        state = make_state([sent(1), came(2), sent(3)], tied(1), tied(3), tied(recvs=[2], has_roots=True))
        assert state.begin() == [Tell(B), RunComponent(2, ())]

    def test_not_who_knows_already(self) -> None:
        assert make_state([sent(1)], tied(1)).begin({B}) == []

    def test_not_who_is_told_something_anyway(self) -> None:
        state = make_state([came(1), sent(2)], tied(2))
        assert state.begin() == [Tell(B, (1,))]

    def test_not_the_worker_itself(self) -> None:
        state = make_state([sent(1, OWN), came(1, OWN)], tied(1), tied(recvs=[1], has_roots=True))
        assert state.begin() == [RunComponent(1, ())]


class TestIntroductions:
    def test_says_what_is_recorded_here(self) -> None:
        state = make_state([sent(1), came(2), sent(3, C), came(4, C), sent(5)])
        assert state.introduction_to(B) == Introduction(has=(2,), expects=(1, 5))
        assert state.introduction_to(C) == Introduction(has=(4,), expects=(3,))
        assert state.introduction_to(OWN) is None

    def test_send_that_never_arrived_is_settled(self) -> None:
        state = begun(make_state([sent(1), sent(2), sent(3, C)], tied(1), tied(2), tied(3)))
        assert state.message_received(B, Introduction(has=(2,)), {}) == []
        assert state.unsettled == (2, 3)
        assert state.phases[0] is ComponentPhase.DONE

    def test_also_if_another_message_came_first(self) -> None:
        state = begun(make_state([sent(1), sent(2)], tied(1), tied(2)))
        give(state, 2)
        state.message_received(B, Introduction(has=(2,)), {})
        assert state.unsettled == ()

    def test_message_that_never_arrived_here_is_answered(self) -> None:
        state = begun(make_state([came(1)], tied(recvs=[1], has_roots=True)), heard=())
        assert state.message_received(B, Introduction(expects=(1, 7, 8)), {}) == [Tell(B, (7, 8))]
        assert state.peers == (B,)

    def test_worker_that_has_nothing_reports_and_answers(self) -> None:
        """The call that made it known failed before it arrived."""
        state = make_state([])
        assert state.begin({B}) == [Report(())]
        assert state.message_received(B, Introduction(expects=(1,)), {}) == [Tell(B, (1,))]

    def test_gradient_that_comes_along_counts(self) -> None:
        state = begun(make_state([sent(1)], tied(1)))
        assert state.message_received(B, Introduction(has=(1,)), {1: True}) == [RunComponent(0, (1,))]


def make_passing(**options: Any) -> BackwardState:
    """What came from B in message 1 went to C in message 2, and the roots use what C made of it."""
    exchanges = [came(1), sent(2, C), came(3, C)]
    parts = [tied(recvs=[3], has_roots=True), tied(2, recvs=[1])]
    return make_state(exchanges, *parts, untouched={2: ((1, 0, 2),)}, **options)


class TestShortcutsOffered:
    def test_to_who_has_it_and_where_it_came_from_is_told(self) -> None:
        state = make_passing()
        assert state.begin() == [Tell(B), RunComponent(0, ())]
        assert state.introduction_to(C) == Introduction(has=(3,), expects=(2,), shortcuts=((2, ((B, 1, 0, 2),)),))
        assert state.introduction_to(B) == Introduction(has=(1,))
        state.recv_fired(3)
        assert state.component_finished(0) == [Report((B, C))]

    def test_back_to_where_it_came_from_with_the_gradient(self) -> None:
        exchanges = [came(1), sent(2), came(3)]
        state = make_state(
            exchanges, tied(recvs=[3], has_roots=True), tied(2, recvs=[1]), untouched={2: ((1, 0, 1), (1, 0, 1))}
        )
        assert state.begin() == [RunComponent(0, ())]
        assert state.introduction_to(B) == Introduction((1, 3), (2,), ((2, ((B, 1, 0, 1), (B, 1, 0, 1))),))

    @pytest.mark.parametrize("has_gradient", [True, False])
    @pytest.mark.parametrize("is_reported", [True, False])
    def test_answer_that_comes_nevertheless_is_passed_on(self, is_reported: bool, has_gradient: bool) -> None:
        state = make_passing()
        state.begin()
        if is_reported:
            state.recv_fired(3)
            state.component_finished(0)
        assert not state.is_settled(2)
        actions = state.message_received(C, None, {2: has_gradient})
        assert actions == ([RunComponent(1, (2,))] if has_gradient else [Tell(B, (1,))])
        assert state.is_settled(2)
        if has_gradient:
            assert routes_of(state, 1) is None
            assert state.component_finished(1) == []
        assert state.has_reported is is_reported
        assert state.message_received(C, None, {2: has_gradient}) == []

    def test_not_to_who_may_have_answered_already(self) -> None:
        state = make_passing()
        assert state.begin({C}) == [RunComponent(0, ())]
        assert state.unsettled == (2,)
        assert state.introduction_to(C) == Introduction((3,), (2,))

    def test_also_if_where_it_came_from_was_heard(self) -> None:
        """Nobody else tells that worker what was recorded here."""
        assert Tell(B) in make_passing().begin({B})

    @pytest.mark.parametrize("lost", [B, C])
    def test_not_if_one_of_them_is_lost(self, lost: int) -> None:
        state = make_passing(lost=[lost])
        state.begin()
        assert not any(introduction.shortcuts for peer in (B, C) if (introduction := state.introduction_to(peer)))

    def test_not_in_fast_mode(self) -> None:
        state = make_passing(mode=Mode.FAST)
        assert state.begin() == [RunComponent(0, ())]
        assert state.unsettled == (2,)

    def test_not_for_messages_to_oneself(self) -> None:
        exchanges = [came(1, OWN), sent(2, C), came(3, C)]
        state = make_state(exchanges, tied(recvs=[3], has_roots=True), tied(2, recvs=[1]), untouched={2: ((1, 0, 1),)})
        state.begin()
        assert state.unsettled == (2,)

    def test_worker_that_is_lost_before_it_heard_is_done_without(self) -> None:
        state = make_passing()
        state.begin()
        assert state.worker_lost(C) == [Tell(B, (1,))]
        assert state.component_finished(0) == [Report((B,), (C,))]


class TestShortcutsTaken:
    OFFER = Introduction(has=(3,), expects=(2,), shortcuts=((2, ((C, 1, 0, 1),)),))

    def test_gradient_goes_there(self) -> None:
        state = begun(make_state([came(2), sent(3)], tied(3, recvs=[2])))
        state.message_received(B, self.OFFER, {})
        give(state, 3)
        assert routes_of(state, 2) == ((C, 1, 0, 1),)
        assert state.component_finished(0) == [Report((B, C))]

    def test_that_there_is_none_is_told_there_and_via_whom(self) -> None:
        state = begun(make_state([came(2), sent(3)], tied(3, recvs=[2])))
        state.message_received(B, self.OFFER, {})
        assert deny(state, 3) == [Tell(C, (1,), B), Report((B, C))]

    def test_own_send_is_settled_here(self) -> None:
        state = begun(make_state([sent(1), came(2), sent(3)], tied(1), tied(3, recvs=[2])))
        state.message_received(B, Introduction((1,), (2,), ((2, ((OWN, 1, 0, 1),)),)), {3: True})
        assert routes_of(state, 2) == ((OWN, 1, 0, 1),)
        assert state.came_back({1: True}) == [RunComponent(0, (1,))]
        assert state.component_finished(1) == []
        assert state.component_finished(0) == [Report((B,))]

    def test_own_send_is_settled_here_with_nothing(self) -> None:
        state = begun(make_state([sent(1), came(2), sent(3)], tied(1), tied(3, recvs=[2])))
        offer = Introduction((1, 3), (2,), ((2, ((OWN, 1, 0, 1),)),))
        assert state.message_received(B, offer, {3: False}) == [Report((B,))]

    def test_too_late_for_what_has_fired(self) -> None:
        state = begun(make_state([came(2), sent(3)], tied(3, recvs=[2])))
        give(state, 3)
        assert routes_of(state, 2) is None
        state.message_received(B, self.OFFER, {})
        assert state.component_finished(0) == [Report((B,))]

    def test_only_from_who_sent_the_message(self) -> None:
        state = begun(make_state([came(2), sent(3)], tied(3, recvs=[2])))
        state.message_received(C, msgspec.structs.replace(self.OFFER, expects=()), {})
        assert routes_of(state, 2) is None


class TestOwnMessages:
    def test_send_that_has_not_arrived_yet_is_settled(self) -> None:
        state = make_state([sent(1, OWN)], tied(1))
        assert state.begin() == [Report(())]

    def test_recv_that_nothing_reaches_settles_its_send_without_a_message(self) -> None:
        state = make_state([sent(1, OWN), came(1, OWN), sent(2), came(2, OWN)], tied(1), tied(2))
        assert Tell(OWN, (1,)) not in state.begin({B})
        assert state.is_settled(1)

    def test_run_that_follows_from_an_own_answer_begins_once(self) -> None:
        """Nothing for 3 cuts recv 1 off; its send is of the same component, and leaves only 2, which is settled."""
        state = begun(
            make_state(
                [sent(1, OWN), came(1, OWN), sent(2), sent(3)], tied(1, 2, 3, recvs=[1]), reached={1: [], 2: [], 3: [1]}
            )
        )
        assert give(state, 2) == []
        assert deny(state, 3) == [RunComponent(0, (2,))]

    def test_component_that_an_own_answer_ends_does_not_run(self) -> None:
        state = begun(make_state([sent(1, OWN), came(1, OWN), sent(2)], tied(1, 2, recvs=[1]), reached={1: [], 2: [1]}))
        assert deny(state, 2) == [Report((B,))]
        assert state.phases == (ComponentPhase.DONE,)

    def test_wait_goes_on_after_an_own_answer(self) -> None:
        state = begun(
            make_state(
                [sent(1, OWN), came(1, OWN), sent(2), sent(3)], tied(1, 2, 3, recvs=[1]), reached={1: [], 2: [], 3: [1]}
            )
        )
        assert deny(state, 3) == []
        assert give(state, 2) == [RunComponent(0, (2,))]

    def test_own_worker_is_no_peer(self) -> None:
        state = make_state([sent(1, OWN), came(1, OWN)], tied(1), tied(recvs=[1], has_roots=True))
        state.begin()
        state.recv_fired(1)
        assert give(state, 1, peer=OWN) == [RunComponent(0, (1,))]
        assert state.peers == ()


class TestRepeats:
    def test_second_answer_is_ignored(self) -> None:
        state = begun(make_state([sent(1)], tied(1)))
        assert give(state, 1) == [RunComponent(0, (1,))]
        assert give(state, 1) == []
        assert deny(state, 1) == []
        assert state.component_finished(0) == [Report((B,))]
        assert give(state, 1) == []

    def test_answer_for_a_send_made_later_is_ignored(self) -> None:
        state = begun(make_state([sent(1)], tied(1)))
        assert deny(state, 99) == []
        assert state.unsettled == (1,)

    def test_repeated_introduction_is_answered_again(self) -> None:
        state = begun(make_state([]))
        for _ in range(2):
            assert state.message_received(B, Introduction(expects=(1,)), {}) == [Tell(B, (1,))]


class TestLosses:
    @pytest.mark.parametrize("how", ["told", "heard"])
    def test_of_a_participant_fails_the_pass(self, how: str) -> None:
        state = make_state([sent(1)], tied(1))
        if how == "told":
            state.begin()
        else:
            state.begin({B})
            deny(state)
        assert state.worker_lost(B) is None
        assert state.unsettled == (1,)

    def test_of_one_that_has_to_do_with_nothing_changes_nothing(self) -> None:
        state = begun(make_state([sent(1)], tied(1)))
        assert state.worker_lost(9) == []
        assert give(state, 1) == [RunComponent(0, (1,))]
        assert state.component_finished(0) == [Report((B,))]

    def test_sends_to_the_dead_are_settled_and_the_root_hears_whom_was_done_without(self) -> None:
        state = make_state([sent(1), came(2)], tied(1), tied(recvs=[2], has_roots=True))
        state.begin()
        assert state.worker_lost(B) == []
        assert state.is_settled(1)
        assert state.component_finished(1) == [Report((), (B,))]

    def test_before_the_pass_is_the_same(self) -> None:
        state = make_state([sent(1), sent(2, C), came(3)], tied(1), tied(2), lost={B, 9})
        assert state.begin() == [Tell(C)]
        assert state.unsettled == (2,)
        give(state, 2, peer=C)
        assert state.component_finished(1) == [Report((C,), (B,))]

    def test_nothing_is_told_to_the_dead(self) -> None:
        state = make_state([came(1), sent(2, C)], tied(2, recvs=[1]))
        state.begin({C})
        assert state.worker_lost(B) == []
        assert deny(state, 2, peer=C) == [Report((C,))]

    def test_nothing_that_fires_for_the_dead_makes_it_a_participant(self) -> None:
        state = make_state([came(1), came(2, C)], tied(recvs=[1, 2], has_roots=True), lost={B})
        state.begin()
        state.recv_fired(1)
        state.recv_fired(2)
        assert state.component_finished(0) == [Report((C,))]


class TestFastMode:
    def test_nobody_is_woken_introduced_or_answered(self) -> None:
        state = make_state([came(1), sent(2), sent(3, C)], tied(2), tied(3), mode=Mode.FAST)
        assert state.begin() == []
        assert state.introduction_to(B) is None
        assert give(state, 2) == [RunComponent(0, (2,))]
        assert state.component_finished(0) == []
        assert state.unsettled == (3,)

    def test_pass_in_which_everything_is_used_ends(self) -> None:
        state = make_state([came(1), sent(2)], tied(2), tied(recvs=[1], has_roots=True), mode=Mode.FAST)
        assert state.begin() == [RunComponent(1, ())]
        state.recv_fired(1)
        assert state.component_finished(1) == []
        assert give(state, 2) == [RunComponent(0, (2,))]
        assert state.component_finished(0) == [Report((B,))]

    def test_nothing_is_not_passed_on(self) -> None:
        state = make_state([came(1, C), sent(2)], tied(2, recvs=[1]), mode=Mode.FAST)
        state.begin()
        assert deny(state, 2) == [Report((B,))]
        assert state.recv_fired(1) is not None


class TestTwoPhaseCommit:
    def make_participant(self) -> BackwardState:
        """Of a pass that B began; it has woken C, and has nothing else to do."""
        state = make_state([came(1), sent(2, C), sent(3)], tied(2), tied(3, recvs=[1]), root=B)
        state.begin({B})
        return state

    def test_worker_that_has_not_reported_tells_all_it_knows(self) -> None:
        state = self.make_participant()
        assert state.abort() == Abort((B, C))
        assert state.phase is PassPhase.ABORTED
        assert state.abort() is None

    def test_worker_that_has_reported_asks_the_root(self) -> None:
        state = self.make_participant()
        state.done_here()
        assert state.abort() == Abort((B,), ends=False)
        assert state.abort(sender=C) is None
        assert state.phase is PassPhase.DONE

    def test_worker_that_has_reported_passes_on_the_word_of_the_root(self) -> None:
        """The root may not know the workers that this one has woken: they would wait for their deadline."""
        state = self.make_participant()
        state.done_here()
        assert state.abort(sender=B) == Abort((C,))
        assert state.phase is PassPhase.ABORTED

    def test_no_word_of_the_root_can_come(self) -> None:
        state = self.make_participant()
        state.done_here()
        assert state.abort(is_final=True) == Abort((B, C))

    def test_root_commits_when_all_have_reported_and_cannot_fail_then(self) -> None:
        state = make_state([sent(1)], tied(1), tied(has_roots=True))
        state.begin()
        assert state.report_received(OWN, Report((B,))) == []
        assert state.report_received(B, Report((OWN,))) == [Commit((B,))]
        state.commit()
        assert state.phase is PassPhase.COMMITTED
        assert state.abort() is None
        assert state.report_received(B, Report((OWN, C))) == []

    def test_abort_of_a_worker_that_is_not_named_yet_waits_until_it_is(self) -> None:
        state = make_state([], tied(has_roots=True))
        state.begin()
        assert not state.may_abort(C, "it failed")
        assert state.report_received(OWN, Report((B,))) == []
        assert state.report_received(B, Report((C,))) == [Fail(abort="it failed")]
        assert state.may_abort(C, "again")
        assert state.abort() == Abort((B, C))


class TestQuestions:
    def test_which_sends_it_knows(self) -> None:
        state = make_state([sent(1), came(2)], tied(1))
        assert state.awaits(1, B)
        assert state.awaits(1, C) is None
        assert state.awaits(2, B) is None
        deny(state, 1)
        assert state.awaits(1, B) is False

    def test_whether_it_has_reported(self) -> None:
        state = make_state([], tied(has_roots=True))
        state.begin()
        assert not state.has_reported
        state.component_finished(0)
        assert state.has_reported

    def test_repr_shows_where_it_is(self) -> None:
        state = begun(make_state([sent(1), sent(2)], tied(1), tied(2)))
        give(state, 2)
        assert repr(state) == "<BackwardState smart, 1 sends unsettled, components: waiting, running>"
        assert repr(make_state([], mode=Mode.FAST)) == "<BackwardState fast, 0 sends unsettled, components: none>"


def test_two_workers_that_know_different_things_agree() -> None:
    """A call that failed on its way, and a reply that nobody took: each side learns of it from the other's first message."""
    one = make_state([sent(1), sent(2)], tied(1), tied(2))
    two = BackwardState(B, Mode.SMART, [came(2, OWN), sent(3, OWN)], [tied(3)], lambda *_: set())
    assert one.begin() == [Tell(B)]
    introduction = one.introduction_to(B)
    assert two.begin({OWN}) == [Tell(OWN, (2,))]
    assert two.message_received(OWN, introduction, {}) == [Tell(OWN, (1,)), Report((OWN,))]
    assert one.message_received(B, two.introduction_to(OWN), {2: False}) == [Tell(B, (3,)), Report((B,))]


# -- When a pass is over, when it must fail, and when it never will be over ---------------------------------------------


SEND = WaitingSend(0x10, "a", "b", "module:function", "train.py:7, in step")


class TestTermination:
    def test_root_alone(self) -> None:
        termination = Termination(4)
        assert termination.participants == {4}
        assert termination.missing == {4}
        assert termination.reported(4, ())
        assert not termination.missing

    def test_everybody_named_must_report(self) -> None:
        termination = Termination(0)
        assert not termination.reported(0, (1,))
        assert not termination.reported(1, (0, 2))
        assert termination.missing == {2}
        assert termination.reported(2, (1,))
        assert termination.participants == {0, 1, 2}

    def test_in_any_order(self) -> None:
        reports = {0: (1,), 1: (2, 3), 2: (), 3: (1,)}
        for order in itertools.permutations(reports):
            termination = Termination(0)
            found = [termination.reported(worker, reports[worker]) for worker in order]
            assert found == [False, False, False, True], order

    def test_repeats_do_no_harm(self) -> None:
        termination = Termination(0)
        assert not termination.reported(1, (2,))
        assert not termination.reported(1, ())
        assert not termination.reported(0, (1,))
        assert termination.missing == {2}
        assert termination.reported(2, ())

    def test_who_has_reported_takes_part_though_nobody_has_named_it(self) -> None:
        """Its end must be told to it, too, if the one that made it join dies before naming it."""
        termination = Termination(0)
        termination.reported(7, (8,))
        assert termination.participants == {0, 7, 8}

    def test_report_of_a_worker_that_nobody_has_named_has_no_say(self) -> None:
        """It may have no part in the pass: neither those it names nor those it misses count before it is named."""
        termination = Termination(0)
        assert not termination.reported(7, (8, 1), (2,))
        assert not termination.reported(0, (1, 2))
        assert not termination.reported(1, ())
        assert not termination.mistaken
        assert termination.missing == {2}
        assert termination.reported(2, (0,))

    def test_report_counts_when_its_sender_is_named(self) -> None:
        termination = Termination(0)
        assert not termination.reported(7, (8,), (2,))
        assert not termination.is_named(7)
        assert not termination.reported(0, (7, 2))
        assert termination.is_named(7)
        assert termination.missing == {2, 8}
        assert termination.mistaken == {2}

    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
    def test_dead_worker_that_was_taken_for_absent_must_have_no_part(self, order: tuple[int, ...]) -> None:
        """It got a gradient from 1 and reported; 2 knew of its death, and did without the gradient that was on its way."""
        reports = {0: ((1, 2), ()), 1: ((0, 3), ()), 2: ((0,), (3,)), 3: ((1, 2), ())}
        termination = Termination(0)
        found = [termination.reported(worker, *reports[worker]) for worker in order]
        assert found == [False] * 4
        assert not termination.missing
        assert termination.mistaken == {3}

    def test_dead_worker_without_a_part_is_no_mistake(self) -> None:
        termination = Termination(0)
        assert not termination.reported(0, (1,), (5,))
        assert termination.reported(1, (0,), (5, 6))
        assert not termination.mistaken


def snapshot(**changes: object) -> PassSnapshot:
    """A participant that has nothing to do."""
    usual = {"worker": "a", "is_known": True, "num_sent": 1, "num_received": 1, "waiting": (SEND,)}
    return PassSnapshot(**{**usual, **changes})  # type: ignore[arg-type]


class TestStalls:
    def test_nothing_moves(self) -> None:
        now = {
            0: snapshot(num_sent=2, num_received=0, peers=(1,)),
            1: snapshot(num_sent=0, num_received=2, is_done=True),
        }
        assert is_stalled(now, now)

    def test_something_changed_meanwhile(self) -> None:
        assert not is_stalled({0: snapshot(num_sent=2, num_received=2)}, {0: snapshot()})
        assert not is_stalled({}, {0: snapshot()})

    def test_somebody_computes(self) -> None:
        now = {0: snapshot(), 1: snapshot(num_running=1)}
        assert not is_stalled(now, now)

    def test_a_message_is_under_way(self) -> None:
        now = {0: snapshot(num_sent=2), 1: snapshot()}
        assert not is_stalled(now, now)

    def test_everybody_is_done(self) -> None:
        """Their reports are under way."""
        now = {0: snapshot(is_done=True, waiting=()), 1: snapshot(is_done=True, waiting=())}
        assert not is_stalled(now, now)
        assert not is_stalled({}, {})

    def test_somebody_has_dropped_the_pass_or_does_not_answer(self) -> None:
        """What it has sent and received is not known, and whatever ended it will reach the others."""
        now = {0: snapshot(peers=(1,)), 1: PassSnapshot("b")}
        assert not is_stalled(now, now)

    def test_somebody_was_not_asked(self) -> None:
        now = {0: snapshot(peers=(1,))}
        assert not is_stalled(now, now)


def test_waiting_send_is_described() -> None:
    assert str(SEND) == "send 0x10 of module:function (train.py:7, in step) on worker a to b"


def test_snapshots_travel() -> None:
    there = snapshot(peers=(1, 2), num_running=3)
    assert msgspec.convert(msgspec.to_builtins(there), PassSnapshot) == there
