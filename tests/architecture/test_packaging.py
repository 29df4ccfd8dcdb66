"""What the package says of itself is the same everywhere."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import gradwire

ROOT = Path(__file__).parents[2]
PROJECT = (ROOT / "pyproject.toml").read_text()
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))


def table(header: str) -> str:
    """Return the text of one table of pyproject.toml."""
    found = re.search(rf"^\[{re.escape(header)}\]$(.*?)(?=^\[|\Z)", PROJECT, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def extras() -> dict[str, list[Requirement]]:
    """Return the extras and what they install; extras that they name are left out."""
    found = re.findall(r"^([a-z]+) = \[(.*?)\]$", table("project.optional-dependencies"), re.DOTALL | re.MULTILINE)
    return {
        name: [Requirement(line) for line in re.findall(r'"(.+?)"', lines) if not line.startswith("gradwire[")]
        for name, lines in found
    }


def constraints() -> list[Requirement]:
    """Return the exact versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_one_version() -> None:
    assert 'dynamic = ["version", "readme"]' in PROJECT
    pattern = re.search(r"pattern = '(.*)'", table("tool.hatch.version"))
    source = (ROOT / "src/gradwire/versions.py").read_text()
    assert pattern is not None
    assert re.findall(pattern[1], source, re.MULTILINE) == [gradwire.__version__]


def test_the_changelog_and_the_citation_are_of_this_version() -> None:
    releases = re.findall(r"^## \[(.+?)\] - (\d{4}-\d{2}-\d{2})$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[0] == (gradwire.__version__, CITATION["date-released"])
    assert CITATION["version"] == gradwire.__version__


def test_the_extras() -> None:
    assert {"ray", "slurm", "dashboard", "trace", "all"} <= set(extras())


def test_every_requirement_has_an_exact_version() -> None:
    pinned = {requirement.name for requirement in constraints()}
    direct = [Requirement(line) for line in re.findall(r'^    "(.+?[<>=].+?)",$', table("project"), re.MULTILINE)]
    needed = {requirement.name for requirement in [*direct, *(item for items in extras().values() for item in items)]}
    assert {"torch", "ray", "starlette", "twine"} <= needed <= pinned


def test_the_exact_versions_can_be_installed_on_the_oldest_python() -> None:
    """Of the packages that are installed here; the documentation is built on a newer Python."""
    oldest = re.search(r'^requires-python = ">=(.+)"$', PROJECT, re.MULTILINE)
    assert oldest is not None
    docs = {requirement.name for requirement in extras()["docs"]}
    installed = {package.metadata["Name"].lower().replace("_", "-"): package for package in metadata.distributions()}
    checked = set()
    for pin in constraints():
        package = installed.get(pin.name)
        if pin.name in docs or package is None or package.version not in pin.specifier:
            continue
        if pin.marker is None or pin.marker.evaluate({"python_version": oldest[1]}):
            supported = SpecifierSet(package.metadata.get("Requires-Python", ""))
            assert f"{oldest[1]}.99" in supported, f"{pin} does not support Python {oldest[1]}"
            checked.add(pin.name)
    assert {"msgspec", "pytest", "ray"} <= checked


def test_types_are_shipped() -> None:
    assert (ROOT / "src/gradwire/py.typed").read_text() == ""


def test_one_home() -> None:
    """The documentation's address is the same wherever one is named."""
    (home,) = re.findall(r'^Documentation = "(.*)"$', PROJECT, re.MULTILINE)
    folders = (ROOT, *(ROOT / name for name in ("src", "docs", "examples", ".github")))
    paths = [
        path for folder in folders for path in folder.glob("*.*" if folder == ROOT else "**/*.*") if path.is_file()
    ]
    texts = [
        path.read_bytes().decode(errors="replace") for path in paths if not {"_build", "__pycache__"} & set(path.parts)
    ]
    urls = {url for text in texts for url in re.findall(r"https?://gradwire\.[^\s\"'`)]*", text)}
    assert home in urls
    assert {url for url in urls if not url.startswith(home)} == set()


def test_issue_forms_ask_for_something() -> None:
    assert len(FORMS) == 2
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert form["description"]
        assert any(item.get("validations", {}).get("required") for item in form["body"])
