"""`gradwire keys`: the files that are written, and what is said about them."""

from __future__ import annotations

import datetime
import re
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gradwire.cli.app import app
from gradwire.cluster.message_auth import read_secret
from gradwire.errors import AuthenticationFailed, ConfigurationError
from gradwire.transports import certificates
from gradwire.transports.certificates import check_files
from gradwire.transports.tls import keys_for, make_keys

_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def keys(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["keys", *map(str, arguments)])


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_init_makes_one_certificate_for_every_worker(tmp_path: Path) -> None:
    done = keys("init", tmp_path / "k")
    assert done.exit_code == 0
    check_files(keys_for(tmp_path / "k"))
    assert "wrote" in done.output
    assert "every worker" in done.output
    assert "ca.key stays here" in done.output
    assert mode_of(tmp_path / "k") == 0o700


def test_init_makes_one_for_each_name_and_keeps_the_authority(tmp_path: Path) -> None:
    assert keys("init", tmp_path / "k", "--name", "ps", "--name", "trainer0").exit_code == 0
    authority = (tmp_path / "k" / "ca.pem").read_bytes()
    done = keys("init", tmp_path / "k", "--name", "trainer1")
    assert f"used {tmp_path}/k/ca.pem" in done.output
    assert (tmp_path / "k" / "ca.pem").read_bytes() == authority
    for name in ("ps", "trainer0", "trainer1"):
        check_files(keys_for(tmp_path / "k", name))


def test_a_key_that_was_made_elsewhere_is_signed_without_leaving_its_machine(tmp_path: Path) -> None:
    here, there = tmp_path / "authority", tmp_path / "worker"
    assert keys("init", here).exit_code == 0
    requested = keys("request", there, "--name", "trainer0")
    assert requested.exit_code == 0
    assert mode_of(there / "trainer0.key") == 0o600
    assert "gradwire keys sign trainer0.csr --name trainer0 --keys FOLDER" in requested.output
    signed = keys("sign", there / "trainer0.csr", "--name", "trainer0", "--keys", here)
    assert signed.exit_code == 0
    assert _FINGERPRINT.findall(signed.output) == _FINGERPRINT.findall(requested.output)
    (there / "ca.pem").write_bytes((here / "ca.pem").read_bytes())
    check_files(keys_for(there, "trainer0"))
    shown = keys("show", there / "trainer0.pem")
    assert shown.exit_code == 0
    assert "worker trainer0" in shown.output


def test_a_key_is_not_overwritten(tmp_path: Path) -> None:
    assert keys("request", tmp_path / "k", "--name", "ps").exit_code == 0
    secret = (tmp_path / "k" / "ps.key").read_bytes()
    done = keys("request", tmp_path / "k", "--name", "ps")
    assert isinstance(done.exception, ConfigurationError)
    assert "already exists" in str(done.exception)
    assert (tmp_path / "k" / "ps.key").read_bytes() == secret


def test_sign_refuses_what_is_not_a_request(tmp_path: Path) -> None:
    make_keys(tmp_path / "k")
    bad = tmp_path / "bad.csr"
    bad.write_text("not a request")
    done = keys("sign", bad, "--name", "ps", "--keys", tmp_path / "k")
    assert isinstance(done.exception, AuthenticationFailed)
    missing = keys("sign", tmp_path / "none.csr", "--name", "ps", "--keys", tmp_path / "k")
    assert "cannot read" in str(missing.exception)
    assert not (tmp_path / "bad.pem").exists()


def test_sign_needs_an_authority(tmp_path: Path) -> None:
    keys("request", tmp_path / "w", "--name", "ps")
    done = keys("sign", tmp_path / "w" / "ps.csr", "--name", "ps", "--keys", tmp_path / "empty")
    assert "has no certificate authority" in str(done.exception)
    assert "gradwire keys init" in str(done.exception)


def test_show_has_every_certificate_of_a_folder(tmp_path: Path) -> None:
    make_keys(tmp_path / "k", ["worker", "ps"], days=10)
    done = keys("show", tmp_path / "k")
    assert done.exit_code == 0
    blocks = {Path(part.split("\n")[0]).name: part for part in re.split(r"\n(?=/)", done.output)}
    assert sorted(blocks) == ["ca.pem", "ps.pem", "worker.pem"]
    assert "the authority" in blocks["ca.pem"]
    assert "worker ps" in blocks["ps.pem"]
    assert "every worker" in blocks["worker.pem"]
    assert "(9 days)" in blocks["ps.pem"]
    assert all(_FINGERPRINT.search(part) for part in blocks.values())


def test_show_fails_for_a_certificate_of_another_authority(tmp_path: Path) -> None:
    make_keys(tmp_path / "k")
    make_keys(tmp_path / "other")
    (tmp_path / "k" / "ca.pem").write_bytes((tmp_path / "other" / "ca.pem").read_bytes())
    done = keys("show", tmp_path / "k" / "worker.pem")
    assert done.exit_code == 1
    assert "was not signed by" in done.output


def test_show_fails_for_a_certificate_that_has_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long_ago = datetime.datetime(2025, 1, 1, tzinfo=datetime.timezone.utc)
    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_now", lambda: long_ago)
        make_keys(tmp_path / "k", days=5)
    done = keys("show", tmp_path / "k")
    assert done.exit_code == 1
    assert "worker.pem expired at 2025-01-06" in done.output
    assert "gradwire keys init" in done.output


@pytest.mark.parametrize("path", ["missing.pem", "."])
def test_show_fails_where_there_is_nothing_to_show(tmp_path: Path, path: str) -> None:
    done = keys("show", tmp_path / path)
    assert done.exit_code == 1
    assert "error:" in done.output


def test_a_secret_is_for_its_owner_and_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    done = keys("secret", file)
    assert done.exit_code == 0
    assert f"GRADWIRE_SECRET_FILE={file}" in done.output
    assert mode_of(file) == 0o600
    read_secret(file)
    content = file.read_bytes()
    assert content.strip().decode() not in done.output
    assert keys("secret", file).exit_code != 0
    assert file.read_bytes() == content
