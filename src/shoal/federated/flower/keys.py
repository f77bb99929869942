"""Certificates and keys of a federation: who the server is, and which clients are let in.

    DIR/ca.crt, ca.key           what has signed the server's certificate
    DIR/server.crt, server.key   the server's, for the names and addresses that clients call it by
    DIR/clients/0.key, 0.pub     of each client: its private key, and the public one by which the server knows it

A server needs its own two files and clients/*.pub; a client ca.crt and its own key. Private keys are readable by their
owner alone.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import UserError
from shoal.federated.flower import private  # noqa: F401  # before what comes with flwr

from cryptography import x509  # isort: skip
from cryptography.hazmat.primitives import hashes, serialization  # isort: skip
from cryptography.hazmat.primitives.asymmetric import ec  # isort: skip
from cryptography.x509.oid import NameOID  # isort: skip

DAYS = 365
"""How long certificates are valid."""
WANTED = "give a name or an address by which clients call the server"


def make_keys(folder: Path, clients: int, hosts: Sequence[str]) -> None:
    """Writes keys for `clients` more clients into `folder`, and where it has none, certificates for a server that is
    called by `hosts`. Raises UserError where that cannot be."""
    names = [_name(host) for host in hosts]
    try:
        (folder / "clients").mkdir(parents=True, exist_ok=True)
        if not (folder / "server.crt").exists():
            _certify(folder, names)
        first = 1 + max(
            (int(each.stem) for each in (folder / "clients").glob("*.pub") if each.stem.isdigit()), default=-1
        )
        for number in range(first, first + clients):
            key = ec.generate_private_key(ec.SECP384R1())
            _write(folder / "clients" / f"{number}.key", _private(key))
            _write(folder / "clients" / f"{number}.pub", _public(key), 0o644)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}. Give another directory") from error


def _certify(folder: Path, names: Sequence[x509.GeneralName]) -> None:
    ca, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Shoal federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Shoal server")])
    ours = x509.BasicConstraints(ca=True, path_length=0)
    own = _builder(issuer, issuer, ca).add_extension(ours, critical=True)
    theirs = (
        _builder(issuer, subject, server)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.public_key()), critical=False)
    )
    pem = serialization.Encoding.PEM
    _write(folder / "ca.key", _private(ca))
    _write(folder / "ca.crt", own.sign(ca, hashes.SHA256()).public_bytes(pem), 0o644)
    _write(folder / "server.key", _private(server))
    _write(folder / "server.crt", theirs.sign(ca, hashes.SHA256()).public_bytes(pem), 0o644)


def _builder(issuer: x509.Name, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(host: str) -> x509.GeneralName:
    """A name of the server's certificate. Raises UserError for what is none."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        name = host.encode("idna").decode()
    except UnicodeError as error:
        raise UserError(f"--host {host:.100}: {WANTED} ({error})") from error
    if not name:
        raise UserError(f"--host: {WANTED}")
    return x509.DNSName(name)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(content)


def server_files(folder: Path) -> tuple[Path, Path, list[bytes]]:
    """Returns the files of the server's certificate and key, and the public keys of its clients, by number. Raises
    UserError where one is missing, a private key is not private, or the certificate is of another key or too old."""
    certificate, key = folder / "server.crt", folder / "server.key"
    _check_pair(certificate, key)
    public = sorted((folder / "clients").glob("*.pub"), key=lambda each: (len(each.stem), each.stem))
    if not public:
        raise UserError(f"{folder / 'clients'} has no public key (*.pub): no client could sign in. {REMEDY}")
    return certificate, key, [_canonical(each) for each in public]


def _check_pair(certificate: Path, key: Path) -> None:
    content = _read(certificate)
    private_bytes(key)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        until = x509.load_pem_x509_certificate(content).not_valid_after_utc
    except (ssl.SSLError, ValueError) as error:
        raise UserError(f"{certificate} is no certificate of {key}: {error}. {REMEDY}") from error
    if until < datetime.datetime.now(datetime.UTC):
        raise UserError(
            f"{certificate} was valid until {until:%Y-%m-%d}: have `shoal fed keys` make another directory, and give "
            "clients its keys"
        )


REMEDY = "`shoal fed keys DIR --clients N` makes all of them"


def _canonical(path: Path) -> bytes:
    try:
        key = serialization.load_pem_public_key(_read(path))
    except ValueError as error:
        raise UserError(f"{path} is no public key in PEM: {error}") from error
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{path} is no key of an elliptic curve, which Flower's clients sign with. {REMEDY}")
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def private_bytes(path: Path) -> bytes:
    """Returns a private key (PEM). Raises UserError where there is none, or where others may read it."""
    content = _read(path)
    if path.stat().st_mode & 0o077:
        raise UserError(f"{path} can be read by others: chmod 600 {path}")
    try:
        serialization.load_pem_private_key(content, None)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is no private key in PEM without a password: {error}") from error
    return content


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {REMEDY}") from error
