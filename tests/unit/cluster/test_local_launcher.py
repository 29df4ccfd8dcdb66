"""Wrong options are refused before anything is started; a start ends when all is known."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

import gradwire.cluster.api
from gradwire.cluster._supervisor import LocalWorker
from gradwire.cluster.local_launcher import LocalOptions, _are_settled, _raise_if_not_running
from gradwire.errors import ConfigurationError, WorkerStartFailed
from gradwire.types import WorkerInfo


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n": 0}, "n must be a whole number from 1"),
        ({"n": True}, "n must be a whole number"),
        ({"n": 2.0}, "n must be a whole number"),
        ({"n": 70_000}, "n must be a whole number from 1 to 65,535"),
        ({"n": 2, "names": ["a"]}, "a list of 2 names"),
        ({"n": 2, "names": "ab"}, "a list of 2 names"),
        ({"n": 2, "names": ["a", "a"]}, "names must be unique"),
        ({"n": 1, "names": ["driver"]}, "reserved for this process"),
        ({"n": 1, "names": ["../a"]}, "letters, digits"),
        ({"n": 1, "names": [""]}, "letters, digits"),
        ({"n": 1, "names": ["x" * 41]}, "1 to 40 letters"),
        ({"n": 1, "names": [7]}, "letters, digits"),
        ({"n": 1, "threads_per_worker": 0}, "threads_per_worker must be"),
        ({"n": 1, "start_timeout_s": 0}, "start_timeout_s must be positive"),
        ({"n": 1, "start_timeout_s": float("nan")}, "start_timeout_s must be positive"),
        ({"n": 1, "rpc_timeout": -1}, "rpc_timeout must be"),
        ({"n": 1, "num_worker_threads": 0}, "num_worker_threads must be at least 1"),
        ({"n": 1, "env": {"A": 1}}, "env must map strings to strings"),
        ({"n": 1, "imports": "torch"}, "imports must be a list"),
        ({"n": 1, "trust": "all"}, "trust must be"),
        ({"n": 1, "limits": {"frame_bytes": 1 << 30}}, r"limits must be a gradwire\.config\.Limits"),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        gradwire.cluster.api.Cluster.local(**options)


def test_names_and_ranks() -> None:
    options = LocalOptions(num_workers=2)
    assert options.infos() == [WorkerInfo("worker0", 0), WorkerInfo("worker1", 1), WorkerInfo("driver", 2)]
    assert LocalOptions(num_workers=1, names=["solo"]).infos() == [WorkerInfo("solo", 0), WorkerInfo("driver", 1)]


def test_every_cluster_has_its_own_secret_and_does_not_show_it() -> None:
    first, second = LocalOptions(num_workers=1), LocalOptions(num_workers=1)
    assert first.token != second.token
    assert len(first.token) == 32
    assert repr(first.token) not in repr(first)
    assert "token" not in repr(first.worker_config())


def test_a_worker_is_ready_when_it_listens_and_its_process_is_known() -> None:
    """Two processes say so, in any order."""
    worker = LocalWorker(WorkerInfo("w", 0), lambda handle: None)
    with contextlib.closing(worker), worker._their_lifeline:
        assert not _are_settled([worker])
        worker.handle.on_listening()
        assert not _are_settled([worker])
        with pytest.raises(WorkerStartFailed, match="not ready after 1 s: w"):
            _raise_if_not_running([worker], 1.0)
        worker.handle.on_process_made(4711)
        assert _are_settled([worker])
        _raise_if_not_running([worker], 1.0)


def test_other_platforms_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(ConfigurationError, match="needs Linux"):
        gradwire.cluster.api.Cluster.local(1)


def test_an_interpreter_that_hides_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(ConfigurationError, match=r"sys\.executable is empty"):
        gradwire.cluster.api.Cluster.local(1)
