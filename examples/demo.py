"""
Train a classifier on three workers
===================================

A small convolutional network learns to read digits, with one third of it on each of three worker processes. This is
what ``make demo`` runs; ``make demo DASHBOARD=1`` trains longer and opens the dashboard.

Run it::

    python examples/demo.py --epochs 4

The program draws the digits itself: a small font, rotated, shifted, scaled and covered with noise. The driver has the
data and the loss; each worker holds one stage of the network and steps it::

      driver            worker0              worker1              worker2
      images  ------->  convolution
              <-------  activations
      ------------------------------------>  convolution
              <----------------------------  activations
      --------------------------------------------------------->  two linear layers
      loss    <-------------------------------------------------  scores

Inside ``gradwire.autograd.context`` calls are recorded, so one ``backward`` on the driver leaves the gradients of
every layer on the worker that holds it. Look at the table, which shows where the time of a step goes, and at the last
lines, which compare the gradients of one step with those of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import gradwire as gw

NUM_TRAIN, NUM_TEST, BATCH_SIZE = 8000, 1000, 100
SIDE = 16  # pixels
NOISE = 0.2
PHASES = ("forward calls", "backward", "optimizer", "other")
FONT = (  # 0 to 9, seven rows of five pixels each
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)
console = Console(soft_wrap=True, highlight=False)


# %%
# The data
# --------


def draw_digits(num_images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return images [num_images, 1, SIDE, SIDE] and the digit on each; the same for the same seed."""
    random = torch.Generator().manual_seed(seed)
    font = torch.tensor([[[float(pixel) for pixel in row] for row in glyph.split()] for glyph in FONT])
    digits = torch.randint(10, (num_images,), generator=random)
    angle, scale, dx, dy = torch.rand(4, num_images, generator=random).mul(2).sub(1)  # each between -1 and 1
    angle, scale = angle * 0.25, 1.4 + 0.2 * scale
    cos, sin = scale * angle.cos(), scale * angle.sin()
    maps = torch.stack((cos * 1.4, -sin, dx * 0.3, sin, cos, dy * 0.3), dim=1).view(-1, 2, 3)  # 1.4: taller than wide
    grid = nn.functional.affine_grid(maps, [num_images, 1, SIDE, SIDE], align_corners=False)
    images = nn.functional.grid_sample(font[digits].unsqueeze(1), grid, align_corners=False)
    return images + NOISE * torch.randn(images.shape, generator=random), digits


# %%
# The network
# -----------
# ``worker.module`` makes a stage on a worker and returns a handle that is used like any module.


