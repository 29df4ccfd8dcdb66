"""`gradwire keys`: files of keys and certificates, as people handle them."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from gradwire.cli.console import fail, say, say_error
from gradwire.errors import GradwireError
from gradwire.transports import tls

_SOON_DAYS = 30


def init_keys(folder: Path, names: Sequence[str], days: int) -> None:
    """Create an authority and keys, and print where to copy them."""
    had_authority = (folder / "ca.key").exists()
    tls.make_keys(folder, names, days=days)
    say(f"{'used' if had_authority else 'wrote'} {folder / 'ca.pem'} and ca.key: the authority")
    for name in names:
        files = tls.keys_for(folder, name)
        say(f"wrote {files.certificate} and {files.key.name}: {_good_for([_meaning(name)])}")
    say("Copy ca.pem and a worker's two files to its machine. ca.key stays here: with it, anyone can join the cluster.")


def request_certificate(folder: Path, name: str) -> None:
    """Create a key and a certificate request, and print how to have it signed."""
    files, request, fingerprint = tls.make_request(folder, name)
    say(f"wrote {files.key}: the private key, which stays here")
    say(f"wrote {request}: send it to the machine that has ca.key and sign it there:")
    say(f"  gradwire keys sign {request.name} --name {name} --keys FOLDER")
    say(f"Its fingerprint must be the same there: {fingerprint}")
    say(f"Then put the signed {files.certificate.name} and ca.pem into {folder}.")


def sign_certificate(folder: Path, request: Path, name: str, output: Path, days: int) -> None:
    """Sign a request and write the certificate."""
    certificate, fingerprint = tls.sign_request(folder, request, name, days=days)
    try:
        output.write_bytes(certificate)
    except OSError as error:
        fail(f"cannot write {output}: {error.strerror}")
    say(f"wrote {output}: {_good_for([_meaning(name)])}")
    say(f"fingerprint: {fingerprint}")
    say(f"Send it back with {folder / 'ca.pem'}.")


def show_certificates(paths: Sequence[Path]) -> int:
    """Print the contents of certificates; return 1 if one of them cannot be used, else 0."""
    from gradwire.transports.certificates import CertificateFacts, read_facts

    def show(path: Path, facts: CertificateFacts) -> None:
        good_for = "signing: the authority" if facts.is_authority else _good_for(tls.names_of_uris(facts.uris))
        left = (facts.end - datetime.datetime.now(datetime.timezone.utc)).days
        say(str(path), "bold red" if facts.problem else "bold")
        say(f"  good for     {good_for}")
        say(f"  valid until  {facts.end:%Y-%m-%d} ({left:,} days)", "yellow" if left < _SOON_DAYS else None)
        say(f"  key          {facts.fingerprint}")

    problems = []
    files = [file for path in paths for file in (sorted(path.glob("*.pem")) if path.is_dir() else [path])]
    for file in files:
        try:
            facts = read_facts(file, file.with_name("ca.pem"))
        except GradwireError as error:
            problems.append(str(error))
            continue
        show(file, facts)
        problems += [facts.problem] if facts.problem else []
    if not files:
        problems.append(
            f"no certificates (*.pem) in {', '.join(map(str, paths))}; create some with `gradwire keys init`"
        )
    for problem in problems:
        say_error(problem)
    return 1 if problems else 0


def make_secret(path: Path) -> None:
    """Write a secret for `Cluster.from_env`."""
    from gradwire.cluster.message_auth import SECRET_FILE, write_secret

    write_secret(path)
    say(f"wrote {path}: copy it to every machine with mode 0600, and set {SECRET_FILE}={path.absolute()} there")


def _meaning(name: str) -> str:
    return tls.ANY_WORKER if name == "worker" else name


def _good_for(names: Sequence[str]) -> str:
    if tls.ANY_WORKER in names:
        return "every worker"
    return f"worker {', '.join(names)}" if names else "nothing: it does not name a worker"
