"""A certificate authority for one server, and what it signs."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of a server: its authority's certificate, its own, and its key."""

    authority: Path
    certificate: Path
    key: Path


def make_certificates(folder: Path, names: list[str], addresses: list[str]) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests-kubernetes-ca")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
    begins, ends = datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(days=2)

    def builder(of: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(of).issuer_name(issuer).public_key(public)
        return made.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)

    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
    authority = (
        builder(issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    others = [x509.DNSName(name) for name in names] + [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
    certificate = (
        builder(subject, key.public_key())
        .add_extension(x509.SubjectAlternativeName(others), critical=False)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    files = Certificates(folder / "ca.crt", folder / "server.crt", folder / "server.key")
    pem = serialization.Encoding.PEM
    files.authority.write_bytes(authority.public_bytes(pem))
    files.certificate.write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    files.key.write_bytes(private)
    files.key.chmod(0o600)
    return files
