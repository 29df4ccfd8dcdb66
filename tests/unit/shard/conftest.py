"""Ctrl-C as in a process that has a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire import _interrupts


@pytest.fixture
def deferring() -> Iterator[None]:
    """Defer Ctrl-C while gradwire's code runs."""
    _interrupts.install()
    yield
    _interrupts.uninstall()
