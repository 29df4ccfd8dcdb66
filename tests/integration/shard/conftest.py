"""Four workers: ranks of process groups, and RPC workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gradwire.cluster.api import Cluster
from gradwire.testing import LeakCheck
from per_file import leak_check, template_ends_with_the_session, template_is_prepared
from shard.groups import Ranks, ranks
from shard.worlds import Worlds

__all__ = ["leak_check", "template_ends_with_the_session", "template_is_prepared"]


@pytest.fixture(scope="module")
def four_ranks(leak_check: LeakCheck) -> Iterator[Ranks]:
    with ranks(4) as found:
        yield found


@pytest.fixture(scope="module")
def worlds(leak_check: LeakCheck) -> Iterator[Worlds]:
    with Cluster.local(4) as cluster:
        yield Worlds(cluster)
