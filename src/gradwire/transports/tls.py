"""Mutual TLS 1.3, and the worker names that a certificate is valid for.

`make_keys` writes a certificate authority for one cluster and, signed by it, a certificate for each worker (or one for
all of them). Both ends of a connection present theirs. Nothing else is trusted: no public authority and no host name, which
only says where a worker runs. A worker is identified by its *name* in the certificate:

    URI:urn:gradwire:worker:<name, percent-encoded>      valid for that worker
    URI:urn:gradwire:worker:*                            valid for every worker

Percent-encoding makes any name plain ASCII without separators, so that no name can be mistaken for another. After the TLS
handshake, gradwire's own handshake names the worker, and `check_identity` compares the two.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, ConfigurationError

__all__ = ["keys_for", "make_keys"]

ANY_WORKER = "*"
"""The name that stands for every worker; `make_keys` treats its default ``"worker"`` the same way."""

_URI_PREFIX = "urn:gradwire:worker:"
_SAFE_IN_FILES = " !#$&'()+,:;=@[]"


def make_keys(folder: str | Path, names: Iterable[str] = ("worker",), *, days: int = 365) -> None:
    """Write the keys of a cluster: ``ca.pem``, ``ca.key``, and ``<name>.pem`` and ``<name>.key`` for each name.

    An authority that already exists in the folder is reused, never overwritten: call this again to add workers or renew
    certificates. A machine needs ``ca.pem`` and the two files of its worker; keep ``ca.key`` where it is.

    Args:
        folder: Created with mode 0700 if it does not exist.
        names: Worker names. ``"worker"`` and ``"*"`` stand for every worker, in ``worker.pem`` and ``worker.key``.
        days: Validity of the certificates, limited by that of the authority. A new authority is valid for ten years or more.

    Raises:
        ConfigurationError: The folder is accessible to others, has an incomplete or expired authority, or is not writable.
    """
    wanted, base = list(names), Path(folder)
    if isinstance(names, str) or days < 1 or not all(map(_is_name, wanted)):
        raise ConfigurationError(
            f"make_keys needs a list of non-empty names and days of at least 1, not {names!r}, {days}"
        )
    from gradwire.transports import certificates  # imports the cryptography library, which most workers never need

    try:
        certificates.write_keys(base, {_uri_of(name): keys_for(base, name) for name in wanted}, days)
    except OSError as error:
        raise ConfigurationError(f"cannot write keys to {base}: {error}; choose a writable folder") from error


def make_request(folder: str | Path, name: str) -> tuple[TlsKeys, Path, str]:
    """Write a private key for a worker and a certificate request, on the machine where the worker will run.

    Args:
        folder: Created with mode 0700 if it does not exist.
        name: Name of the worker.

    Returns:
        The worker's files (the certificate does not exist yet), the request, and the fingerprint of the key.

    Raises:
        ConfigurationError: The folder is accessible to others, is not writable, or already has a key for that worker.
    """
    from gradwire.transports import certificates

    _check_name(name)
    files = keys_for(folder, name)
    request = files.certificate.with_suffix(".csr")
    try:
        return files, request, certificates.write_request(files, request)
    except FileExistsError as error:
        raise ConfigurationError(f"{files.key} already exists; remove it to make a new key") from error
    except OSError as error:
        raise ConfigurationError(f"cannot write keys to {folder}: {error}; choose a writable folder") from error


def sign_request(folder: str | Path, request: str | Path, name: str, *, days: int = 365) -> tuple[bytes, str]:
    """Sign a worker's certificate request with the authority that `make_keys` wrote to a folder.

    Args:
        folder: Folder with ``ca.pem`` and ``ca.key``.
        request: The file written by `make_request`. A name in it is ignored.
        name: Name of the worker the certificate is valid for, or ``"worker"`` or ``"*"`` for all.
        days: Validity of the certificate, limited by that of the authority.

    Returns:
        The certificate (PEM) and the fingerprint of its key.

    Raises:
        AuthenticationFailed: The request is not valid, or is for another kind of key.
        ConfigurationError: The folder has no authority, or a file cannot be read.
    """
    from gradwire.transports import certificates

    _check_name(name)
    try:
        content = Path(request).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {request}: {error.strerror}") from error
    return certificates.sign_request(Path(folder), content, _uri_of(name), days)


def keys_for(folder: str | Path, name: str = "worker") -> TlsKeys:
    """Return the files that `make_keys` writes for a worker; odd characters are percent-encoded in file names."""
    if name == ANY_WORKER:
        name = "worker"
    return TlsKeys.in_folder(folder, "%63a" if name == "ca" else quote(name, safe=_SAFE_IN_FILES))


def server_context(keys: TlsKeys) -> ssl.SSLContext:
    """Make the context of a listener: the peer must present a certificate of the cluster."""
    context = _make_context(ssl.PROTOCOL_TLS_SERVER, keys)
    context.num_tickets = 0  # no resumption: every connection presents its certificate
    return context


def client_context(keys: TlsKeys) -> ssl.SSLContext:
    """Make the context of a caller. Worker names are checked, not host names: see `certified_names`."""
    return _make_context(ssl.PROTOCOL_TLS_CLIENT, keys)


def certified_names(sock: ssl.SSLSocket) -> frozenset[str]:
    """Return the worker names that the peer's certificate is valid for; ``"*"`` stands for all."""
    try:
        certificate: dict[str, Any] = sock.getpeercert() or {}
        uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
        names = frozenset(names_of_uris(uris))
    except ValueError as error:
        raise AuthenticationFailed(f"the peer's certificate cannot be read: {error}") from error
    if not names:
        raise AuthenticationFailed(
            "the peer's certificate does not name a worker; create one with `gradwire keys init`"
        )
    return names


