"""A secret is taken from a file only if its owner alone can read it; a proof that cannot be checked is refused."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

import msgspec
import pytest

from gradwire.cluster.message_auth import CertificateAuth, read_secret, write_secret
from gradwire.errors import AuthenticationFailed, ConfigurationError
from gradwire.transports.tls import keys_for, make_keys


def test_a_secret_that_was_written_can_be_read(tmp_path: Path) -> None:
    file = write_secret(tmp_path / "secret")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    first, second = read_secret(file), read_secret(file)
    second.verify(b"statement", first.sign(b"statement"))
    with pytest.raises(AuthenticationFailed, match="another secret, or altered"):
        second.verify(b"another", first.sign(b"statement"))
    assert "secret" not in repr(first).lower().replace("sharedsecret", "")


def test_two_secrets_differ(tmp_path: Path) -> None:
    first, second = (read_secret(write_secret(tmp_path / name)) for name in "ab")
    assert first.sign(b"x") != second.sign(b"x")


def test_a_secret_is_not_overwritten(tmp_path: Path) -> None:
    write_secret(tmp_path / "secret")
    with pytest.raises(ConfigurationError, match="exists; remove it first"):
        write_secret(tmp_path / "secret")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = write_secret(tmp_path / "secret")
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=rf"accessible to others \(mode {mode:o}\); run `chmod 600"):
        read_secret(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = write_secret(tmp_path / "secret")
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigurationError, match="must belong to the current user"):
        read_secret(file)


def test_a_missing_or_short_secret_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot read the secret .*GRADWIRE_SECRET_FILE"):
        read_secret(tmp_path / "none")
    short = tmp_path / "short"
    short.write_bytes(b"abc\n")
    short.chmod(0o600)
    with pytest.raises(ConfigurationError, match="has 3 bytes, but a secret needs 32"):
        read_secret(short)


def test_a_certificate_for_a_curve_that_is_not_known_is_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    auth = CertificateAuth(keys_for(tmp_path / "keys"))
    certificate, signature = msgspec.msgpack.decode(auth.sign(b"a statement"))
    p256, unknown = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d03017f")
    der = ssl.PEM_cert_to_DER_cert(certificate.decode())
    assert p256 in der
    forged = ssl.DER_cert_to_PEM_cert(der.replace(p256, unknown)).encode()
    auth.verify(b"a statement", msgspec.msgpack.encode([certificate, signature]))
    with pytest.raises(AuthenticationFailed, match="its proof is not valid"):
        auth.verify(b"a statement", msgspec.msgpack.encode([forged, signature]))
