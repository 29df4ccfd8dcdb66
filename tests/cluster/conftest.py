"""After every test of this folder: no worker, no thread and no socket folder is left."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.processes import children_of, wait_until
from gradwire.cluster._template_process import close_idle_template


@pytest.fixture(scope="session")
def _short_folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="gwt-", dir="/tmp")  # pytest's own folders are too long for the path of a socket
    yield Path(folder)
    close_idle_template()
    shutil.rmtree(folder)


@pytest.fixture(autouse=True)
def _nothing_is_left(_short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(_short_folder))
    yield
    assert wait_until(lambda: not _gradwire_threads(), 5), _gradwire_threads()
    assert list(_short_folder.glob("gradwire-*")) == []
    workers = [worker for template in children_of(os.getpid()) for worker in children_of(template)]
    assert workers == []


def _gradwire_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("gradwire-")]