def check_identity(names: Iterable[str], worker_name: str) -> None:
    """Check that a certificate (`certified_names`) is valid for the name that the peer gave in the handshake."""
    allowed = frozenset(names)
    if ANY_WORKER not in allowed and worker_name not in allowed:
        raise AuthenticationFailed(
            f"worker {worker_name!r} presented a certificate for {sorted(allowed)}; start it with one for its "
            f"own name (`gradwire keys init FOLDER --name {worker_name}` in the folder with ca.key)"
        )


def uri_of_worker(name: str) -> str:
    """Return the URI that makes a certificate valid for exactly this worker, or for all with `ANY_WORKER`."""
    return _URI_PREFIX + (ANY_WORKER if name == ANY_WORKER else quote(name, safe=""))


def names_of_uris(uris: Iterable[str]) -> list[str]:
    """Return the worker names among the URIs of a certificate."""
    return [_name_of(uri) for uri in uris if uri.startswith(_URI_PREFIX)]


def _check_name(name: str) -> None:
    if not _is_name(name):
        raise ConfigurationError(f"a worker's name must be a non-empty string, not {name!r}")


def _is_name(name: str) -> bool:
    return bool(name) and name == name.encode("utf-8", "replace").decode()  # no halves of a surrogate pair


def _name_of(uri: str) -> str:
    return unquote(uri.removeprefix(_URI_PREFIX), errors="strict")


def _uri_of(name: str) -> str:
    return uri_of_worker(ANY_WORKER) if name in (ANY_WORKER, "worker") else uri_of_worker(name)


def _make_context(protocol: int, keys: TlsKeys) -> ssl.SSLContext:
    from gradwire.transports import certificates

    certificates.check_files(keys)
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(cafile=keys.ca)
        # Without a password argument, OpenSSL would prompt on the terminal for an encrypted key.
        context.load_cert_chain(keys.certificate, keys.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"OpenSSL does not accept {keys.certificate} and {keys.key}: {error}") from error
    return context
