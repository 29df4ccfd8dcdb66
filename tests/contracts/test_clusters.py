"""Every way to start a cluster keeps the contract of `gradwire.testing.check_cluster`."""

from __future__ import annotations

import pytest

from gradwire.testing import CLUSTER_CHECKS, check_cluster


@pytest.mark.parametrize("check", CLUSTER_CHECKS)
def test_local(check: str) -> None:
    check_cluster("gradwire:Cluster.local", checks=[check])
