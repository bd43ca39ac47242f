"""Certificates of this machine that sign themselves."""

from __future__ import annotations

import datetime
import ipaddress
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_certificate(folder: Path, name: str, under: str | None = None) -> tuple[Path, Path]:
    """Write a new certificate of 127.0.0.1 and its key, as files that appear whole.

    Args:
        name: its common name.
        under: what the files are called; None: as `name`.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    hosts = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    files = folder / f"{under or name}.crt", folder / f"{under or name}.key"
    for file, content in zip(files, (made.public_bytes(serialization.Encoding.PEM), private), strict=True):
        beside = file.with_suffix(".new")
        beside.write_bytes(content)
        os.replace(beside, file)
    return files


def trusting(*certificates: Path, shown: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """Return the TLS of a client that trusts these certificates, and shows one of its own."""
    context = ssl.create_default_context()
    for certificate in certificates:
        context.load_verify_locations(certificate)
    if shown is not None:
        context.load_cert_chain(*shown)
    return context
