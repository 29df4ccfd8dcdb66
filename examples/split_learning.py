"""
Split learning between two parties
==================================

A clinic has measurements of patients, a laboratory has their diagnoses. They train one model, and neither shows its
data, labels or weights to the other. The laboratory exposes two functions and nothing else. The parties talk over
TLS 1.3, each with a certificate of its own, and read no pickle (``trust="data"``)::

    clinic: measurements, lower layers                 laboratory: diagnoses, upper layers
    16 numbers for each patient           -->          loss_of(activations, batch)
    loss                                  <--
    backward                              <->          gradients of those 16 numbers
    step of its own optimizer             -->          step(context_id): of its own optimizer

Run it::

    python examples/split_learning.py

The program is the clinic, and starts the laboratory as another process. On two machines, each party runs its own half
with ``init_method="tcp://<host of the clinic>:<port>"``. Finally, the program checks what no party could check alone:
the losses are those of one process that has all the data.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import gradwire as gw
from gradwire import rpc
from gradwire.errors import CannotSend, NotExposed
from gradwire.transports.tls import keys_for, make_keys

NAMES = ("clinic", "laboratory")
NUM_PATIENTS, NUM_MEASUREMENTS, CUT = 256, 12, 16
BATCH_SIZE, NUM_EPOCHS = 64, 10


def read_measurements() -> torch.Tensor:
    """Return what the clinic has: a row for each patient."""
    return torch.randn(NUM_PATIENTS, NUM_MEASUREMENTS, generator=torch.Generator().manual_seed(1))


def read_diagnoses() -> torch.Tensor:
    """Return what the laboratory has, for the same patients in the same order. It depends on three measurements."""
    return (read_measurements()[:, :3].prod(1) > 0).long()


def make_lower() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(NUM_MEASUREMENTS, 64), nn.ReLU(), nn.Linear(64, CUT))


def make_upper() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.ReLU(), nn.Linear(CUT, 64), nn.ReLU(), nn.Linear(64, 2))


def rows_of(batch: int) -> slice:
    return slice(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE)


# %%
# The laboratory
# --------------
# It checks what it is sent, and steps its own layers with its own optimizer.


class Laboratory:
    """What the laboratory holds. The clinic reaches it through what `run_laboratory` exposes."""

    def __init__(self) -> None:
        self.diagnoses = read_diagnoses()
        self.upper = make_upper()
        self.optimizer = torch.optim.Adam(self.upper.parameters(), lr=0.01)

    def loss_of(self, activations: torch.Tensor, batch: int) -> torch.Tensor:
        """Return the loss of a batch."""
        expected = self.diagnoses[rows_of(batch)] if 0 <= batch < NUM_PATIENTS // BATCH_SIZE else None
        if expected is None or activations.shape != (len(expected), CUT):
            raise ValueError(f"batch {batch} with activations of shape {tuple(activations.shape)}")
        return nn.functional.cross_entropy(self.upper(activations), expected)

    def step(self, context_id: int) -> None:
        """Step with the gradients that a backward pass has left here."""
        gradients = gw.autograd.get_gradients(context_id)
        for parameter in self.upper.parameters():
            parameter.grad = gradients[parameter]
        self.optimizer.step()


def run_laboratory(options: rpc.RpcOptions) -> None:
    laboratory = Laboratory()
    rpc.expose(laboratory.loss_of, name="loss_of")
    rpc.expose(laboratory.step, name="step")
    rpc.init_rpc("laboratory", rank=1, world_size=2, rpc_backend_options=options)
    rpc.shutdown()  # returns when the clinic has called it, too


# %%
# The clinic
# ----------
# It calls the laboratory by the names of what is exposed there.


def run_clinic(options: rpc.RpcOptions) -> tuple[list[float], int]:
    """Train, and return the losses and how many forbidden calls were refused."""
    measurements, lower = read_measurements(), make_lower()
    rpc.init_rpc("clinic", rank=0, world_size=2, rpc_backend_options=options)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [lower], lr=0.01)
    losses = []
    for epoch in range(NUM_EPOCHS):
        for batch in range(NUM_PATIENTS // BATCH_SIZE):
            with gw.autograd.context() as ctx:
                loss = rpc.rpc_sync("laboratory", "loss_of", args=(lower(measurements[rows_of(batch)]), batch))
                ctx.backward(loss)
                optimizer.step(ctx)
                rpc.rpc_sync("laboratory", "step", args=(ctx,))
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    num_refused = try_forbidden_calls()
    rpc.shutdown()
    return losses, num_refused


# %%
# More than that is refused
# -------------------------


FORBIDDEN = (
    ("the diagnoses", read_diagnoses),
    ("a shell", os.system),
    ("a shell by name", "posix:system"),
)


def try_forbidden_calls() -> int:
    """Return how many were refused."""
    num_refused = 0
    for what, function in FORBIDDEN:
        try:
            rpc.rpc_sync("laboratory", function)
        except (NotExposed, CannotSend) as error:
            num_refused += 1
            print(f"asked for {what}: {type(error).__name__}")
    return num_refused


# %%
# Compare with one process, and run both parties
# ----------------------------------------------


def train_in_one_process() -> list[float]:
    """Train the same model with torch alone, with all the data in one place."""
    measurements, diagnoses = read_measurements(), read_diagnoses()
    model = nn.Sequential(make_lower(), make_upper())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(NUM_EPOCHS):
        for rows in map(rows_of, range(NUM_PATIENTS // BATCH_SIZE)):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(measurements[rows]), diagnoses[rows])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def make_options(party: str, keys: str, port: int) -> rpc.RpcOptions:
    return rpc.RpcOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        init_timeout=60,
        tls=keys_for(keys, party),
        transports=("tcp",),  # not needed between two machines: on one machine, unix sockets would be chosen
    )


@contextlib.contextmanager
def other_party(keys: str, port: int) -> Iterator[None]:
    """Start the laboratory, and wait for its end."""
    program = subprocess.Popen([sys.executable, __file__, "--keys", keys, "--port", str(port)])
    try:
        yield
        program.wait(timeout=30)
    finally:
        program.kill()  # does nothing to one that has ended


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        keys = str(Path(folder, "keys"))
        make_keys(keys, names=NAMES)  # between machines: `gradwire keys`, and no private key travels
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with other_party(keys, port):
            losses, num_refused = run_clinic(make_options("clinic", keys, port))
    if losses != train_in_one_process():
        raise SystemExit("split_learning: the losses differ from those of one process")
    if not losses[-1] < losses[0]:
        raise SystemExit("split_learning: the loss has not fallen")
    if num_refused < len(FORBIDDEN):
        raise SystemExit(f"split_learning: only {num_refused} of {len(FORBIDDEN)} forbidden calls were refused")
    print(
        f"split_learning: the loss fell from {losses[0]:.3f} to {losses[-1]:.3f}, all {len(losses)} losses as in one "
        f"process; {num_refused} of {len(FORBIDDEN)} forbidden calls were refused"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train one model with two parties.")
    parser.add_argument("--keys")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    if arguments.keys is None:
        main()
    else:
        torch.set_num_threads(1)
        run_laboratory(make_options("laboratory", arguments.keys, arguments.port))
