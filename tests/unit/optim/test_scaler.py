"""The state of a gradient scaler."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigurationError
from gradwire.optim import GradScaler


def test_state_with_a_missing_key_is_refused_and_changes_nothing() -> None:
    scaler = GradScaler(init_scale=8.0)
    before = scaler.state_dict()
    state = GradScaler(init_scale=4.0).state_dict()
    del state["growth_interval"]
    with pytest.raises(ConfigurationError, match="not the state of a GradScaler: 'growth_interval' is missing"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before
