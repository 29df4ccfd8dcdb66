"""What the driver of a cluster may ask a worker for, and no other worker."""

from __future__ import annotations

from typing import get_args

import pytest

from conftest import MakeAgents
from gradwire.cluster._worker_main import serve_driver
from gradwire.errors import AuthenticationFailed


def test_only_the_driver_may_ask_for_what_is_served_to_it(make_agents: MakeAgents) -> None:
    a, b = make_agents(2)
    known = set(b.server._control)
    serve_driver(b, "driver")
    served = {name: handler for name, handler in b.server._control.items() if name not in known}
    assert {"~cluster.members", "~cluster.usage", "~cluster.log_level", "~cluster.metrics"} <= set(served)
    for name, handler in served.items():
        args = [None for _ in get_args(b.server._control_kinds[name])]
        with pytest.raises(AuthenticationFailed, match=r"only driver may .+, not a\n"):
            handler(a.info, *args)
