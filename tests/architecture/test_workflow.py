"""The GitHub workflow runs what .ci/run runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
SCRIPT = (ROOT / ".ci/run").read_text()


def steps() -> list[dict[str, Any]]:
    return [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def targets(text: str) -> set[str]:
    return {target for line in re.findall(r"^make (.+)$", text, re.MULTILINE) for target in line.split()}


def test_it_runs_the_commands_of_the_script() -> None:
    run = [step["run"] for step in steps() if "run" in step]
    assert all(re.fullmatch(r"make [a-z-]+", command) for command in run)
    assert targets("\n".join(run)) == targets(SCRIPT) != set()


def test_the_script_runs_targets_of_the_makefile() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert targets(SCRIPT) <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_it_tests_every_python_that_the_package_names() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    matrix = WORKFLOW["jobs"]["test"]["strategy"]["matrix"]
    assert (matrix["python-version"], matrix["torch"]) == (named, [""])
    assert named[0] == re.findall(r'^requires-python = ">=(.*)"$', project, re.MULTILINE)[0]
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', project)
    # Another release of torch than that of `matrix` makes a job of its own, beside the one with the pinned release.
    assert matrix["include"] == [{"python-version": named[0], "torch": f"{oldest}.0"}]


def test_it_may_only_read() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in WORKFLOW["jobs"].values())
    checkouts = [step for step in steps() if step.get("uses", "").startswith("actions/checkout@")]
    assert [step["with"]["persist-credentials"] for step in checkouts] == [False] * len(WORKFLOW["jobs"])


def test_its_jobs_end() -> None:
    assert all(job["timeout-minutes"] <= 60 for job in WORKFLOW["jobs"].values())
    assert WORKFLOW["concurrency"]["group"]


def test_actions_have_a_major_version() -> None:
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps() if "uses" in step)