def make_stage(number: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return one stage, with the same initial weights wherever it is made."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        if number < 2:
            num_in, num_out = ((1, 16), (16, 32))[number]
            stage = nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        else:
            stage = nn.Sequential(nn.Flatten(), nn.Linear(2 * SIDE * SIDE, 64), nn.ReLU(), nn.Linear(64, 10))
    return stage.to(dtype)


def place_model(cluster: gw.Cluster, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return the whole network: three stages, each on its own worker."""
    return nn.Sequential(*(worker.module(make_stage, worker.rank, dtype) for worker in cluster.workers))


def read_gradients(stage: gw.rpc.RRef[nn.Module], context_id: int) -> list[Tensor]:
    """Run on the worker of a stage: gradients are in the context, not in ``.grad``, so several drivers could share it."""
    gradients = gw.autograd.get_gradients(context_id)
    return [gradients[parameter] for parameter in stage.local_value().parameters()]


# %%
# The driver
# ----------


def train_batch(
    model: nn.Module, optimizer: gw.optim.DistributedOptimizer, x: Tensor, digits: Tensor, clock: Clock
) -> float:
    """Run one step and return its loss."""
    with gw.autograd.context() as ctx:
        with clock.phase("forward calls"):
            loss = nn.functional.cross_entropy(model(x), digits)
        with clock.phase("backward"):
            ctx.backward(loss)
        with clock.phase("optimizer"):
            optimizer.step(ctx)
    return loss.item()


def train(model: nn.Sequential, num_epochs: int) -> dict[str, float]:
    """Train for some epochs; return the seconds spent in each phase."""
    images, digits = draw_digits(NUM_TRAIN, seed=0)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, list(model), lr=3e-3)
    random = torch.Generator().manual_seed(1)
    clock = Clock()
    with show_progress(num_epochs * NUM_TRAIN) as advance:
        for epoch in range(num_epochs):
            start, total = time.perf_counter(), 0.0
            for batch in torch.randperm(NUM_TRAIN, generator=random).split(BATCH_SIZE):
                loss = train_batch(model, optimizer, images[batch], digits[batch], clock)
                advance(len(batch), loss)
                total += loss * len(batch)
            speed = NUM_TRAIN / (time.perf_counter() - start)
            console.print(f"epoch {epoch + 1} of {num_epochs}: loss {total / NUM_TRAIN:.3f}, {speed:,.0f} samples/s")
    return clock.stop()


def gradient_difference(cluster: gw.Cluster, dtype: torch.dtype) -> float:
    """Return the largest difference of a gradient between the three workers and one process."""
    images, digits = draw_digits(BATCH_SIZE, seed=3)
    with gw.autograd.context() as ctx:
        model = place_model(cluster, dtype)
        ctx.backward(nn.functional.cross_entropy(model(images.to(dtype)), digits))
        rrefs = [stage.get_module_rref() for stage in model]
        parts = [
            worker.call(read_gradients, rref, int(ctx)) for worker, rref in zip(cluster.workers, rrefs, strict=True)
        ]
        distributed = [gradient for part in parts for gradient in part]
    local = nn.Sequential(*(make_stage(number, dtype) for number in range(len(cluster.workers))))
    nn.functional.cross_entropy(local(images.to(dtype)), digits).backward()
    expected = [parameter.grad for parameter in local.parameters()]
    differences = [(a - b).abs().max() for a, b in zip(distributed, expected, strict=True)]
    return torch.stack(differences).max().item()


# %%
# What the program prints
# -----------------------
# Progress bars on a terminal, plain lines elsewhere.


class Clock:
    """The seconds that the driver spends in each phase."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: Counter[str] = Counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the block."""
        start = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - start

    def stop(self) -> dict[str, float]:
        """Return the seconds by phase; ``other`` is the time outside all phases."""
        total = time.perf_counter() - self._start
        return {name: self._seconds[name] for name in PHASES[:-1]} | {"other": total - self._seconds.total()}


@contextlib.contextmanager
def show_progress(num_samples: int) -> Iterator[Callable[[int, float], None]]:
    """Show a bar on a terminal, nothing elsewhere; yield a function to call after each batch."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=num_samples, text="")
        start = time.perf_counter()

        def advance(num: int, loss: float) -> None:
            progress.advance(task, num)
            speed = progress.tasks[task].completed / (time.perf_counter() - start)
            progress.update(task, text=f"loss {loss:.3f}  {speed:,.0f} samples/s")

        yield advance


def show_time(seconds: dict[str, float], num_steps: int) -> None:
    """Print where the time went, as seen by the driver."""
    table = Table("where the time went", "seconds", "ms per step", "share", "", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    total = sum(seconds.values())
    for name, value in seconds.items():
        share = value / total
        table.add_row(name, f"{value:.2f}", f"{value / num_steps * 1e3:.2f}", f"{share:.0%}", "■" * round(30 * share))
    console.print(table)


def show_images(images: Tensor, captions: list[str]) -> None:
    """Print images side by side, two pixels per character."""
    table = Table.grid(padding=(0, 3))
    blocks = (" ", "▄", "▀", "█")
    pictures = []
    for image in (images[:, 0] > 0.4).int():
        rows = (image[0::2] * 2 + image[1::2]).tolist()  # upper and lower pixel
        pictures.append("\n".join("".join(blocks[pair] for pair in row) for row in rows))
    table.add_row(*pictures)
    table.add_row(*captions, style="dim")
    console.print(table)


def show_results(model: nn.Module) -> float:
    """Print some new images and what the model takes them for; return the accuracy on all of them."""
    images, digits = draw_digits(NUM_TEST, seed=2)
    with torch.no_grad():
        predicted = model(images).argmax(dim=1)
    # three correct ones and one mistake
    chosen = torch.cat([(predicted == digits).nonzero()[:3], (predicted != digits).nonzero()[:1]]).flatten()
    captions = [f"{digits[i]}, read as {predicted[i]}" for i in chosen]
    show_images(images[chosen], captions)
    return (predicted == digits).double().mean().item()


# %%
# Start the workers and train
# ---------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model that is split over three worker processes.")
    parser.add_argument("--epochs", type=int, help="passes over the data (default: 5; with --dashboard, 100)")
    parser.add_argument("--dashboard", action="store_true", help="open the dashboard of the cluster, and train longer")
    options = parser.parse_args()
    num_epochs = options.epochs or (100 if options.dashboard else 5)
    torch.set_num_threads(1)  # as many as each worker has
    start = time.perf_counter()
    with gw.Cluster.local(3) as cluster:
        console.print(f"started three workers in {time.perf_counter() - start:.1f} s; training on {NUM_TRAIN:,} images")
        if options.dashboard:
            console.print(f"look at it here (the link works once): {cluster.dashboard().url}\n", markup=False)
        else:
            console.print("look at it from another terminal: gradwire top, gradwire dashboard\n")
        model = place_model(cluster)
        seconds = train(model, num_epochs)
        console.print()
        show_time(seconds, num_epochs * NUM_TRAIN // BATCH_SIZE)
        console.print()
        accuracy = show_results(model)
        single, double = (gradient_difference(cluster, dtype) for dtype in (torch.float32, torch.float64))
    console.print("\ngradients of one step, three workers compared with one process, largest difference:")
    console.print(f"  float32 {single:.1e}, float64 {double:.1e}\n")
    if not (single <= 1e-6 and double <= 1e-15):
        raise SystemExit("demo: the gradients differ")
    if accuracy < 0.9:
        raise SystemExit(f"demo: only {accuracy:.1%} of {NUM_TEST:,} new images were classified correctly")
    console.print(f"demo: [bold green]{accuracy:.1%} of {NUM_TEST:,} new images were classified correctly[/]")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        console.print("stopped")
        raise SystemExit(130) from None
