"""Certificates and private keys: writing those of a cluster, signing requests of processes, checking a worker's files.

`gradwire.transports.tls` says what they mean. The keys of a cluster whose processes a scheduler started are never written:

    process  ProcessKey  -- certificate request -->             Authority  driver
                         <-- certificate, sealed settings ---

Both hold their private keys in memory alone.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, ConfigurationError

_CA_DAYS = 3650
_RUN_DAYS = 365  # for certificates that end with the cluster
_CURVE = ec.SECP256R1
_POINT_BYTES = 65  # of an uncompressed point on that curve
_NONCE = bytes(12)  # each sealing has a key of its own, so the nonce need not differ
_SEAL = b"gradwire sealed for the key of a certificate request"
_CLOCK_SKEW = datetime.timedelta(minutes=10)  # how far the clocks of two machines may be apart right after make_keys


class _Identity(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


# Making keys, as files


def write_keys(folder: Path, wanted: Mapping[str, TlsKeys], days: int) -> None:
    """Write a certificate and a key for each URI, and those of the authority if it is new.

    Args:
        folder: Folder of the authority.
        wanted: Files to write, by the URI that the certificate is valid for.
        days: Validity of the certificates, limited by that of the authority.
    """
    _make_folder(folder)
    authority = _load_authority(folder) or _make_authority(folder, days)
    for uri, files in wanted.items():
        _write_identity(files, _issue(authority, uri, days), may_replace=True)


def write_request(files: TlsKeys, request: Path) -> str:
    """Write a new private key, and a certificate request for it; return the fingerprint of the key."""
    _make_folder(request.parent)
    key = ec.generate_private_key(_CURVE())
    _write_file(files.key, _key_as_pem(key), 0o600, may_replace=False)
    _write_file(request, _request_for(key), 0o644, may_replace=True)
    return _fingerprint_of_key(key.public_key())


def sign_request(folder: Path, request: bytes, uri: str, days: int) -> tuple[bytes, str]:
    """Sign a request with the authority in a folder; return the certificate (PEM) and the fingerprint of its key.

    Raises:
        AuthenticationFailed: The request is not one, is not signed with its own key, or its key is of another kind.
        ConfigurationError: The folder holds no authority, half of one, or an expired one.
    """
    authority = _load_authority(folder)
    if authority is None:
        raise ConfigurationError(
            f"{folder} has no certificate authority (ca.pem and ca.key); create one with `gradwire keys init`"
        )
    key = _read_request(request)
    return _as_pem(_certify(authority, key, uri, days)), _fingerprint_of_key(key)


def _make_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & 0o077:  # not changed silently: it may be a home folder
        raise ConfigurationError(
            f"{folder} is accessible to other users (mode {mode:o}); run `chmod 700 {folder}` or use a new folder"
        )


def _load_authority(folder: Path) -> _Identity | None:
    """Return the authority in a folder, or None if there is none."""
    certificate_file, key_file = folder / "ca.pem", folder / "ca.key"
    if not certificate_file.exists() and not key_file.exists():
        return None
    if not certificate_file.exists() or not key_file.exists():
        raise ConfigurationError(f"{folder} has only one of ca.pem and ca.key; add the other, or use a new folder")
    certificate, key = _read_certificates(certificate_file)[0], _read_key(key_file)
    _check_pair(certificate, certificate_file, key, key_file)
    _check_time(certificate, certificate_file, "make new keys in an empty folder")
    return _Identity(certificate, key)


def _make_authority(folder: Path, days: int) -> _Identity:
    authority = _new_authority(max(days, _CA_DAYS))
    _write_identity(TlsKeys.in_folder(folder, "ca"), authority, may_replace=False)
    return authority


def _new_authority(days: int) -> _Identity:
    key = ec.generate_private_key(_CURVE())
    # Each authority has a unique name; otherwise a certificate of another one would fail with a confusing signature error.
    name = _subject(f"gradwire cluster {secrets.token_hex(8)}")
    end = _now() + datetime.timedelta(days=days)
    return _Identity(_sign(key.public_key(), name, end, key, name, is_authority=True), key)


def _issue(authority: _Identity, uri: str, days: int) -> _Identity:
    key = ec.generate_private_key(_CURVE())
    return _Identity(_certify(authority, key.public_key(), uri, days), key)


def _certify(authority: _Identity, key: ec.EllipticCurvePublicKey, uri: str, days: int) -> x509.Certificate:
    """Sign a certificate for a worker, for both ends of a connection: workers call and are called."""
    return _sign(
        key,
        _subject("gradwire worker"),  # its name is in the URI
        min(_now() + datetime.timedelta(days=days), authority.certificate.not_valid_after_utc),
        authority.key,
        authority.certificate.subject,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()),
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]),
        is_authority=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _sign(
    key: ec.EllipticCurvePublicKey,
    subject: x509.Name,
    end: datetime.datetime,
    issuer_key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    *extensions: x509.ExtensionType,
    is_authority: bool,
) -> x509.Certificate:
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
    builder = x509.CertificateBuilder(issuer, subject, key)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(_now() - _CLOCK_SKEW).not_valid_after(end)
    for critical in (x509.BasicConstraints(is_authority, 0 if is_authority else None), usage):
        builder = builder.add_extension(critical, critical=True)
    for extension in (x509.SubjectKeyIdentifier.from_public_key(key), *extensions):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _write_identity(files: TlsKeys, identity: _Identity, *, may_replace: bool) -> None:
    _write_file(files.key, _key_as_pem(identity.key), 0o600, may_replace)
    _write_file(files.certificate, _as_pem(identity.certificate), 0o644, may_replace)


def _key_as_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)


def _request_for(key: ec.EllipticCurvePrivateKey) -> bytes:
    request = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(key, hashes.SHA256())
    return request.public_bytes(serialization.Encoding.PEM)


def _fingerprint_of_key(key: ec.EllipticCurvePublicKey) -> str:
    """Return the fingerprint of a key, for comparing it by eye: its SHA-256 in base64, as in ssh."""
    digest = hashes.Hash(hashes.SHA256())
    digest.update(key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))
    return "SHA256:" + base64.b64encode(digest.finalize()).decode().rstrip("=")


def _as_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


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


# Keys in memory


class ProcessKey:
    """The private key of one process. It leaves the process in no form, and is not written to a disk."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(_CURVE())

    def __repr__(self) -> str:
        return "<ProcessKey>"

    def __reduce__(self) -> str:
        raise TypeError("a private key must not leave its process; send `request()` instead")

    def request(self) -> bytes:
        """Return a certificate request (PEM) without a name: the authority decides what the certificate is valid for."""
        return _request_for(self._key)

    def open(self, sealed: bytes, context: bytes) -> bytes:
        """Decrypt a secret that `seal` has sealed for this key.

        Raises:
            AuthenticationFailed: It was sealed for another key or context, or altered in transit.
        """
        try:
            point = ec.EllipticCurvePublicKey.from_encoded_point(_CURVE(), sealed[:_POINT_BYTES])
            shared = self._key.exchange(ec.ECDH(), point)
            cipher = _cipher(shared, sealed[:_POINT_BYTES], _encode_point(self._key.public_key()))
            return cipher.decrypt(_NONCE, sealed[_POINT_BYTES:], context)
        except (ValueError, InvalidTag) as error:
            raise AuthenticationFailed("the driver's message was not sealed for this process's key") from error

    @contextlib.contextmanager
    def files(self, certificate: bytes, authority: bytes) -> Iterator[TlsKeys]:
        """Keep this key and its certificate (PEM) in anonymous memory files inside the block.

        OpenSSL only reads files. TLS contexts made inside the block can be used after it.
        """
        contents = {"ca": authority, "certificate": certificate, "key": _key_as_pem(self._key)}
        with contextlib.ExitStack() as stack:
            paths = {name: stack.enter_context(_memory_file(name, content)) for name, content in contents.items()}
            yield TlsKeys(**paths)


