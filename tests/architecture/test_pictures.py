"""The pictures of the documentation are those that their script draws."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PICTURES = runpy.run_path(str(DOCS / "scripts" / "draw_pictures.py"))["PICTURES"]


@pytest.mark.parametrize("name", list(PICTURES))
def test_picture_is_up_to_date(name: str) -> None:
    drawn = str(PICTURES[name]())
    assert (DOCS / "images" / f"{name}.svg").read_text() == drawn, "run python docs/scripts/draw_pictures.py"
