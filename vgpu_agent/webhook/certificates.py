"""Certificates that the webhook makes for itself: that of a certificate authority (CA) of its own,
and that of its server, signed by the CA.

All functions are pure, except that keys are random. Signing takes milliseconds, so callers use a
thread. The only module with the library cryptography, whose errors become `CertificateError`.
"""

from __future__ import annotations

import datetime as dt
import os
import ssl
from typing import TYPE_CHECKING

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vgpu_agent.errors import CertificateError, shortened

if TYPE_CHECKING:
    from collections.abc import Sequence

# How many days an authority and a server's certificate are valid, and with how many days left they
# are replaced. A new authority must be written into the webhook configurations, and calls may
# fail until the API server has read them. A new certificate of the same authority needs no such
# change.
AUTHORITY_DAYS, AUTHORITY_LEFT_DAYS = 3650.0, 365.0
CERTIFICATE_DAYS, CERTIFICATE_LEFT_DAYS = 90.0, 30.0
_DAY_SECONDS = 86400.0
# The validity begins this long before now, since the clocks of the API server and of this machine
# may differ.
_EARLIER_SECONDS = 3600.0
# A certificate whose validity begins further ahead than this was made on a machine whose clock is
# too far ahead, so it cannot be used.
_SKEW_SECONDS = 300.0
# Authorities in a bundle (``caBundle`` of a webhook configuration) beside those in the Secret in
# which the replicas of the webhook share their certificate: each replica that starts may have made
# one.
_MOST_OTHERS = 3
_LONGEST_NAME = 64  # of a subject (RFC 5280)
_LONGEST_ERROR = 200  # characters
# The exceptions of the library for texts that others have written and it cannot use; those of x509
# have no common base class.
_UNUSABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


class ServerCertificate(msgspec.Struct, frozen=True):
    """A server's certificate with its authority, in PEM.

    Attributes:
        authorities: the certificate of the authority that has signed, then that of the previous
            authority, while it is valid.
        authority_key: the key of the first one.
        certificate: that of the server.
        key: that of the server.
    """

    authorities: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


def make(
    names: Sequence[str], now: float, before: ServerCertificate | None = None
) -> ServerCertificate:
    """Make a new certificate.

    Args:
        names: DNS names of the server, at least one.
        now: unix seconds.
        before: the certificate that it replaces. Its authority signs the new one if it is valid for
            long enough; otherwise a new authority does, and the previous one stays in the list.

    Raises:
        CertificateError: ``before`` cannot be read, or a name is invalid.
    """
    try:
        authorities = x509.load_pem_x509_certificates(before.authorities) if before else []
        if before and _days_left(authorities[0], now) > AUTHORITY_LEFT_DAYS:
            authority_key = _key_of(before.authority_key)
        else:
            authority_key = ec.generate_private_key(ec.SECP256R1())
            valid = [one for one in authorities[:1] if _days_left(one, now) > 0]
            authorities = [_authority(authority_key, names[0], now), *valid]
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = _certificate(key, names, now, authorities[0], authority_key)
    except _UNUSABLE as err:
        raise CertificateError(
            f"no certificate can be made: {shortened(str(err), _LONGEST_ERROR)}"
        ) from err
    return ServerCertificate(
        authorities=b"".join(map(_pem, authorities)),
        authority_key=_pem_of_key(authority_key),
        certificate=_pem(certificate),
        key=_pem_of_key(key),
    )