class Authority:
    """The authority of one cluster. Its private key exists only in the memory of this process.

    Attributes:
        certificate: Its own certificate, as PEM.
    """

    def __init__(self) -> None:
        self._identity = _new_authority(_RUN_DAYS)
        self.certificate = _as_pem(self._identity.certificate)

    def __repr__(self) -> str:
        return "<Authority>"

    def __reduce__(self) -> str:
        raise TypeError("a private key must not leave its process")

    def sign(self, request: bytes, uri: str) -> bytes:
        """Return a certificate (PEM) for the key of a request, valid only for `uri`; other requested attributes are ignored.

        Raises:
            AuthenticationFailed: The request is malformed, not signed with its own key, or for another kind of key.
        """
        return _as_pem(_certify(self._identity, _read_request(request), uri, _RUN_DAYS))


def seal(secret: bytes, request: bytes, context: bytes) -> bytes:
    """Encrypt a secret for the key of a certificate request; `ProcessKey.open` needs the same `context`.

    The result is an ephemeral public key and the secret under AES-256-GCM, with a key derived by ECDH and HKDF. It does not
    authenticate the sender.
    """
    to = _read_request(request)
    fresh = ec.generate_private_key(_CURVE())
    point = _encode_point(fresh.public_key())
    cipher = _cipher(fresh.exchange(ec.ECDH(), to), point, _encode_point(to))
    return point + cipher.encrypt(_NONCE, secret, context)


