"""The page in a real browser, on a cluster that trains."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from dashboard.browser import MISSING, find_browser
from gradwire import autograd
from gradwire.cli.app import app
from gradwire.cluster.api import Cluster
from gradwire.dashboard.web_server import Dashboard
from gradwire.errors import GradwireError
from gradwire.optim import DistributedOptimizer
from gradwire.rpc.agent import Agent

playwright = pytest.importorskip("playwright.sync_api", reason="run pip install playwright")
expect = playwright.expect

pytestmark = pytest.mark.skipif(find_browser() is None, reason=MISSING)

WAIT_MS = 20_000

WITHOUT_OPEN = """
const {matches} = Element.prototype, {supports} = CSS;
Element.prototype.matches = function (selector) {
  if (selector.includes(":open")) throw new SyntaxError(`${selector} is not a valid selector`);
  return matches.call(this, selector);
};
CSS.supports = (...condition) => !condition[0].includes(":open") && supports(...condition);
"""
"""Makes a browser one that does not know ``:open``."""


@contextmanager
def training(cluster: Cluster, pause_s: float = 0.02) -> Iterator[None]:
    """Train a model of two parts in a thread until the end of the block or the loss of a worker."""
    is_over = threading.Event()

    def train() -> None:
        stages = [worker.module(torch.nn.Linear, 8, 8) for worker in cluster.workers]
        optimizer = DistributedOptimizer(torch.optim.SGD, stages, lr=0.1)
        try:
            while not is_over.wait(pause_s):
                with autograd.context() as ctx:
                    hidden = torch.ones(4, 8)
                    for stage in stages:
                        hidden = stage(hidden)
                    ctx.backward(hidden.square().mean())
                    optimizer.step(ctx)
        except GradwireError:
            is_over.set()

    thread = threading.Thread(target=train, name="training")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser: playwright.Browser) -> Iterator[playwright.Page]:
    """A page on which any error, a refusal by the content security policy too, fails the test."""
    page = browser.new_page(viewport={"width": 1440, "height": 1000})
    page.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    yield page
    page.close()
    # Not an error of the page: Chromium fails requests when the network of this machine changes. The stream is opened again.
    assert [text for text in problems if "net::ERR_NETWORK_CHANGED" not in text] == []


def test_workers_and_edges_appear_and_a_killed_worker_turns_red(
    page: playwright.Page, capfd: pytest.CaptureFixture[str]
) -> None:
    with Cluster.local(2) as cluster, training(cluster):
        # The command asks the driver, which is this process, for a link.
        assert cluster.name is not None
        app(["dashboard", cluster.name], standalone_mode=False)
        link = capfd.readouterr().out.strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]+", link)
        page.goto(link)
        assert page.url == f"http://127.0.0.1:{cluster.dashboard().port}/"

        rows = page.locator("#workers-rows tr")
        expect(rows).to_have_count(3)
        expect(page.locator("tr[data-worker=worker0]")).to_contain_text("running")
        expect(page.locator("#live")).to_have_text("live")

        # Each part returns a result, and the second one gets the result of the first.
        messages = page.locator("#messages button")
        expect(messages).to_have_count(3)
        expect(messages.first).to_contain_text("worker0 → driver")
        expect(messages.first).to_contain_text("128 B")
        expect(page.locator("#graph canvas").first).to_be_visible()
        expect(page.locator("#graph")).to_have_attribute(
            "aria-label", re.compile("3 messages between driver, worker0, worker1")
        )
        expect(page.locator("#timeline-area rect.k-backward").first).to_be_visible()
        expect(page.locator("#references-rows tr")).to_have_count(2)

        victim = cluster.status()[1]
        assert victim.pid is not None
        os.kill(victim.pid, signal.SIGKILL)
        lost = page.locator("tr[data-worker=worker1]")
        expect(lost).to_have_class("lost")
        expect(lost).to_contain_text("killed by SIGKILL")
        red, usual = (page.locator(f"tr[data-worker={name}] td").first for name in ("worker1", "worker0"))
        colours = [item.evaluate("element => getComputedStyle(element).backgroundColor") for item in (red, usual)]
        assert colours[0] != colours[1]
        expect(page.locator("#errors-list")).to_contain_text("lost: killed by SIGKILL")
        expect(page.locator("#workers-summary")).to_have_text("1 running1 lost")
    expect(page.locator("#live")).to_have_text("the cluster is closed")


def test_the_page_can_be_used_with_the_keyboard_alone(page: playwright.Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPY_BIN", "/nonexistent/py-spy")
    page.add_init_script(WITHOUT_OPEN)
    with Cluster.local(1) as cluster, training(cluster):
        page.goto(cluster.dashboard().url)
        expect(page.locator("#messages button")).to_have_count(1)
        focused = page.locator(":focus")
        for _ in range(40):  # everything is reached by the tabulator key
            page.keyboard.press("Tab")
            if focused.get_attribute("aria-label") == "Stacks of worker0":
                break
        page.keyboard.press("Enter")
        dialog = page.locator("#stacks")
        expect(dialog).to_be_visible()
        expect(page.locator("#stacks-by")).to_contain_text("from the worker")
        expect(dialog.locator("summary").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()

        page.locator("#messages button").focus()
        page.keyboard.press("Enter")
        expect(page.locator("#messages button")).to_have_attribute("aria-pressed", "true")
        page.locator("#step-choice").focus()
        page.keyboard.press("ArrowDown")  # a step of the past stays where it is
        expect(page.locator("#step-choice")).not_to_have_value("")
        expect(page.locator("#timeline-area rect").first).to_be_visible()
        page.locator("#timeline-area").focus()
        page.keyboard.press("End")
        expect(page.locator("#timeline-detail")).to_contain_text("·")
        page.locator("#graph").focus()
        for key in ("ArrowLeft", "+", "-", "0"):
            page.keyboard.press(key)


def test_names_from_workers_are_text_and_the_page_fits_a_narrow_window(
    browser: playwright.Browser, page: playwright.Page
) -> None:
    """The name of a function can be anything; on the page it is only a name."""
    page.set_viewport_size({"width": 390, "height": 800})
    with Cluster.local(1) as cluster:
        page.goto(cluster.dashboard().url)
        expect(page.locator("#live")).to_have_text("live")
        evil = "<img src=x onerror=document.title='broken'>"

        def function(x: torch.Tensor) -> torch.Tensor:
            raise ValueError(x.shape)

        function.__name__ = function.__qualname__ = evil
        with pytest.raises(ValueError):
            cluster.workers[0].call(function, torch.ones(1))
        expect(page.locator("#errors-list")).to_contain_text(evil)
        assert "broken" not in page.title()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        table = page.locator("table.workers")
        assert table.evaluate("element => element.scrollWidth <= element.parentElement.clientWidth")


def test_the_page_says_when_there_is_no_news(page: playwright.Page, make_agents: Callable[..., list[Agent]]) -> None:
    (a,) = make_agents(1, "inproc")
    has_failed = threading.Event()
    fails = False

    def rows() -> list[dict[str, Any]]:
        if fails:
            has_failed.set()
            raise ValueError
        return []

    page.clock.install()
    live = page.locator("#live")
    with Dashboard(a, "train-1", rows) as dashboard:
        page.goto(dashboard.url)
        expect(live).to_have_text("live")
        fails = True
        assert has_failed.wait(20.0)
        page.clock.fast_forward(6_000)
        expect(live).to_have_text("no news from the driver")
        fails = False
        expect(live).to_have_text("live")
