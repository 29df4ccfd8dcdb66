"""Take the pictures of the dashboard for the documentation: a cluster that trains, that waits, and that lost a worker.

    pip install playwright pillow
    python docs/scripts/dashboard_pictures.py [--folder docs/images] [--browser /usr/bin/chromium]

The pictures differ a little each time: the numbers are measured.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from torch import Tensor, nn

import gradwire as gw

IMAGES = Path(__file__).resolve().parents[1] / "images"
WAIT_MS = 30_000
SLOW_S = 25.0


class Stage(nn.Module):
    """One part of a model."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


def delay_backward(x: Tensor) -> Tensor:
    """Return a result whose gradient takes long."""
    result = x * 1.5
    result.register_hook(lambda gradient: time.sleep(SLOW_S))
    return result


@contextmanager
def in_thread(function: Callable[[threading.Event], None]) -> Iterator[None]:
    is_over = threading.Event()
    thread = threading.Thread(target=function, args=(is_over,))
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def training(cluster: gw.Cluster, width: int = 256) -> Iterator[None]:
    """Train a model of three parts with a skip connection until the end of the block, or the loss of a worker."""

    def train(is_over: threading.Event) -> None:
        embed, encode, head = (worker.module(Stage, width) for worker in cluster.workers)
        optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [embed, encode, head], lr=1e-3)
        try:
            while not is_over.wait(0.03):
                with gw.autograd.context() as ctx:
                    hidden = embed(torch.randn(64, width))
                    loss = (head(encode(hidden)) + hidden).square().mean()
                    ctx.backward(loss)
                    optimizer.step(ctx)
        except gw.errors.GradwireError:
            is_over.set()

    with in_thread(train):
        yield


@contextmanager
def waiting(cluster: gw.Cluster) -> Iterator[None]:
    """Run one backward pass in which one worker takes very long."""

    def run(_: threading.Event) -> None:
        first, second, third = cluster.workers
        model = first.module(Stage, 64)
        with gw.autograd.context() as ctx:
            hidden = second.call(delay_backward, model(torch.randn(8, 64)))
            try:
                ctx.backward(third.call(torch.tanh, hidden).sum(), timeout=SLOW_S)
            except gw.errors.GradwireError:
                return

    with in_thread(run):
        yield


def open_page(browser: Browser, cluster: gw.Cluster, width: int, scheme: str, height: int = 900) -> Page:
    page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(WAIT_MS)
    page.goto(cluster.dashboard().url)
    page.locator("#live[data-state=live]").wait_for()
    return page


def wait_ticks(page: Page, num_ticks: int) -> None:
    """Wait until the page was updated that many times."""
    tick = page.locator("html").get_attribute("data-tick") or "0"
    page.locator(f"html[data-tick='{int(tick) + num_ticks}']").wait_for()


def save(data: bytes, path: Path) -> None:
    """Store a picture with few colours, which makes it small."""
    image = Image.open(io.BytesIO(data)).convert("RGB").quantize(192, dither=Image.Dither.NONE)
    image.save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    options = parse()
    folder: Path = options.folder
    torch.set_num_threads(1)
    sys.argv[0] = "train.py"  # the name of the cluster
    with sync_playwright() as playwright, gw.Cluster.local(3, names=["embed", "encode", "head"]) as cluster:
        browser = playwright.chromium.launch(executable_path=options.browser, args=["--no-sandbox"])
        with training(cluster):
            for scheme in ("light", "dark"):
                page = open_page(browser, cluster, 1340, scheme)
                page.locator("#messages button").nth(4).wait_for()
                wait_ticks(page, 12)
                save(page.screenshot(full_page=True), folder / f"dashboard-{scheme}.png")
                page.close()
        with waiting(cluster):
            for scheme in ("light", "dark"):
                page = open_page(browser, cluster, 1120, scheme)
                page.locator("#waits-list .waits-for").first.wait_for()
                wait_ticks(page, 2)
                save(page.locator("#step").screenshot(), folder / f"dashboard-waiting-{scheme}.png")
                page.close()
            page = open_page(browser, cluster, 1100, "light", 640)
            page.locator("tr[data-worker=encode] button").click()
            page.locator("#stacks summary").first.wait_for()
            save(page.locator("#stacks").screenshot(), folder / "dashboard-stacks.png")
            page.close()
        with training(cluster):
            page = open_page(browser, cluster, 1120, "light")
            page.locator("#messages button").nth(4).wait_for()
            victim = cluster.status()[1].pid
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            page.locator("tr.lost").wait_for()
            wait_ticks(page, 1)
            save(page.locator("#workers").screenshot(), folder / "dashboard-lost.png")
            page.close()
        browser.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=IMAGES, help="where the pictures go")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