def _cipher(shared: bytes, sender: bytes, receiver: bytes) -> AESGCM:
    return AESGCM(HKDF(hashes.SHA256(), 32, salt=None, info=_SEAL + sender + receiver).derive(shared))


def _encode_point(key: ec.EllipticCurvePublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.X962, serialization.PublicFormat.UncompressedPoint)


def _read_request(pem: bytes) -> ec.EllipticCurvePublicKey:
    """Return the key of a request, whose owner has signed it; names and extensions are not looked at."""
    try:
        request = x509.load_pem_x509_csr(pem)
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, UnsupportedAlgorithm) as error:
        raise AuthenticationFailed(f"not a certificate request in PEM format: {error}") from error
    if not is_signed:
        raise AuthenticationFailed("a certificate request is not signed with its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVE):
        raise AuthenticationFailed(f"a certificate request must be for a {_CURVE.name} key")
    return key


@contextlib.contextmanager
def _memory_file(name: str, content: bytes) -> Iterator[Path]:
    descriptor = os.memfd_create(f"gradwire-{name}", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


# Reading keys


def check_files(keys: TlsKeys) -> None:
    """Check the files and raise a clear error for those that would make every handshake fail."""
    authorities = _read_certificates(keys.ca)
    certificate, key = _read_certificates(keys.certificate)[0], _read_key(keys.key)
    _check_pair(certificate, keys.certificate, key, keys.key)
    issuer = next((authority for authority in authorities if _is_issued_by(certificate, authority)), None)
    if issuer is None:
        raise ConfigurationError(
            f"{keys.certificate} was not signed by {keys.ca}; take both from one folder of `gradwire keys init`"
        )
    _check_time(
        certificate,
        keys.certificate,
        "renew it with `gradwire keys init` (with --name, if it is for one worker) in the folder with ca.key",
    )
    _check_time(issuer, keys.ca, "make new keys in an empty folder")


class CertificateFacts(NamedTuple):
    """Contents of a certificate.

    Attributes:
        uris: The URIs it is valid for; empty for an authority.
        is_authority: Whether it can sign others.
        begin: Start of its validity.
        end: End of its validity.
        fingerprint: Fingerprint of its key, the same as that of its request.
        problem: Why it cannot be used now, and what to do; None if it can.
    """

    uris: tuple[str, ...]
    is_authority: bool
    begin: datetime.datetime
    end: datetime.datetime
    fingerprint: str
    problem: str | None


def read_facts(path: Path, ca: Path) -> CertificateFacts:
    """Read a certificate, and check it against the clock and the authority in `ca`, if that file exists.

    Raises:
        ConfigurationError: The file cannot be read, or is not a certificate of an elliptic-curve key.
    """
    certificate = _read_certificates(path)[0]
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigurationError(
            f"{path} is not a certificate for an elliptic-curve key; create one with `gradwire keys init`"
        )
    problem = None
    try:
        _check_time(certificate, path, "renew it with `gradwire keys init` or `gradwire keys sign`")
        if ca.exists() and not any(_is_issued_by(certificate, authority) for authority in _read_certificates(ca)):
            problem = f"{path} was not signed by {ca}; take both from one folder"
    except ConfigurationError as error:
        problem = str(error)
    extensions = certificate.extensions
    return CertificateFacts(
        uris=_uris_of(extensions),
        is_authority=extensions.get_extension_for_class(x509.BasicConstraints).value.ca,
        begin=certificate.not_valid_before_utc,
        end=certificate.not_valid_after_utc,
        fingerprint=_fingerprint_of_key(key),
        problem=problem,
    )


def _uris_of(extensions: x509.Extensions) -> tuple[str, ...]:
    try:
        names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.UniformResourceIdentifier))


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
        raise ConfigurationError(
            f"{key_file} is not the key of {certificate_file}; take both from one folder of `gradwire keys init`"
        )


def _read_certificates(path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(_read_file(path))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not a certificate in PEM format: {error}") from error


def _read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    content = _read_file(path)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ConfigurationError(f"{path} is readable by other users (mode {mode:o}); run `chmod 600 {path}`")
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: it is encrypted
        raise ConfigurationError(f"{path} is not an unencrypted private key in PEM format: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{path} is not an elliptic-curve key; create one with `gradwire keys init`")
    return key


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}; create it with `gradwire keys init` (with --name, if "
            "it is for one worker)"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"cannot read {path}: {error.strerror}; it must be a file that this user can read"
        ) from error
