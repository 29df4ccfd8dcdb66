"""Options that all clusters share."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.cluster.driver import ClusterOptions
from gradwire.config import WorkerConfig
from gradwire.errors import ConfigurationError
from gradwire.types import WorkerInfo


def test_roles_give_names_and_ranks() -> None:
    options = ClusterOptions(num_workers=3, roles={"ps": 1, "trainer": 2})
    assert options.infos() == [
        WorkerInfo("ps0", 0),
        WorkerInfo("trainer0", 1),
        WorkerInfo("trainer1", 2),
        WorkerInfo("driver", 3),
    ]
    specs = [options.spec(info, WorkerConfig()) for info in options.infos()[:-1]]
    assert [spec.role for spec in specs] == ["ps", "trainer", "trainer"]


def test_without_roles_all_are_workers() -> None:
    options = ClusterOptions(num_workers=2)
    assert [info.name for info in options.infos()] == ["worker0", "worker1", "driver"]
    assert options.spec(options.infos()[0], WorkerConfig()).role == "worker"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_workers": 3, "roles": {"ps": 1, "trainer": 1}}, "roles add up to 2 workers, but the cluster has 3"),
        ({"num_workers": 1, "roles": {"ps": 1}, "names": ["a"]}, "either names or roles"),
        ({"num_workers": 1, "roles": {"ps": 0, "x": 1}}, r"roles\['ps'\] must be a whole number"),
        ({"num_workers": 1, "roles": {"p s": 1}}, "a worker's name must be"),
        ({"num_workers": 12, "roles": {"a": 11, "a1": 1}}, "names must be unique"),
        ({"num_workers": 1, "imports": "json"}, "imports must be a list"),
        ({"num_workers": 1, "start_timeout_s": 0}, "start_timeout_s must be positive"),
    ],
)
def test_wrong_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        ClusterOptions(**options)


def test_values_of_the_environment_are_not_shown() -> None:
    with pytest.raises(
        ConfigurationError, match=r"env must map strings to strings; .* not strings: \['A', 2\]\n"
    ) as caught:
        ClusterOptions(num_workers=1, environment={"A": 1, 2: "b", "KEY": "secret"})  # type: ignore[dict-item]
    assert "secret" not in str(caught.value)


def test_token_is_not_shown() -> None:
    assert "hidden" not in repr(ClusterOptions(num_workers=1, token=b"hidden"))
