"""Two parties train one model; one has the measurements, the other the diagnoses, and neither shows them to the other.

    python examples/split_learning.py

The clinic runs this program. The laboratory is another process, which has exposed two functions and no more. They talk over
TLS 1.3, each with a certificate of its own, and read no pickle of each other (`trust="data"`):

    clinic: measurements, lower layers                      laboratory: diagnoses, upper layers
    16 numbers for each patient            -- TLS -->       loss_of(activations, batch)
    loss                                   <---------       one number
    backward                               <-------->       gradients of those 16 numbers
    step of its own optimizer              -- TLS -->       step(context): of its own optimizer

In the end the program checks what no party could check alone: the losses are those of one process that has all the data.
On two machines, each party runs its own half of this program, with `init_method="tcp://<host of the clinic>:<port>"`.
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
    """What the clinic has; a row for each patient."""
    return torch.randn(NUM_PATIENTS, NUM_MEASUREMENTS, generator=torch.Generator().manual_seed(1))


def read_diagnoses() -> torch.Tensor:
    """What the laboratory has, for the same patients in the same order. It depends on three of the measurements."""
    return (read_measurements()[:, :3].prod(1) > 0).long()


def make_lower() -> nn.Module:
    """The clinic's part of the model."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(NUM_MEASUREMENTS, 64), nn.ReLU(), nn.Linear(64, CUT))


def make_upper() -> nn.Module:
    """The laboratory's part."""
    torch.manual_seed(3)
    return nn.Sequential(nn.ReLU(), nn.Linear(CUT, 64), nn.ReLU(), nn.Linear(64, 2))


def rows_of(batch: int) -> slice:
    return slice(batch * BATCH_SIZE, (batch + 1) * BATCH_SIZE)


class Laboratory:
    """Everything that the laboratory has. Others see what is exposed below."""

    def __init__(self) -> None:
        self.diagnoses = read_diagnoses()
        self.upper = make_upper()
        self.optimizer = torch.optim.Adam(self.upper.parameters(), lr=0.01)

    def loss_of(self, activations: torch.Tensor, batch: int) -> torch.Tensor:
        """The loss of a batch. What comes from another party is checked."""
        expected = self.diagnoses[rows_of(batch)] if 0 <= batch < NUM_PATIENTS // BATCH_SIZE else None
        if expected is None or activations.shape != (len(expected), CUT):
            raise ValueError(f"batch {batch} with activations of shape {tuple(activations.shape)}")
        return nn.functional.cross_entropy(self.upper(activations), expected)

    def step(self, context_id: int) -> None:
        """Use the gradients that a backward pass has left here."""
        gradients = gw.autograd.get_gradients(context_id)
        for parameter in self.upper.parameters():
            parameter.grad = gradients[parameter]
        self.optimizer.step()


def run_laboratory(options: rpc.RpcOptions) -> None:
    """Serve until the clinic leaves."""
    laboratory = Laboratory()
    rpc.expose(laboratory.loss_of, name="loss_of")
    rpc.expose(laboratory.step, name="step")
    rpc.init_rpc("laboratory", rank=1, world_size=2, rpc_backend_options=options)
    rpc.shutdown()


def run_clinic(options: rpc.RpcOptions) -> tuple[list[float], int]:
    """Train; returns the losses, and how many attempts to get more than that were refused."""
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
                rpc.rpc_sync("laboratory", "step", args=(int(ctx),))
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    num_refused = try_more()
    rpc.shutdown()
    return losses, num_refused


def try_more() -> int:
    """What a curious clinic might try."""
    num_refused = 0
    for what, function in (
        ("the diagnoses", read_diagnoses),
        ("a shell", os.system),
        ("a shell by name", "posix:system"),
    ):
        try:
            rpc.rpc_sync("laboratory", function)
        except (NotExposed, CannotSend) as error:
            num_refused += 1
            print(f"asked for {what}: {type(error).__name__}")
    return num_refused


def train_in_one_process() -> list[float]:
    """The same model with all the data in one place, and torch alone."""
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
    """`transports` is only needed because both are on one machine here, where unix sockets would be chosen."""
    return rpc.RpcOptions(
        init_method=f"tcp://127.0.0.1:{port}", init_timeout=60, tls=keys_for(keys, party), transports=("tcp",)
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
    """Makes keys, starts the laboratory, and is the clinic."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        keys = str(Path(folder, "keys"))
        make_keys(keys, names=NAMES)  # between machines: `gradwire keys`, and no private key travels
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        with other_party(keys, port):
            losses, num_refused = run_clinic(make_options("clinic", keys, port))
    same = losses == train_in_one_process()
    print(
        f"split_learning: {len(losses)} losses fell from {losses[0]:.3f} to {losses[-1]:.3f}, as in one process: {same}; "
        f"refused: {num_refused} of 3"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Two parties, one model.")
    parser.add_argument("--keys")
    parser.add_argument("--port", type=int)
    arguments = parser.parse_args()
    if arguments.keys is None:
        main()
    else:
        torch.set_num_threads(1)
        run_laboratory(make_options("laboratory", arguments.keys, arguments.port))
