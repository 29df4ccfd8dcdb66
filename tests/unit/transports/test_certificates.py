"""Keys of a cluster: writing them, and files that are not right."""

from __future__ import annotations

import copy
import datetime
import os
import pickle
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
from gradwire.errors import AuthenticationFailed, ConfigurationError
from gradwire.transports import certificates
from gradwire.transports.tls import (
    client_context,
    keys_for,
    make_keys,
    server_context,
    uri_of_worker,
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
    with pytest.raises(ConfigurationError, match=r"ca\.pem expired .* empty folder"):
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
    with pytest.raises(ConfigurationError, match=r"cannot read .*worker\.key.*; it must be a file that this user"):
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


# Keys in memory


def signed_request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, *extensions: x509.ExtensionType) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gradwire cluster of somebody else")])
    builder = x509.CertificateSigningRequestBuilder(name)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def test_certificate_of_a_request_is_good_for_the_assigned_name_alone() -> None:
    authority, key = certificates.Authority(), certificates.ProcessKey()
    (certificate,) = x509.load_pem_x509_certificates(authority.sign(key.request(), uri_of_worker("worker1")))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["urn:gradwire:worker:worker1"]
    assert len(list(names)) == 1


def test_name_that_stands_for_all_in_files_is_an_ordinary_one_here() -> None:
    assert uri_of_worker("worker") == "urn:gradwire:worker:worker"
    assert uri_of_worker("*") != uri_of_worker("%2A")


def test_names_and_extensions_that_a_request_asks_for_are_ignored() -> None:
    authority = certificates.Authority()
    request = signed_request(
        ec.generate_private_key(ec.SECP256R1()),
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier("urn:gradwire:worker:*")]),
        x509.BasicConstraints(ca=True, path_length=None),
    )
    (certificate,) = x509.load_pem_x509_certificates(authority.sign(request, uri_of_worker("worker1")))
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.UniformResourceIdentifier) == ["urn:gradwire:worker:worker1"]
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    assert "somebody" not in certificate.subject.rfc4514_string()


def test_request_with_the_key_of_another_process_is_refused() -> None:
    """The signature proves that whoever asks has the key."""
    request = x509.load_pem_x509_csr(certificates.ProcessKey().request())
    other = x509.load_pem_x509_csr(certificates.ProcessKey().request())
    encoding = serialization.Encoding.DER
    raw = request.public_bytes(encoding)
    public = serialization.PublicFormat.SubjectPublicKeyInfo
    swapped = raw.replace(
        request.public_key().public_bytes(encoding, public), other.public_key().public_bytes(encoding, public)
    )
    assert swapped != raw
    forged = x509.load_der_x509_csr(swapped).public_bytes(serialization.Encoding.PEM)
    with pytest.raises(AuthenticationFailed, match="not signed with its own key"):
        certificates.Authority().sign(forged, uri_of_worker("worker1"))


@pytest.mark.parametrize(
    "request_pem",
    [
        b"",
        b"-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
        signed_request(rsa.generate_private_key(65537, 2048)),
        signed_request(ec.generate_private_key(ec.SECP384R1())),
    ],
    ids=["empty", "garbage", "RSA", "another curve"],
)
def test_what_is_not_a_request_for_the_right_kind_of_key_is_refused(request_pem: bytes) -> None:
    with pytest.raises(AuthenticationFailed, match="certificate request"):
        certificates.Authority().sign(request_pem, uri_of_worker("worker1"))
    with pytest.raises(AuthenticationFailed, match="certificate request"):
        certificates.seal(b"secret", request_pem, b"worker1")


def test_sealed_secret_opens_with_its_key_and_context_alone() -> None:
    key, other = certificates.ProcessKey(), certificates.ProcessKey()
    sealed = certificates.seal(b"the token", key.request(), b"worker1")
    assert key.open(sealed, b"worker1") == b"the token"
    assert b"the token" not in sealed
    assert sealed != certificates.seal(b"the token", key.request(), b"worker1")
    flipped = sealed[:-1] + bytes([sealed[-1] ^ 1])
    attempts = [(other, sealed, b"worker1"), (key, sealed, b"worker2"), (key, flipped, b"worker1"), (key, b"", b"")]
    for wrong_key, wrong_sealed, context in attempts:
        with pytest.raises(AuthenticationFailed, match="not sealed for this process's key"):
            wrong_key.open(wrong_sealed, context)


def test_private_keys_do_not_travel() -> None:
    for secret in (certificates.ProcessKey(), certificates.Authority()):
        with pytest.raises(TypeError, match="must not leave its process"):
            pickle.dumps(secret)
        with pytest.raises(TypeError, match="must not leave its process"):
            copy.copy(secret)


def test_files_in_memory_pass_the_checks_of_files_and_are_gone_afterwards() -> None:
    authority, key = certificates.Authority(), certificates.ProcessKey()
    with key.files(authority.sign(key.request(), uri_of_worker("worker1")), authority.certificate) as keys:
        assert mode_of(keys.key) == 0o600
        assert "memfd:" in os.readlink(keys.key)
        certificates.check_files(keys)
        server_context(keys)
        client_context(keys)
    assert not keys.key.exists()


def test_certificate_of_another_cluster_does_not_pass_the_checks() -> None:
    authority, other, key = certificates.Authority(), certificates.Authority(), certificates.ProcessKey()
    certificate = other.sign(key.request(), uri_of_worker("worker1"))
    with (
        key.files(certificate, authority.certificate) as keys,
        pytest.raises(ConfigurationError, match="was not signed by"),
    ):
        certificates.check_files(keys)
    certificate = authority.sign(certificates.ProcessKey().request(), uri_of_worker("worker1"))
    with (
        key.files(certificate, authority.certificate) as keys,
        pytest.raises(ConfigurationError, match="is not the key of"),
    ):
        certificates.check_files(keys)
