"""Options of `Cluster.ray`, and how Ray's words about the end of an actor read. No Ray is started."""

from __future__ import annotations

from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RuntimeEnvSetupError

from gradwire.cluster import _ray
from gradwire.cluster.ray_scheduler import RayOptions, why_failed
from gradwire.errors import ConfigurationError


def test_actors_ask_for_exactly_their_bundle() -> None:
    options = RayOptions(resources={"CPU": 2, "GPU": 0.5, "memory": 1 << 30, "fast_disk": 1})
    actor = options.actor_options()
    asked = {"CPU": actor["num_cpus"], "GPU": actor["num_gpus"], "memory": actor["memory"], **actor["resources"]}
    assert asked == options.bundle


def test_what_is_left_out_is_asked_for_as_zero() -> None:
    """Ray places an actor by one processor and runs it with none where the amount is left out."""
    actor = RayOptions(resources={"GPU": 1}).actor_options()
    assert (actor["num_cpus"], actor["num_gpus"]) == (0, 1)


def test_ray_never_starts_an_actor_or_a_call_again() -> None:
    actor = RayOptions().actor_options()
    assert (actor["max_restarts"], actor["max_task_retries"]) == (0, 0)
    assert actor["max_concurrency"] >= 2  # one call lasts as long as the worker


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"resources": {}}, "resources must give the needs of each worker"),
        ({"resources": {"CPU": 0}}, "resources must give"),
        ({"resources": {"CPU": "2"}}, "resources must give"),
        ({"strategy": "spread"}, "strategy must be one of SPREAD, PACK, STRICT_SPREAD, STRICT_PACK"),
        ({"port_range": 4000}, r"port_range must be \(first, last\)"),
        ({"port_range": (5000, 4000)}, "first <= last"),
        ({"port_range": (10_002, 10_010)}, "overlaps 10002-19999, where Ray's own workers listen"),
        ({"port_range": (9_000, 10_002)}, "overlaps"),
        ({"port_range": (19_999, 21_000)}, "overlaps"),
        ({"address": "ray://head:10001"}, 'Ray Client, a proxy.*ray job submit.*address="auto"'),
    ],
)
def test_wrong_options(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        RayOptions(**options)


def test_ports_beside_those_of_ray_are_fine() -> None:
    assert RayOptions(port_range=(9_000, 10_001)).port_range == (9_000, 10_001)
    assert RayOptions(port_range=(20_000, 20_100)).port_range == (20_000, 20_100)


def test_the_address_comes_from_the_environment_as_in_a_submitted_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert RayOptions().target == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert RayOptions().target == "10.0.0.1:6379"
    assert RayOptions(address="auto").target == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(ConfigurationError, match=r"ray://10\.0\.0\.1:10001 is Ray Client"):
        RayOptions()


DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: GradwireWorker
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly
exits with a connection error code 2. End of file. Some common causes include: (1) the process was killed by the OOM killer.
"""


def test_the_end_of_an_actor_reads_as_one_line() -> None:
    error = ActorDiedError()
    error.error_msg = DIED
    assert why_failed(error) == (
        "its worker process has died. Worker unexpectedly exits with a connection error code 2. End of file."
    )
    error._preempted = True
    assert why_failed(error).startswith("its node was preempted: its worker")


def test_other_failures_keep_their_text_without_colours() -> None:
    error = ActorDiedError()
    error.error_msg = "\x1b[36mray::GradwireWorker()\x1b[39m ModuleNotFoundError: No module named 'gradwire'"
    text = why_failed(error)
    assert text.startswith(
        'gradwire is not installed on that node; install it, or pass runtime_env={"pip": ["gradwire"]}'
    )
    assert "\x1b" not in text
    assert why_failed(RuntimeEnvSetupError("no such package")).startswith("runtime_env could not be set up: ")


class TestPrivateNames:
    """What is relied on in Ray beyond its documentation."""

    def test_token_mode_is_the_setting_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ray._private.authentication import authentication_utils

        assert _ray.requires_token() is authentication_utils.is_token_auth_enabled()
        monkeypatch.delattr(authentication_utils, "is_token_auth_enabled")
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert _ray.requires_token() is True
        monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
        assert _ray.requires_token() is False

    def test_no_client_is_connected(self) -> None:
        assert _ray.is_client() is False
