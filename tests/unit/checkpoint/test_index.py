"""The index of a checkpoint: what is refused, and how."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gradwire.checkpoint.index import FORMAT, VERSION, FileEntry, Index, TensorEntry, Writer, checksum_of, dump, parse
from gradwire.checkpoint.tree import sharded_node
from gradwire.errors import CheckpointDamaged, CheckpointError

FILE = "g0001-0123abcd-worker0.safetensors"


def make(**changes: Any) -> Index:
    fields: dict[str, Any] = {
        "generation": "g0001-0123abcd",
        "created": "2026-01-01T00:00:00+00:00",
        "writer": Writer("driver", "here", 1, "0", "2"),
        "files": {FILE: FileEntry(200, 100, "crc32:00000000", "worker0", "here")},
        "tensors": {"model/w": TensorEntry(FILE, 100, "float32", (5, 5), "crc32:00000000")},
        "state": {"model": {"w": {"$tensor": "model/w"}}, "step": 7},
    }
    return Index(**{**fields, **changes})


def envelope(content: bytes, **changes: Any) -> bytes:
    fields = {"format": FORMAT, "version": VERSION, "checksum": checksum_of(content), **changes}
    return json.dumps(fields).encode()[:-1] + b', "content": ' + content + b"}"


def test_it_comes_back_as_it_was() -> None:
    assert parse(dump(make()), "index.json") == make()


def test_people_can_read_it() -> None:
    text = dump(make()).decode()
    assert '"model/w": {' in text
    assert len(text.splitlines()) > 10


def test_any_changed_byte_is_noticed() -> None:
    data = dump(make())
    for place in range(len(data) - 1):  # the last is a newline
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(CheckpointError):
            parse(bytes(changed), "index.json")
    with pytest.raises(CheckpointDamaged, match=r"index\.json is damaged"):
        parse(data[: len(data) // 2], "index.json")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff\xfe", b'{"format": 1}'])
def test_what_is_no_index_is_damage(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match="not complete JSON"):
        parse(data, "index.json")


def test_other_formats_and_versions_are_named() -> None:
    with pytest.raises(CheckpointError, match="its format is 'other'"):
        parse(envelope(b"{}", format="other"), "index.json")
    with pytest.raises(CheckpointError, match=r"has version 3 of the format and this gradwire reads versions up to 2"):
        parse(envelope(b'{"new": "shape"}', version=3), "index.json")
    older = dump(make()).replace(b'"version":2', b'"version":1')
    assert parse(older, "index.json") == make()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"state": {"x": sharded_node("float32", [9, 5], [("model/w", [5, 0])])}},
            "'model/w' reaches beyond the tensor of shape",
        ),
        ({"state": {"x": sharded_node("float32", [5, 5], [("lost", [0, 0])])}}, "it has no tensor 'lost'"),
        ({"state": {"x": sharded_node("float7", [5, 5], [])}}, "unknown dtype float7"),
        ({"generation": "../x"}, "not a valid generation"),
        ({"files": {"../../etc/passwd": FileEntry(1, 1, "", "", "")}}, "not a valid checkpoint file name"),
        ({"files": {}}, "is outside "),
        ({"tensors": {"model/w": TensorEntry(FILE, 100, "float32", (5, 6), "")}}, "is outside "),
        ({"tensors": {"model/w": TensorEntry(FILE, 0, "float32", (5,), "")}}, "is outside "),
        ({"tensors": {"model/w": TensorEntry(FILE, 100, "float33", (5,), "")}}, "unknown dtype"),
        ({"tensors": {"model/w": TensorEntry(FILE, 100, "float32", (-5, -5), "")}}, "unknown dtype or shape"),
        ({"tensors": {}}, "it has no tensor 'model/w'"),
        ({"state": [1]}, "has no state"),
        ({"state": {"a": {"$tensor": [1]}}}, "a tensor without a name"),
        ({"state": {"a": {"$object": {"kind": "module", "state": {}}}}}, "an object without kind, type and state"),
        ({"state": {"a": [{"$object": 3}]}}, "an object without kind, type and state"),
        ({"state": {"a": {"$dict": [[1, 2, 3]]}}}, "not made of pairs"),
    ],
)
def test_what_contradicts_itself_is_damage(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointDamaged, match=why):
        parse(dump(make(**changes)), "index.json")


def test_endless_nesting_is_damage() -> None:
    content = msgspec.json.encode(make(state={"a": "here"})).replace(b'"here"', b"[" * 100_000 + b"]" * 100_000)
    with pytest.raises(CheckpointDamaged, match="is damaged"):
        parse(envelope(content), "index.json")


def test_unknown_and_missing_fields_are_damage() -> None:
    content = msgspec.json.decode(msgspec.json.encode(make()))
    with pytest.raises(CheckpointDamaged, match="extra"):
        parse(envelope(json.dumps({**content, "extra": 1}).encode()), "index.json")
    del content["tensors"]
    with pytest.raises(CheckpointDamaged, match="tensors"):
        parse(envelope(json.dumps(content).encode()), "index.json")