def problem(certified: ServerCertificate, names: Sequence[str], now: float) -> str:
    """Return why a certificate cannot be used by a server of these DNS names at ``now`` (unix
    seconds); empty if it can.
    """
    try:
        authorities = x509.load_pem_x509_certificates(certified.authorities)
        certificate = x509.load_pem_x509_certificate(certified.certificate)
        key, authority_key = _key_of(certified.key), _key_of(certified.authority_key)
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        certificate.verify_directly_issued_by(authorities[0])
        is_its_key = key.public_key() == certificate.public_key()
        is_authority_key = authority_key.public_key() == authorities[0].public_key()
    except _UNUSABLE as err:
        return f"it cannot be read: {shortened(str(err), _LONGEST_ERROR)}"
    except x509.ExtensionNotFound:
        return "it has no name"
    except InvalidSignature:
        return "its authority has not signed it"
    missing = set(names) - set(found.value.get_values_for_type(x509.DNSName))
    problems = (
        ("its key belongs to another certificate", not is_its_key),
        ("the key of its authority belongs to another authority", not is_authority_key),
        (f"it is not for {', '.join(sorted(missing))}", bool(missing)),
        ("it has expired", _days_left(certificate, now) <= 0),
        ("it is not valid yet", _begins_after(certificate, now)),
        ("its authority is not valid yet", _begins_after(authorities[0], now)),
    )
    return next((text for text, is_so in problems if is_so), "")


def is_due(certified: ServerCertificate, now: float) -> bool:
    """Tell whether a certificate that can be used should be replaced."""
    (authority, *_) = x509.load_pem_x509_certificates(certified.authorities)
    certificate = x509.load_pem_x509_certificate(certified.certificate)
    return (
        _days_left(authority, now) <= AUTHORITY_LEFT_DAYS
        or _days_left(certificate, now) <= CERTIFICATE_LEFT_DAYS
    )


def bundle_of(authorities: bytes, present: bytes, now: float) -> bytes:
    """Return the bundle that a webhook configuration should have: ``authorities``, followed by the
    others in ``present``, the bundle that it has now: the newest few of those that are still valid.
    If the present bundle cannot be read, it is dropped. All are in PEM.
    """
    first = x509.load_pem_x509_certificates(authorities)
    try:
        others = [
            one
            for one in x509.load_pem_x509_certificates(present)
            if one not in first and _days_left(one, now) > 0
        ]
    except _UNUSABLE:
        others = []
    others.sort(key=lambda one: one.not_valid_before_utc, reverse=True)
    return authorities + b"".join(map(_pem, others[:_MOST_OTHERS]))


def expires_at(certified: ServerCertificate) -> float:
    """Return the unix seconds at which a certificate that can be used expires."""
    certificate = x509.load_pem_x509_certificate(certified.certificate)
    return certificate.not_valid_after_utc.timestamp()


def context_of(certified: ServerCertificate) -> ssl.SSLContext:
    """Return the TLS context of a server. The key is in memory only, never on a disk.

    Raises:
        CertificateError: it cannot be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # the ssl module takes files only
    descriptor = os.memfd_create("certificate")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(certified.certificate + certified.key)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    except (OSError, ValueError) as err:  # ssl.SSLError is an OSError
        raise CertificateError(f"the certificate cannot be used: {err}") from err
    finally:
        os.close(descriptor)
    return context


def _authority(key: ec.EllipticCurvePrivateKey, name: str, now: float) -> x509.Certificate:
    # The date lets an operator tell two authorities apart.
    subject = _subject(f"{dt.datetime.fromtimestamp(now, dt.UTC):%Y-%m-%d} authority of {name}")
    public = key.public_key()
    return (
        _builder(subject=subject, issuer=subject, key=public, now=now, days=AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    names: Sequence[str],
    now: float,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    signer = authority_key.public_key()
    return (
        _builder(
            subject=_subject(names[0]),
            issuer=authority.subject,
            key=key.public_key(),
            now=now,
            days=CERTIFICATE_DAYS,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), critical=False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _builder(
    *,
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    now: float,
    days: float,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime.fromtimestamp(now - _EARLIER_SECONDS, dt.UTC))
        .not_valid_after(dt.datetime.fromtimestamp(now + days * _DAY_SECONDS, dt.UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, name[:_LONGEST_NAME])])


def _days_left(certificate: x509.Certificate, now: float) -> float:
    return (certificate.not_valid_after_utc.timestamp() - now) / _DAY_SECONDS


def _begins_after(certificate: x509.Certificate, now: float) -> bool:
    return certificate.not_valid_before_utc.timestamp() > now + _SKEW_SECONDS


def _key_of(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("its key is not on an elliptic curve")
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
