"""Backward passes through tensors on an accelerator."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accelerator import programs
from gradwire.cluster.api import Cluster


@pytest.mark.parametrize("loss", programs.LOSSES)
def test_gradients_are_those_of_one_process(cluster: Cluster, loss: str) -> None:
    cluster.workers[0].call(programs.differentiate, loss)


@pytest.mark.parametrize(
    "program",
    [
        programs.differentiate_twice,
        programs.train_a_remote_module,
        programs.run_several_passes_at_once,
        programs.run_a_pass_in_a_hook,
        programs.hook_an_accumulator,
    ],
    ids=lambda program: program.__name__,
)
def test_programs_give_the_same_as_in_one_process(cluster: Cluster, program: Callable[[], None]) -> None:
    cluster.workers[0].call(program)


def test_backward_code_runs_in_the_context_and_on_its_device(cluster: Cluster) -> None:
    cluster.workers[0].call(programs.look_at_the_context)


def test_a_recorded_pass_notes_which_shared_parameters_it_uses(cluster: Cluster) -> None:
    cluster.workers[0].call(programs.record_what_is_used)


def test_anomaly_mode_shows_where_the_forward_was_called(cluster: Cluster) -> None:
    cluster.workers[0].call(programs.detect_an_anomaly)


def test_backward_without_a_context_says_what_to_call(cluster: Cluster) -> None:
    cluster.workers[0].call(programs.forget_the_context)
