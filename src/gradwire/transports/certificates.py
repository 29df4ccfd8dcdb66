"""Certificates and private keys: writing those of a cluster, and checking the files of a worker.

`gradwire.transports.tls` says what they mean.
"""

from __future__ import annotations

import datetime
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradwire.config import TlsKeys
from gradwire.errors import ConfigurationError

_CA_DAYS = 3650
_CLOCK_SKEW = datetime.timedelta(minutes=10)  # how far the clocks of two machines may be apart right after make_keys


class _Identity(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


# Making keys


def write_keys(folder: Path, wanted: Mapping[str, TlsKeys], days: int) -> None:
    """Write a certificate and a key for each URI, and those of the authority that signs them, if it is new.

    Args:
        folder: Where the authority is.
        wanted: By the URI that a certificate is good for, where it goes.
        days: How long the certificates are valid, as far as the authority is.
    """
    _make_folder(folder)
    authority = _load_authority(folder) or _make_authority(folder, days)
    for uri, files in wanted.items():
        _write_identity(files, _issue(authority, uri, days), may_replace=True)


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:  # not changed silently: it may be a home folder
        raise ConfigurationError(f"{folder} is open to others (mode {mode:o}); `chmod 700` it or name a new folder")


def _load_authority(folder: Path) -> _Identity | None:
    """Return the authority in a folder, or None if there is none."""
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
    # A name of its own for each authority, or a certificate of another one fails with a puzzling signature error.
    end = _now() + datetime.timedelta(days=max(days, _CA_DAYS))
    authority = _sign(f"gradwire cluster {secrets.token_hex(8)}", end, None)
    _write_identity(TlsKeys.in_folder(folder, "ca"), authority, may_replace=False)
    return authority


def _issue(authority: _Identity, uri: str, days: int) -> _Identity:
    """Issue a certificate for a worker, for both ends of a connection: workers call and are called."""
    return _sign(
        "gradwire worker",  # its name is in the URI
        min(_now() + datetime.timedelta(days=days), authority.certificate.not_valid_after_utc),
        authority,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]),
    )


def _sign(
    subject: str, end: datetime.datetime, authority: _Identity | None, *extensions: x509.ExtensionType
) -> _Identity:
    """Make a key and its certificate, signed by the authority; without one, those of a new authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    is_authority = authority is None
    usage = x509.KeyUsage(
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
    builder = x509.CertificateBuilder(authority.certificate.subject if authority else name, name, key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_now() - _CLOCK_SKEW).not_valid_after(end)
    for critical in (x509.BasicConstraints(is_authority, 0 if is_authority else None), usage):
        builder = builder.add_extension(critical, critical=True)
    for extension in (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), *extensions):
        builder = builder.add_extension(extension, critical=False)
    return _Identity(builder.sign(authority.key if authority else key, hashes.SHA256()), key)


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


def check_files(keys: TlsKeys) -> None:
    """Refuse files that would fail every handshake for an unclear reason, and say which and why."""
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
