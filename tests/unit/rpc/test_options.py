"""Options under the names that PyTorch's users know."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwire.config import Limits, WorkerConfig
from gradwire.errors import ConfigurationError
from gradwire.rpc import options
from gradwire.rpc.options import RpcBackendOptions, RpcOptions, TensorPipeRpcBackendOptions


def test_defaults_are_pytorch_s() -> None:
    chosen = TensorPipeRpcBackendOptions()
    assert (chosen.num_worker_threads, chosen.rpc_timeout, chosen.init_method) == (16, 60.0, "env://")
    assert (options.DEFAULT_RPC_TIMEOUT_SEC, options.UNSET_RPC_TIMEOUT, options.DEFAULT_SHUTDOWN_TIMEOUT) == (60, -1, 0)
    assert isinstance(chosen, RpcBackendOptions)


def test_the_timeout_can_be_set_later() -> None:
    chosen = RpcBackendOptions(rpc_timeout=5, init_method="file:///x")
    assert isinstance(chosen.rpc_timeout, float)
    chosen.rpc_timeout = 7.5
    assert "rpc_timeout=7.5" in repr(chosen)
    assert "file:///x" in repr(chosen)


def test_they_become_a_worker_s_settings() -> None:
    limits = Limits(num_tensors=7)
    chosen = RpcOptions(num_worker_threads=3, rpc_timeout=9, trust="data", limits=limits, shared_memory_from=5)
    expected = WorkerConfig(
        num_worker_threads=3, rpc_timeout_s=9, trust="data", limits=limits, shared_memory_from=5, token=b"t"
    )
    assert chosen.worker_config(b"t", "127.0.0.1") == expected
    assert RpcOptions(bind_host="127.0.0.9").worker_config(b"t", "127.0.0.1").bind_host == "127.0.0.9"


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_worker_threads": 0},
        {"rpc_timeout": -1},
        {"rpc_timeout": float("nan")},
        {"trust": "all"},
        {"transports": ("carrier pigeon",)},
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        RpcOptions(**wrong).worker_config(b"", "127.0.0.1")


def test_the_token_is_not_shown() -> None:
    assert "secret" not in repr(WorkerConfig(token=b"secret"))


def test_device_maps_are_checked_and_kept() -> None:
    chosen = TensorPipeRpcBackendOptions(device_maps={"w1": {"cpu": "cuda:1"}}, devices=["cuda:1"], _transports=["uv"])
    assert chosen.device_maps == {"w1": {torch.device("cpu"): torch.device("cuda:1")}}
    assert chosen.devices == [torch.device("cuda:1")]
    chosen.set_device_map("w1", {"cuda:0": "cuda:2"})
    assert len(chosen.device_maps["w1"]) == 2
    with pytest.raises(ConfigurationError, match="two devices to the same device"):
        chosen.set_device_map("w1", {"cuda:3": "cuda:2"})
    assert len(chosen.device_maps["w1"]) == 2
