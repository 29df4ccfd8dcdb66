"""Who may join: the cluster's keys, TLS 1.3 on both sides, and the worker names a certificate is good for.

`make_keys` writes a certificate authority for one cluster and, signed by it, a certificate for each worker (or one for
all of them). Both ends of a connection show theirs; nothing else is trusted, no public authority and no host name. A
host name says where a worker runs, and workers move; what counts is the worker's *name*, which the certificate carries:

    URI:urn:gradwire:worker:<name, percent-encoded>      good for that worker
    URI:urn:gradwire:worker:*                            good for every worker

Percent-encoding makes any name plain ASCII without separators, so that no name can pass for another one. After the
TLS handshake the connection's own handshake names the worker; `check_identity` compares the two.
"""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, ConfigurationError

ANY_WORKER = "*"
"""The name that stands for every worker; `make_keys` reads its default ``"worker"`` the same way."""

_URI_PREFIX = "urn:gradwire:worker:"
_SAFE_IN_FILES = " !#$&'()+,:;=@[]"
_CA_DAYS = 3650
_CLOCK_SKEW = datetime.timedelta(minutes=10)  # how far the clocks of two machines may be apart right after make_keys


class _Identity(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_keys(folder: str | Path, names: Iterable[str] = ("worker",), *, days: int = 365) -> None:
    """Write the keys of a cluster: ``ca.pem``, ``ca.key``, and ``<name>.pem`` and ``<name>.key`` for each name.

    An authority that is in the folder already is used again, never overwritten: that is how workers are added and
    certificates renewed. Machines need ``ca.pem`` and their own worker's two files; ``ca.key`` stays where it is.

    Args:
        folder: Made with mode 0700 if it does not exist.
        names: Worker names. ``"worker"`` and ``"*"`` stand for every worker, in ``worker.pem`` and ``worker.key``.
        days: How long the certificates are valid, as far as the authority is. A new one lasts ten years or longer.

    Raises:
        ConfigurationError: The folder is open to others, holds half of an authority or an expired one, or cannot be
            written.
    """
    wanted, base = list(names), Path(folder)
    if isinstance(names, str) or days < 1 or not all(map(_is_name, wanted)):
        raise ConfigurationError(f"make_keys needs a list of names, none empty, and days from 1, not {names!r}, {days}")
    try:
        _make_folder(base)
        authority = _load_authority(base) or _make_authority(base, days)
        for name in wanted:
            _write_identity(keys_for(base, name), _issue(authority, name, days), may_replace=True)
    except OSError as error:
        raise ConfigurationError(f"cannot write keys to {base}: {error}; name a folder that can be written") from error


def keys_for(folder: str | Path, name: str = "worker") -> TlsKeys:
    """The files that `make_keys` writes for a worker of any name; odd characters are percent-encoded in file names."""
    if name == ANY_WORKER:
        name = "worker"
    return TlsKeys.in_folder(folder, "%63a" if name == "ca" else quote(name, safe=_SAFE_IN_FILES))


def server_context(keys: TlsKeys) -> ssl.SSLContext:
    """TLS 1.3 for a listener: the other side must show a certificate of the cluster.

    Raises:
        ConfigurationError: A file is missing, open to others, expired, or does not belong to the others.
    """
    context = _make_context(ssl.PROTOCOL_TLS_SERVER, keys)
    context.num_tickets = 0  # no resumption: every connection shows its certificate
    return context


def client_context(keys: TlsKeys) -> ssl.SSLContext:
    """TLS 1.3 for a caller. Host names are not compared, worker names are: see `certified_names`.

    Raises:
        ConfigurationError: A file is missing, open to others, expired, or does not belong to the others.
    """
    return _make_context(ssl.PROTOCOL_TLS_CLIENT, keys)


def certified_names(sock: ssl.SSLSocket) -> frozenset[str]:
    """The worker names that the other side's certificate is good for; ``"*"`` among them means all.

    Raises:
        AuthenticationFailed: The handshake is not over, or the certificate is not one that `make_keys` wrote.
    """
    try:
        certificate: dict[str, Any] = sock.getpeercert() or {}
        uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
        names = frozenset(_name_of(uri) for uri in uris if uri.startswith(_URI_PREFIX))
    except ValueError as error:
        raise AuthenticationFailed(f"the other side's certificate cannot be read: {error}") from error
    if not names:
        raise AuthenticationFailed("the other side's certificate names no worker; make it with `make_keys`")
    return names


def check_identity(names: Iterable[str], worker_name: str) -> None:
    """Compare what a certificate is good for (`certified_names`) with the worker that its owner says it is.

    Raises:
        AuthenticationFailed: It is for other workers.
    """
    allowed = frozenset(names)
    if ANY_WORKER not in allowed and worker_name not in allowed:
        raise AuthenticationFailed(
            f"worker {worker_name!r} showed a certificate for {sorted(allowed)}; `make_keys` writes one for its name"
        )


def _is_name(name: str) -> bool:
    return bool(name) and name == name.encode("utf-8", "replace").decode()  # no halves of a surrogate pair


def _name_of(uri: str) -> str:
    return unquote(uri.removeprefix(_URI_PREFIX), errors="strict")


def _uri_of(name: str) -> str:
    return _URI_PREFIX + (ANY_WORKER if name in (ANY_WORKER, "worker") else quote(name, safe=""))


# Making keys


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:  # not changed silently: it may be somebody's home
        raise ConfigurationError(f"{folder} is open to others (mode {mode:o}); `chmod 700` it or name a new folder")


def _load_authority(folder: Path) -> _Identity | None:
    """The authority in a folder, or None if there is none."""
    certificate_file, key_file = folder / "ca.pem", folder / "ca.key"
    if not certificate_file.exists() and not key_file.exists():
        return None
    if not certificate_file.exists() or not key_file.exists():
        raise ConfigurationError(f"{folder} holds one of ca.pem and ca.key; bring the other, or use a new folder")
    certificate, key = _read_certificates(certificate_file)[0], _read_key(key_file)
    _check_pair(certificate, certificate_file, key, key_file)
    _check_time(certificate, certificate_file, "make keys in a new folder")
    return _Identity(certificate, key)


def _make_authority(folder: Path, days: int) -> _Identity:
    key = ec.generate_private_key(ec.SECP256R1())
    # A name of its own for each authority, or a certificate of another one fails with a puzzling signature error.
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gradwire cluster {secrets.token_hex(8)}")])
    end = _now() + datetime.timedelta(days=max(days, _CA_DAYS))
    builder = _certificate_builder(name, key, end).issuer_name(name)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(is_authority=True), critical=True)
    authority = _Identity(builder.sign(key, hashes.SHA256()), key)
    _write_identity(TlsKeys.in_folder(folder, "ca"), authority, may_replace=False)
    return authority


