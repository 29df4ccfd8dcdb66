"""Settings are checked once, where they are defined, whoever passes them on."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from gradwire.cluster.api import Cluster
from gradwire.config import Limits, TlsKeys, WorkerConfig, check_port
from gradwire.errors import ConfigurationError
from gradwire.rpc import RpcOptions


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), True, "1", None])
@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(Limits)])
def test_limits_are_positive_numbers(name: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=rf"Limits\.{name} must be a positive number"):
        Limits(**{name: wrong})


@pytest.mark.parametrize("wrong", [-5, 65_536, "x", True, 1.5, None, (1, 2)])
def test_a_port_is_a_whole_number(wrong: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"port must be a whole number from 0 \(any free port\) to 65,535, not "
    ):
        check_port(wrong)


@pytest.mark.parametrize(
    ("setting", "wrong", "text"),
    [
        ("num_worker_threads", 0, "num_worker_threads must be at least 1"),
        ("num_worker_threads", "4", "num_worker_threads must be at least 1"),
        ("num_worker_threads", True, "num_worker_threads must be at least 1"),
        ("rpc_timeout_s", -1, "rpc_timeout must be"),
        ("rpc_timeout_s", float("nan"), "rpc_timeout must be"),
        ("rpc_timeout_s", None, "rpc_timeout must be"),
        ("trust", "all", "trust must be"),
        ("transports", ("carrier pigeon",), "transports must be"),
        ("transports", "tcp", r'such as \("unix", "tcp"\), not \'tcp\''),
        ("limits", {"depth": 3}, r"limits must be a gradwire\.config\.Limits"),
        ("limits", None, r"limits must be a gradwire\.config\.Limits"),
    ],
)
def test_what_is_wrong_is_named(setting: str, wrong: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        WorkerConfig(**{setting: wrong})


def test_the_defaults_stand_in_one_place() -> None:
    config = WorkerConfig()
    options = RpcOptions()
    assert options.worker_config(b"", config.bind_host) == config
    local = inspect.signature(Cluster.local).parameters
    assert local["num_worker_threads"].default == config.num_worker_threads
    assert local["rpc_timeout"].default == config.rpc_timeout_s


def test_keys_in_a_folder() -> None:
    keys = TlsKeys.in_folder("/keys", "w0")
    assert [path.as_posix() for path in (keys.ca, keys.certificate, keys.key)] == [
        "/keys/ca.pem",
        "/keys/w0.pem",
        "/keys/w0.key",
    ]
