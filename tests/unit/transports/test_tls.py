"""Keys of a cluster, and who gets through a handshake with them."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import ssl
import stat
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, ConfigurationError
from gradwire.transports import certificates as _certificates
from gradwire.transports import tls
from gradwire.transports.tls import (
    certified_names,
    check_identity,
    client_context,
    keys_for,
    make_keys,
    server_context,
)

DEADLINE_S = 20.0
ODD_NAMES = [
    "trainer:0",
    "a/b",
    "../up",
    "ca",
    "ü ö",
    "x%2Fy",
    "CN=evil,DNS:other",
    "new\nline",
    "nul\0byte",
    "w*",
    "#?&",
]


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


Outcome = frozenset[str] | Exception


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[Outcome, Outcome]:
    """What the server and the client learned about each other: worker names, or why not.

    With TLS 1.3 the client is done before the server has seen its certificate, so it has to read to know.
    """
    ours, theirs = socket.socketpair()
    ours.settimeout(DEADLINE_S)
    theirs.settimeout(DEADLINE_S)
    outcomes: list[Outcome] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as sock:
                outcomes.append(certified_names(sock))
                sock.sendall(b"welcome")
        except Exception as error:
            outcomes.append(error)
        finally:
            ours.close()

    thread = threading.Thread(target=serve, name="gradwire-test-serve")
    thread.start()
    try:
        with client.wrap_socket(theirs) as sock:
            seen: Outcome = certified_names(sock)
            assert sock.version() == "TLSv1.3"
            if sock.recv(7) != b"welcome":
                seen = ConnectionError("the server closed the connection")
    except OSError as error:  # ssl.SSLError is one
        seen = error
    finally:
        theirs.close()
        thread.join(DEADLINE_S)
    assert len(outcomes) == 1
    return outcomes[0], seen


def careless_client(folder: Path, keys: TlsKeys | None) -> ssl.SSLContext:
    """A client that knows the authority in `folder` and does not look at its own files."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(folder / "ca.pem")
    if keys is not None:
        context.load_cert_chain(keys.certificate, keys.key)
    return context


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


def test_more_names_use_the_same_authority(copied: Path) -> None:
    authority = (copied / "ca.pem").read_bytes(), (copied / "ca.key").read_bytes()
    make_keys(copied, ["late"])
    assert ((copied / "ca.pem").read_bytes(), (copied / "ca.key").read_bytes()) == authority
    names, _ = shake_hands(server_context(keys_for(copied)), client_context(keys_for(copied, "late")))
    assert names == {"late"}


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
    monkeypatch.setattr(_certificates, "_CA_DAYS", 1)
    monkeypatch.setattr(_certificates, "_now", years_ago)
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


# Handshakes


def test_workers_of_one_cluster_learn_each_others_names(folder: Path) -> None:
    outcome = shake_hands(server_context(keys_for(folder, "ps0")), client_context(keys_for(folder, "trainer")))
    assert outcome == (frozenset({"trainer"}), frozenset({"ps0"}))


def test_the_shared_certificate_is_good_for_all(folder: Path) -> None:
    keys = TlsKeys.in_folder(folder)
    assert keys == keys_for(folder, "*")
    names, _ = shake_hands(server_context(keys), client_context(keys))
    assert names == {"*"}
    check_identity({"*"}, "any worker at all")


def test_odd_names_arrive_as_they_are_and_stay_in_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_keys(folder, ODD_NAMES)
    assert os.listdir(tmp_path) == ["keys"]
    assert len(os.listdir(folder)) == 2 * (len(ODD_NAMES) + 1)
    server = server_context(keys_for(folder, ODD_NAMES[0]))
    seen = [shake_hands(server, client_context(keys_for(folder, name)))[0] for name in ODD_NAMES]
    assert seen == [frozenset({name}) for name in ODD_NAMES]


def test_another_cluster_is_refused_by_both_sides(folder: Path, other_folder: Path) -> None:
    served, called = shake_hands(server_context(keys_for(folder)), client_context(keys_for(other_folder)))
    assert isinstance(called, ssl.SSLCertVerificationError)
    assert isinstance(served, OSError)


def test_a_certificate_of_another_cluster_is_refused(folder: Path, other_folder: Path) -> None:
    client = careless_client(folder, keys_for(other_folder))
    served, called = shake_hands(server_context(keys_for(folder)), client)
    assert isinstance(served, ssl.SSLCertVerificationError)
    assert isinstance(called, Exception)


