"""Keys of a cluster: writing them, and files that are not right."""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradwire.config import TlsKeys
from gradwire.errors import ConfigurationError
from gradwire.transports import certificates
from gradwire.transports.tls import (
    client_context,
    keys_for,
    make_keys,
    server_context,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "keys"
    make_keys(path, ["worker", "ps0", "trainer"])
    return path


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "keys"
    make_keys(path)
    return path


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """Files that a test may spoil."""
    return shutil.copytree(folder, tmp_path / "copied")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def years_ago() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=800)


# Making keys


def test_files_are_written_for_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "keys"
    make_keys(folder, ["ps0", "trainer"])
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{name}.{kind}" for name in ("ca", "ps0", "trainer") for kind in ("pem", "key")
    )
    assert mode_of(folder) == 0o700
    assert {mode_of(path) for path in folder.glob("*.key")} == {0o600}


def test_the_default_is_one_certificate_for_all(other_folder: Path) -> None:
    assert sorted(path.name for path in other_folder.iterdir()) == ["ca.key", "ca.pem", "worker.key", "worker.pem"]


def test_certificates_are_for_both_ends_and_not_for_signing(folder: Path) -> None:
    certificate = x509.load_pem_x509_certificate((folder / "ps0.pem").read_bytes())
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert set(usage) == {ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH}
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    key = certificate.public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    assert key.curve.name == "secp256r1"


def test_certificates_last_as_long_as_asked_and_no_longer_than_the_authority(tmp_path: Path) -> None:
    make_keys(tmp_path, ["short"], days=2)
    make_keys(tmp_path, ["long"], days=100_000)
    now = datetime.datetime.now(datetime.timezone.utc)
    ends = {
        name: x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes()).not_valid_after_utc
        for name in ("ca", "short", "long")
    }
    assert datetime.timedelta(days=1) < ends["short"] - now <= datetime.timedelta(days=2)
    assert ends["long"] == ends["ca"]


def test_making_keys_again_renews_a_certificate(copied: Path) -> None:
    before = (copied / "ps0.pem").read_bytes()
    make_keys(copied, ["ps0"])
    assert (copied / "ps0.pem").read_bytes() != before
    assert client_context(keys_for(copied, "ps0")).verify_mode is ssl.CERT_REQUIRED
    assert not list(copied.glob("*.draft")) + list(copied.glob(".*"))


@pytest.mark.parametrize("missing", ["ca.pem", "ca.key"])
def test_half_an_authority_is_not_replaced(copied: Path, missing: str) -> None:
    (copied / missing).unlink()
    with pytest.raises(ConfigurationError, match="one of"):
        make_keys(copied, ["late"])
    assert not (copied / missing).exists()


def test_an_expired_authority_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "_CA_DAYS", 1)
    monkeypatch.setattr(certificates, "_now", years_ago)
    make_keys(tmp_path, days=1)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match=r"ca\.pem expired .* new folder"):
        make_keys(tmp_path)


def test_an_authority_with_the_wrong_key_is_not_used(copied: Path) -> None:
    shutil.copy(copied / "ps0.key", copied / "ca.key")
    with pytest.raises(ConfigurationError, match=r"ca\.key is not the key of .*ca\.pem"):
        make_keys(copied, ["late"])


def test_a_folder_that_others_can_enter_is_refused_and_not_changed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="chmod 700"):
        make_keys(tmp_path)
    assert mode_of(tmp_path) == 0o755
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot write keys"):
        make_keys(tmp_path / "file" / "keys")


@pytest.mark.parametrize("names", ["worker", [""], ["\ud800"]])
def test_names_that_are_none(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(ConfigurationError, match="names"):
        make_keys(tmp_path, names)


def test_no_days(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="days"):
        make_keys(tmp_path, days=0)


def test_a_name_that_is_too_long_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot write"):
        make_keys(tmp_path, ["x" * 300])


# Files that are not right


def rsa_key() -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def encrypted_key() -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    secret = serialization.BestAvailableEncryption(b"secret")
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)


@pytest.mark.parametrize("make_context", [server_context, client_context])
@pytest.mark.parametrize("name", ["ca.pem", "worker.pem", "worker.key"])
@pytest.mark.parametrize("content", [None, b"", b"not a key", bytes(1000)])
def test_a_missing_or_spoilt_file_is_named(
    copied: Path, make_context: object, name: str, content: bytes | None
) -> None:
    assert callable(make_context)
    if content is None:
        (copied / name).unlink()
    else:
        (copied / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=name):
        make_context(keys_for(copied))


@pytest.mark.parametrize("content", [rsa_key, encrypted_key])
def test_a_key_of_another_kind_is_refused_without_asking(copied: Path, content: object) -> None:
    assert callable(content)
    (copied / "worker.key").write_bytes(content())
    with pytest.raises(ConfigurationError, match=r"worker\.key is not"):
        server_context(keys_for(copied))


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_a_key_that_others_can_read_is_refused(copied: Path, mode: int) -> None:
    (copied / "worker.key").chmod(mode)
    with pytest.raises(ConfigurationError, match=r"chmod 600 .*worker\.key"):
        client_context(keys_for(copied))


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_a_key_that_cannot_be_read(copied: Path) -> None:
    (copied / "worker.key").chmod(0)
    with pytest.raises(ConfigurationError, match=r"cannot read .*worker\.key"):
        client_context(keys_for(copied))


def test_a_folder_in_place_of_a_file(copied: Path) -> None:
    (copied / "worker.key").unlink()
    (copied / "worker.key").mkdir()
    with pytest.raises(ConfigurationError, match=r"cannot read .*worker\.key"):
        client_context(keys_for(copied))


def test_the_key_of_another_certificate(copied: Path) -> None:
    shutil.copy(copied / "ps0.key", copied / "worker.key")
    with pytest.raises(ConfigurationError, match=r"worker\.key is not the key of .*worker\.pem"):
        server_context(keys_for(copied))


def test_the_authority_of_another_cluster(copied: Path, other_folder: Path) -> None:
    shutil.copy(other_folder / "ca.pem", copied / "ca.pem")
    with pytest.raises(ConfigurationError, match=r"worker\.pem was not signed by .*ca\.pem"):
        client_context(keys_for(copied))


@pytest.mark.parametrize(("offset_days", "word"), [(-800, "expired"), (800, "clock")])
def test_the_wrong_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_days: int, word: str) -> None:
    then = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=offset_days)
    monkeypatch.setattr(certificates, "_now", lambda: then)
    make_keys(tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigurationError, match=rf"worker\.pem .*{word}"):
        server_context(keys_for(tmp_path))


def test_an_authority_that_has_expired(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.timezone.utc)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "old")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1)
    builder = builder.not_valid_before(now - datetime.timedelta(days=2))
    old = builder.not_valid_after(now - datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    keys = TlsKeys.in_folder(tmp_path)
    valid = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    leaf = certificates._issue(certificates._Identity(valid, key), "urn:gradwire:worker:*", 1)
    certificates._write_identity(keys, leaf, may_replace=True)
    keys.ca.write_bytes(old.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ConfigurationError, match=r"ca\.pem expired"):
        server_context(keys)
