"""Process groups of two and of four ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.testing import LeakCheck
from per_file import leak_check, template_ends_with_the_session
from shard.groups import Ranks, ranks

__all__ = ["leak_check", "template_ends_with_the_session"]


@pytest.fixture(scope="module")
def four_ranks(leak_check: LeakCheck) -> Iterator[Ranks]:
    with ranks(4) as found:
        yield found