def test_a_client_without_a_certificate_is_refused(folder: Path) -> None:
    served, called = shake_hands(server_context(keys_for(folder)), careless_client(folder, None))
    assert isinstance(served, ssl.SSLError)
    assert "CERTIFICATE" in str(served.reason)
    assert isinstance(called, Exception)


@pytest.mark.parametrize("expired", ["server", "client"])
def test_an_expired_certificate_is_refused(copied: Path, expired: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_certificates, "_now", years_ago)
    make_keys(copied / "old", ["late"], days=1)  # its authority is still valid
    keys = keys_for(copied / "old", "late")
    contexts = {"server": server_context(keys), "client": client_context(keys)}  # made while the clock is wrong
    monkeypatch.undo()
    make_keys(copied / "old", ["good"])
    good = keys_for(copied / "old", "good")
    contexts["client" if expired == "server" else "server"] = (
        client_context(good) if expired == "server" else server_context(good)
    )
    served, called = shake_hands(contexts["server"], contexts["client"])
    refused = called if expired == "server" else served
    assert isinstance(refused, ssl.SSLCertVerificationError)
    assert "expired" in str(refused)


def test_a_client_of_tls_1_2_is_refused(folder: Path) -> None:
    client = careless_client(folder, keys_for(folder))
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    served, called = shake_hands(server_context(keys_for(folder)), client)
    assert isinstance(served, ssl.SSLError)
    assert isinstance(called, Exception)


def test_a_worker_cannot_sign_for_another(folder: Path, tmp_path: Path) -> None:
    signer = _certificates._Identity(
        x509.load_pem_x509_certificate((folder / "ps0.pem").read_bytes()), _certificates._read_key(folder / "ps0.key")
    )
    forged = TlsKeys.in_folder(tmp_path, "forged")
    _certificates._write_identity(
        forged, _certificates._issue(signer, "urn:gradwire:worker:trainer", 1), may_replace=True
    )
    chain = forged.certificate.read_bytes() + (folder / "ps0.pem").read_bytes()
    forged.certificate.write_bytes(chain)
    served, _ = shake_hands(server_context(keys_for(folder)), careless_client(folder, forged))
    assert isinstance(served, ssl.SSLCertVerificationError)


def test_a_certificate_that_names_no_worker(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_uri_of", lambda name: f"https://example.org/{name}")
    make_keys(copied, ["stranger"])
    monkeypatch.undo()
    served, _ = shake_hands(server_context(keys_for(copied)), client_context(keys_for(copied, "stranger")))
    assert isinstance(served, AuthenticationFailed)


def test_a_name_that_is_not_text(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "_uri_of", lambda name: "urn:gradwire:worker:%FF")
    make_keys(copied, ["stranger"])
    monkeypatch.undo()
    served, _ = shake_hands(server_context(keys_for(copied)), client_context(keys_for(copied, "stranger")))
    assert isinstance(served, AuthenticationFailed)


def test_names_before_the_handshake(folder: Path) -> None:
    ours, theirs = socket.socketpair()
    context = client_context(keys_for(folder))
    with (
        theirs,
        context.wrap_socket(ours, do_handshake_on_connect=False) as sock,
        pytest.raises(AuthenticationFailed, match="handshake"),
    ):
        certified_names(sock)


def test_another_workers_name_is_refused(folder: Path) -> None:
    names, _ = shake_hands(server_context(keys_for(folder)), client_context(keys_for(folder, "trainer")))
    assert isinstance(names, frozenset)
    check_identity(names, "trainer")
    for name in ("ps0", "Trainer", "trainer ", "train", ""):
        with pytest.raises(AuthenticationFailed, match=r"\['trainer'\]"):
            check_identity(names, name)


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


def test_two_authorities_in_one_file_for_the_time_of_a_change(copied: Path, other_folder: Path) -> None:
    both = (other_folder / "ca.pem").read_bytes() + (copied / "ca.pem").read_bytes()
    (copied / "ca.pem").write_bytes(both)
    client = client_context(keys_for(other_folder))
    client.load_verify_locations(copied / "ca.pem")
    names, _ = shake_hands(server_context(keys_for(copied)), client)
    assert names == {"*"}


@pytest.mark.parametrize(("offset_days", "word"), [(-800, "expired"), (800, "clock")])
def test_the_wrong_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_days: int, word: str) -> None:
    then = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=offset_days)
    monkeypatch.setattr(_certificates, "_now", lambda: then)
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
    leaf = _certificates._issue(_certificates._Identity(valid, key), "urn:gradwire:worker:*", 1)
    _certificates._write_identity(keys, leaf, may_replace=True)
    keys.ca.write_bytes(old.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ConfigurationError, match=r"ca\.pem expired"):
        server_context(keys)
