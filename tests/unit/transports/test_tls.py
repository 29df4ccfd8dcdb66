"""TLS between the workers of a cluster: which connections get through a handshake."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed
from gradwire.transports import certificates, tls
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
    monkeypatch.setattr(certificates, "_now", years_ago)
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
    signer = certificates._Identity(
        x509.load_pem_x509_certificate((folder / "ps0.pem").read_bytes()), certificates._read_key(folder / "ps0.key")
    )
    forged = TlsKeys.in_folder(tmp_path, "forged")
    certificates._write_identity(
        forged, certificates._issue(signer, "urn:gradwire:worker:trainer", 1), may_replace=True
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


def test_more_names_use_the_same_authority(copied: Path) -> None:
    authority = (copied / "ca.pem").read_bytes(), (copied / "ca.key").read_bytes()
    make_keys(copied, ["late"])
    assert ((copied / "ca.pem").read_bytes(), (copied / "ca.key").read_bytes()) == authority
    names, _ = shake_hands(server_context(keys_for(copied)), client_context(keys_for(copied, "late")))
    assert names == {"late"}


def test_two_authorities_in_one_file_for_the_time_of_a_change(copied: Path, other_folder: Path) -> None:
    both = (other_folder / "ca.pem").read_bytes() + (copied / "ca.pem").read_bytes()
    (copied / "ca.pem").write_bytes(both)
    client = client_context(keys_for(other_folder))
    client.load_verify_locations(copied / "ca.pem")
    names, _ = shake_hands(server_context(keys_for(copied)), client)
    assert names == {"*"}
