"""Private names of Ray that gradwire uses; each has a fallback here and a test in ``tests/unit``.

Ray is imported when this module is, which takes more than half a second: only `gradwire.cluster.ray_scheduler` does so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import ray

_READ_ONLY_NODE_TYPE = "node_"  # Ray's monitor makes up such names where no autoscaler starts nodes


def requires_token() -> bool:
    """Return whether the servers of this process's Ray require a token.

    In a driver this only says whether one is sent: a driver with a token can join a cluster that requires none. Workers have
    the setting of their node.
    """
    try:
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    return bool(is_token_auth_enabled())


def is_client() -> bool:
    """Return whether this process is connected through Ray Client, a proxy."""
    try:
        from ray.util.client import ray as client
    except ImportError:
        return False
    return bool(client.is_connected())


def free_by_node() -> Mapping[str, Mapping[str, float]]:
    """Return what is free on each node, by node id; empty where Ray does not say."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return {}
    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def can_grow() -> bool:
    """Return whether an autoscaler may add nodes to the cluster; True where that cannot be known."""
    try:
        from ray._private.state import state
        from ray.experimental.internal_kv import _internal_kv_get

        if state.get_cluster_config() is not None:  # written by the second autoscaler
            return True
        status: Any = json.loads(_internal_kv_get("__autoscaling_status") or "{}")
    except (ImportError, AttributeError, ValueError, ray.exceptions.RayError):
        return True
    types = (status.get("autoscaler_report") or {}).get("active_nodes") or {}
    return any(not name.startswith(_READ_ONLY_NODE_TYPE) for name in types)
