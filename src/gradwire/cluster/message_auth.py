"""Authentication of messages between the ranks of a run, for channels that others can write to, such as torch's store.

A rank shows that it belongs to the run by a secret that all ranks can read from a file, or by a certificate of the
cluster. What is proven is a *statement*: the message with the run, the round, the rank and the direction it is meant for
(see `gradwire.cluster.store_exchange`), so that nothing can be taken from one place and used in another.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from gradwire.config import TlsKeys
from gradwire.errors import AuthenticationFailed, ConfigurationError

if TYPE_CHECKING:
    from cryptography import x509

SECRET_FILE = "GRADWIRE_SECRET_FILE"
KEYS_FOLDER = "GRADWIRE_KEYS"

_SECRET_BYTES = 32
_MAX_SECRET_BYTES = 4096
_ANY_WORKER_URI = "urn:gradwire:worker:*"


class MessageAuth(Protocol):
    """Makes and checks proofs."""

    name: str  # for messages, and to distinguish a different kind of proof from a wrong secret

    def sign(self, statement: bytes) -> bytes:
        """Return a proof of a statement."""

    def verify(self, statement: bytes, proof: bytes) -> None:
        """Check a proof.

        Raises:
            AuthenticationFailed: The proof is not valid for the statement; the message says why, if that is known.
        """


class NoAuth:
    """For a channel that no one else can write to."""

    name = "no proof"

    def sign(self, statement: bytes) -> bytes:
        return b""

    def verify(self, statement: bytes, proof: bytes) -> None:
        return


class SharedSecret:
    """Proofs by HMAC-SHA256 with a secret that every rank has."""

    name = "a shared secret"

    def __init__(self, secret: bytes) -> None:
        # An attacker who sees proofs can try secrets offline, so a short one offers no protection.
        if len(secret) < _SECRET_BYTES:
            raise ConfigurationError(f"a shared secret must have at least {_SECRET_BYTES} bytes, not {len(secret)}")
        self._secret = secret

    def __repr__(self) -> str:
        return "<SharedSecret>"

    def sign(self, statement: bytes) -> bytes:
        return hmac.digest(self._secret, statement, hashlib.sha256)

    def verify(self, statement: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(self.sign(statement), proof):
            raise AuthenticationFailed(
                f"it was signed with another secret, or altered in transit; give every rank the same {SECRET_FILE}"
            )


class _Signature(msgspec.Struct, frozen=True, array_like=True):
    certificate: bytes  # PEM
    signature: bytes


class CertificateAuth:
    """Proofs by ECDSA with a key whose certificate is valid for every worker of the cluster."""

    name = "certificates"

    def __init__(self, keys: TlsKeys) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        from gradwire.transports.certificates import check_files

        check_files(keys)
        self._certificate = keys.certificate.read_bytes()
        key = serialization.load_pem_private_key(keys.key.read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)  # check_files has seen to it
        self._key = key
        self._authorities = x509.load_pem_x509_certificates(keys.ca.read_bytes())
        self._decoder = msgspec.msgpack.Decoder(_Signature)
        if not _is_for_every_worker(x509.load_pem_x509_certificate(self._certificate)):
            raise ConfigurationError(
                f"{keys.certificate} is for one worker; Cluster.from_env assigns names itself and needs worker.pem, as "
                "written by `gradwire keys init` without --name"
            )

    def __repr__(self) -> str:
        return "<CertificateAuth>"

    def sign(self, statement: bytes) -> bytes:
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        return msgspec.msgpack.encode(
            _Signature(self._certificate, self._key.sign(statement, ec.ECDSA(hashes.SHA256())))
        )

    def verify(self, statement: bytes, proof: bytes) -> None:
        from cryptography import x509
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        try:
            signature = self._decoder.decode(proof)
            certificate = x509.load_pem_x509_certificate(signature.certificate)
            key = certificate.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise ValueError("the certificate is not for an elliptic-curve key")
            self._check_certificate(certificate)
            key.verify(signature.signature, statement, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature as error:
            raise AuthenticationFailed("its signature is not valid: the message was altered in transit") from error
        except (msgspec.MsgspecError, ValueError, UnsupportedAlgorithm) as error:
            raise AuthenticationFailed(f"its proof is not valid: {error}") from error

    def _check_certificate(self, certificate: x509.Certificate) -> None:
        from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

        for authority in self._authorities:
            try:
                certificate.verify_directly_issued_by(authority)
                break
            except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
                continue
        else:
            raise ValueError(
                "its certificate was signed by another authority; take all keys from one folder of `gradwire keys init`"
            )
        now = datetime.datetime.now(datetime.timezone.utc)
        if not certificate.not_valid_before_utc <= now <= certificate.not_valid_after_utc:
            raise ValueError(
                f"its certificate is valid only from {certificate.not_valid_before_utc} to "
                f"{certificate.not_valid_after_utc}; check the clocks, or renew it with `gradwire keys init`"
            )
        if not _is_for_every_worker(certificate):
            raise ValueError("its certificate is for one worker, not for all (worker.pem)")


def _is_for_every_worker(certificate: x509.Certificate) -> bool:
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    return _ANY_WORKER_URI in names.get_values_for_type(x509.UniformResourceIdentifier)


def write_secret(path: str | Path) -> Path:
    """Write a new shared secret to a file that its owner alone can read.

    Raises:
        ConfigurationError: The file exists, or cannot be written.
    """
    file = Path(path)
    try:
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(f"{secrets.token_hex(_SECRET_BYTES)}\n")
    except FileExistsError as error:
        raise ConfigurationError(f"{file} already exists; remove it first, or choose another file") from error
    except OSError as error:
        raise ConfigurationError(f"cannot write a secret to {file}: {error.strerror}") from error
    return file


def read_secret(path: str | Path) -> SharedSecret:
    """Read a shared secret from a file.

    Raises:
        ConfigurationError: It cannot be read, or others than its owner can.
    """
    file = Path(path)
    try:
        with open(file, "rb") as opened:
            status = os.fstat(opened.fileno())  # of what is read, not of what may take its place
            content = opened.read(_MAX_SECRET_BYTES).strip()
    except OSError as error:
        raise ConfigurationError(f"cannot read the secret {file} ({SECRET_FILE}): {error.strerror}") from error
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        step = f"run `chmod 600 {file}`" if status.st_uid == os.geteuid() else "copy it to a file of your own"
        raise ConfigurationError(
            f"{file} ({SECRET_FILE}) must belong to the current user and not be accessible to others (mode {mode:o}); {step}"
        )
    if len(content) < _SECRET_BYTES:
        raise ConfigurationError(
            f"{file} ({SECRET_FILE}) has {len(content)} bytes, but a secret needs {_SECRET_BYTES}; remove it "
            f"and run `gradwire keys secret {file}`"
        )
    return SharedSecret(content)
