"""Tensors on their way off a device and onto one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from accelerator import copies
from gradwire.cluster.api import Cluster


@pytest.mark.parametrize(
    "program",
    [
        copies.send_arguments,
        copies.send_from_a_stream,
        copies.fetch_results,
        copies.fetch_a_reference,
        copies.send_gradients,
        copies.send_gradients_to_oneself,
        copies.send_gradients_by_a_shortcut,
        copies.send_by_shared_memory,
        copies.send_by_socket,
        copies.call_a_module,
        copies.gather_shards,
        copies.save_and_load,
    ],
    ids=lambda program: program.__name__,
)
def test_copies_are_in_order(cluster: Cluster, program: Callable[[], None]) -> None:
    cluster.workers[0].call(program)


def test_memory_of_tensors_with_conj_and_neg_bits_is_kept(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.keep_memory_of_conj_and_neg)


def test_gradients_for_oneself_go_from_any_place_to_any(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.copy_gradients_between_devices)


def test_a_copy_for_oneself_does_not_wait_longer_than_the_pass(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.keep_the_deadline_of_a_pass)


def test_sparse_gradients_arrive_on_the_device(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.send_sparse_gradients)


def test_slots_of_shared_memory_are_unregistered(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.unregister_slots)


def test_slots_are_used_again_after_a_timeout(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.give_slots_back)


def test_slots_stay_mapped_while_a_device_writes_to_them(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.close_while_the_device_writes)


@pytest.mark.parametrize("how", ["wait", "value"])
def test_results_can_be_used_on_the_stream_of_the_thread_that_gets_them(cluster: Cluster, how: str) -> None:
    cluster.workers[0].call(copies.use_on_another_stream, how)


def test_gradients_can_be_used_on_the_stream_of_the_thread_that_gets_them(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.use_gradients_on_another_stream)


@pytest.mark.parametrize("transport", ["unix", "inproc", "tcp", "tls", "loopback"])
def test_every_kind_of_tensor_arrives_as_it_was(cluster: Cluster, transport: str) -> None:
    cluster.workers[0].call(copies.send_every_kind, transport)


def test_a_call_does_not_wait_longer_for_a_device_than_its_timeout(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.keep_the_timeout)


def test_other_threads_go_on_while_one_waits_for_a_copy(cluster: Cluster) -> None:
    cluster.workers[0].call(copies.let_the_program_go_on)
