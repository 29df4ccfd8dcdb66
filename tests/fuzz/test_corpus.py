"""The fuzzer's seeds are what the samples say, and a short run with a fixed seed finds nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fuzz import fuzz_wire

FILES = sorted(fuzz_wire.CORPUS.glob("*.bin"))

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch says that some layouts are young


def test_corpus_is_up_to_date() -> None:
    assert {path.stem: path.read_bytes() for path in FILES} == fuzz_wire.seeds()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_seed_has_the_outcome_its_name_says(path: Path) -> None:
    outcome = fuzz_wire.run_one(path.read_bytes(), random.Random(0))
    if path.stem.startswith("00_"):
        assert outcome["frames"] == 1
        assert not outcome["refused"] + outcome["values refused"]
    else:
        assert outcome["refused"] + outcome["values refused"] == 1


def test_short_run() -> None:
    rng = random.Random(20)
    corpus = fuzz_wire.read_corpus(fuzz_wire.CORPUS)
    outcomes = [fuzz_wire.run_one(fuzz_wire.change(rng.choice(corpus), rng, corpus), rng) for _ in range(5000)]
    assert sum(outcome["values"] for outcome in outcomes) > 40
    assert sum(outcome["refused"] for outcome in outcomes) > 1000


def test_failing_input_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(data: bytes, rng: random.Random) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(fuzz_wire, "run_one", break_down)
    assert fuzz_wire.fuzz(10.0, 1, tmp_path) == 1
    (saved,) = tmp_path.iterdir()
    assert saved.read_bytes() == fuzz_wire.read_corpus(fuzz_wire.CORPUS)[0]
