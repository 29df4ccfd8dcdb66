"""The meeting point: what `init_method` and the environment may say."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigurationError
from gradwire.rpc.meeting_point import open_meeting_point

ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_variable_that_is_not_a_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {**ENVIRONMENT, name: "abc"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError, match=f"{name} must be a whole number, not 'abc'"):
        open_meeting_point("env://", -1, None, 1.0)


@pytest.mark.parametrize(
    ("init_method", "words"),
    [
        ("tcp://127.0.0.1:1?rank=abc", "rank must be a whole number, not 'abc'"),
        ("tcp://127.0.0.1:1?rank=1&world_size=abc", "world_size must be a whole number, not 'abc'"),
        ("tcp://127.0.0.1:abc", "init_method must be"),
        ("tcp://127.0.0.1:70000", "init_method must be"),
    ],
)
def test_address_with_something_that_is_not_a_number(init_method: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        open_meeting_point(init_method, 0, 1, 1.0)
