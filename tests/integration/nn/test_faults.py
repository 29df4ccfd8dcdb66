"""Workers that die: the owner of a module, and a trainer whose turn it is."""

from __future__ import annotations

import os
import signal

import pytest
import torch

import gradwire as gw
from gradwire.cluster.api import Cluster
from gradwire.errors import OwnerLost, WorkerLost
from gradwire.nn import RemoteModule
from gradwire.testing import wait_until
from nn.models import Net, make_input
from nn.test_turns import forward_and_step, has_entered, num_in_line, wait_at_gate


def hold_turn(remote: RemoteModule, x: torch.Tensor) -> None:
    """Takes a turn, and never ends it."""
    with gw.autograd.context():
        wait_at_gate(remote(x).detach())


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_a_holder_ends_its_turn() -> None:
    with Cluster.local(3) as cluster:
        owner, holder, trainer = cluster.workers
        remote, x = RemoteModule(owner.name, Net, (4, 2), concurrency="serialize"), make_input(1)
        held = holder.submit(hold_turn, remote, x)
        wait_until(lambda: holder.call(has_entered), 20.0, "that the turn is taken")
        waiting = trainer.submit(forward_and_step, remote, x)
        wait_until(lambda: owner.call(num_in_line, remote.module_rref) == 1, 20.0, "that the trainer waits")
        holder.submit(kill_itself)
        assert waiting.wait() == 4
        with pytest.raises(WorkerLost):
            held.wait()


def test_the_death_of_the_owner_is_said_at_once() -> None:
    with Cluster.local(1) as cluster:
        remote, x = cluster.workers[0].module(Net, 4, 2), make_input(1)
        assert remote(x).shape == (3, 2)
        cluster.workers[0].submit(kill_itself)
        wait_until(lambda: not cluster.workers[0].is_alive, 10.0, "that the worker is gone")
        for use in (remote, remote.state_dict, remote.remote_parameters):
            with pytest.raises(OwnerLost, match="worker0"):
                use(x) if use is remote else use()
        assert repr(remote).startswith("RemoteModule(Net on worker0/cpu")
