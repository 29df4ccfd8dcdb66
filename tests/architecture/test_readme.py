"""The README stays short, and shows what its example prints; `tests/examples` runs that and compares."""

from __future__ import annotations

import re
from pathlib import Path

from examples.test_examples import DOCUMENTS, shown_in

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_length() -> None:
    assert 120 <= len(TEXT.splitlines()) <= 150


def test_order_of_sections() -> None:
    assert re.findall(r"^## (.+)$", TEXT, re.MULTILINE) == [
        "Install",
        "Two commands",
        "Example",
        "The distributed graph",
        "When to use it, and when not",
        "Features",
        "How fast it is",
        "Documentation",
    ]


def test_features_are_eight_short_bullets() -> None:
    bullets = re.findall(r"^- (.+)$", section("Features"), re.MULTILINE)
    assert len(bullets) == 8
    assert [bullet for bullet in bullets if len(bullet.split()) > 12] == []


def test_example_shows_what_it_prints() -> None:
    assert "README.md" in DOCUMENTS
    (program,) = shown_in("README.md")
    assert program.output is not None
    assert "Cluster.local" in program.text
    assert len(list(filter(str.strip, program.text.splitlines()))) == 10


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test"} <= set(re.findall(r"\$ make ([\w-]+)", TEXT)) <= targets


def test_pictures_are_stored_ones_with_descriptions() -> None:
    pictures = re.findall(r'<img src="([^"]+)" alt="[^"]{30,}"', TEXT)
    assert len(pictures) == TEXT.count("<img ") == 2
    assert [picture for picture in pictures if not (ROOT / picture).is_file()] == []