def _issue(authority: _Identity, name: str, days: int) -> _Identity:
    """A certificate for a worker, for both ends of a connection: workers call and are called."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gradwire worker")])  # the name is in the URI
    end = min(_now() + datetime.timedelta(days=days), authority.certificate.not_valid_after_utc)
    builder = _certificate_builder(subject, key, end).issuer_name(authority.certificate.subject)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    both_ends = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
    uri = x509.UniformResourceIdentifier(_uri_of(name))
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(is_authority=False), critical=True)
    builder = builder.add_extension(both_ends, critical=False)
    builder = builder.add_extension(issuer, critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    return _Identity(builder.sign(authority.key, hashes.SHA256()), key)


def _certificate_builder(
    subject: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime.datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(subject_name=subject, public_key=key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_now() - _CLOCK_SKEW).not_valid_after(end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)


def _key_usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_identity(files: TlsKeys, identity: _Identity, *, may_replace: bool) -> None:
    pem = serialization.Encoding.PEM
    secret = identity.key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write_file(files.key, secret, 0o600, may_replace)
    _write_file(files.certificate, identity.certificate.public_bytes(pem), 0o644, may_replace)


def _write_file(path: Path, content: bytes, mode: int, may_replace: bool) -> None:
    """Write a file in one step; a secret is never readable by others, not even for a moment."""
    draft = path.with_name(f".{secrets.token_hex(8)}.draft")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        if may_replace:
            draft.replace(path)
        else:
            os.link(draft, path)  # fails where another process was faster
    finally:
        draft.unlink(missing_ok=True)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)


# Reading keys


def _make_context(protocol: int, keys: TlsKeys) -> ssl.SSLContext:
    _check_files(keys)
    context = ssl.SSLContext(protocol)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        context.load_verify_locations(cafile=keys.ca)
        # The empty password: without one, OpenSSL would ask at the terminal for that of an encrypted key.
        context.load_cert_chain(keys.certificate, keys.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"OpenSSL does not accept {keys.certificate} and {keys.key}: {error}") from error
    return context


def _check_files(keys: TlsKeys) -> None:
    """Find out here, with names of files, what would otherwise be an unclear failure of every handshake."""
    authorities = _read_certificates(keys.ca)
    certificate, key = _read_certificates(keys.certificate)[0], _read_key(keys.key)
    _check_pair(certificate, keys.certificate, key, keys.key)
    issuer = next((authority for authority in authorities if _is_issued_by(certificate, authority)), None)
    if issuer is None:
        raise ConfigurationError(
            f"{keys.certificate} was not signed by {keys.ca}; take both from one `make_keys` folder"
        )
    _check_time(certificate, keys.certificate, "run `make_keys` again with the same folder to renew it")
    _check_time(issuer, keys.ca, "make keys in a new folder")


def _check_time(certificate: x509.Certificate, path: Path, next_step: str) -> None:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if _now() > end:
        raise ConfigurationError(f"{path} expired at {end}; {next_step}")
    if _now() < start:
        raise ConfigurationError(f"{path} is not valid before {start}; check this machine's clock")


def _is_issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_pair(
    certificate: x509.Certificate, certificate_file: Path, key: ec.EllipticCurvePrivateKey, key_file: Path
) -> None:
    if certificate.public_key() != key.public_key():
        raise ConfigurationError(f"{key_file} is not the key of {certificate_file}; take both from one `make_keys` run")


def _read_certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read_file(path))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a certificate in PEM format: {error}") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    content = _read_file(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigurationError(f"{path} can be read by others (mode {mode:o}); `chmod 600 {path}`")
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        raise ConfigurationError(f"{path} is not an unencrypted private key in PEM format: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{path} is not an elliptic-curve key; make one with `make_keys`")
    return key


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}; `make_keys` writes it") from error
