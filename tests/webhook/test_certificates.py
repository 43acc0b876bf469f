"""The certificates that the webhook makes for itself, as clients of other libraries see them."""

from __future__ import annotations

import ssl
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from vgpu_agent.errors import CertificateError
from vgpu_agent.webhook import certificates
from vgpu_agent.webhook.certificates import ServerCertificate

NAMES = ("hook.ns.svc", "hook.ns")
DAY = 86400.0
NOW = time.time()
FIRST = certificates.make(NAMES, NOW)
_BEGIN = b"-----BEGIN CERTIFICATE-----"


def connected(server: ssl.SSLContext, authorities: bytes, name: str) -> str:
    """Shake hands over memory; the client's error, empty where it trusts the server."""
    client = ssl.create_default_context(cadata=authorities.decode())
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as err:
                return err.verify_message
    assert one.version() == "TLSv1.3"
    return ""


def test_a_client_trusts_the_server_by_its_authority() -> None:
    """Under each of the names, and no other."""
    context = certificates.context_of(FIRST)
    assert [connected(context, FIRST.authorities, name) for name in NAMES] == ["", ""]
    assert "hostname" in connected(context, FIRST.authorities, "other.ns.svc").lower()
    stranger = certificates.make(NAMES, NOW)
    assert "unable to get" in connected(context, stranger.authorities, NAMES[0])


def test_a_new_certificate_is_trusted_by_those_who_know_the_authority() -> None:
    """So a renewal is no change for the API server."""
    later = NOW + 61 * DAY
    assert not certificates.is_due(FIRST, NOW + 59 * DAY)
    assert certificates.is_due(FIRST, later)
    second = certificates.make(NAMES, later, FIRST)
    assert second.authorities == FIRST.authorities
    assert second.certificate != FIRST.certificate
    assert certificates.expires_at(second) == pytest.approx(later + 90 * DAY, abs=2)
    assert certificates.problem(second, NAMES, later) == ""


def test_a_new_authority_is_followed_by_the_one_before() -> None:
    """Replicas that still serve the older certificate stay trusted."""
    old = certificates.make(NAMES, NOW - 9.2 * 365 * DAY)
    assert certificates.is_due(old, NOW)
    before = certificates.make(NAMES, NOW - 85 * DAY, old)  # of the old authority
    after = certificates.make(NAMES, NOW, before)
    assert after.authorities.count(_BEGIN) == 2
    assert after.authorities.endswith(old.authorities)
    for served in (before, after):
        assert connected(certificates.context_of(served), after.authorities, NAMES[0]) == ""


def test_an_authority_that_has_expired_is_forgotten() -> None:
    """It would only make the bundle longer."""
    old = certificates.make(NAMES, NOW - 11 * 365 * DAY)
    assert certificates.make(NAMES, NOW, old).authorities.count(_BEGIN) == 1


OTHER = certificates.make(NAMES, NOW)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"certificate": b""}, "it cannot be read: "),
        ({"authorities": b"x"}, "it cannot be read: "),
        ({"key": b"\0"}, "it cannot be read: "),
        ({"authority_key": b""}, "it cannot be read: "),
        ({"key": OTHER.key}, "its key belongs to another certificate"),
        (
            {"authority_key": OTHER.authority_key},
            "the key of its authority belongs to another authority",
        ),
        ({"authorities": OTHER.authorities}, "its authority has not signed it"),
        ({"certificate": OTHER.certificate}, "its authority has not signed it"),
    ],
)
def test_what_cannot_be_used_is_named(change: dict[str, bytes], problem: str) -> None:
    """Before a server fails with it; somebody may have edited the Secret."""
    found = certificates.problem(msgspec.structs.replace(FIRST, **change), NAMES, NOW)
    assert found.startswith(problem)
    assert bool(found) == bool(problem)


def test_names_and_times_are_checked() -> None:
    """A Service may be renamed, and a replica may have been off for a year."""
    assert certificates.problem(FIRST, ("new.ns.svc", *NAMES), NOW) == "it is not for new.ns.svc"
    assert certificates.problem(FIRST, NAMES, NOW + 91 * DAY) == "it has expired"


@pytest.mark.parametrize("hours", [2, 30 * 24])
def test_what_a_clock_that_is_ahead_has_made_is_not_used_yet(hours: int) -> None:
    """The API server would refuse it, and every replica would be ready."""
    ahead = NOW + hours * 3600
    made_ahead = certificates.make(NAMES, ahead)
    assert certificates.problem(made_ahead, NAMES, NOW) == "it is not valid yet"
    assert certificates.problem(made_ahead, NAMES, ahead) == ""
    renewed = certificates.make(NAMES, ahead, FIRST)  # the authority is good
    assert certificates.problem(renewed, NAMES, NOW) == "it is not valid yet"
    served = certificates.make(NAMES, NOW, made_ahead)  # the certificate is good
    assert certificates.problem(served, NAMES, NOW) == "its authority is not valid yet"


def test_clocks_may_differ_a_little() -> None:
    """Certificates begin an hour early; more than that and some minutes is a wrong clock."""
    assert certificates.problem(certificates.make(NAMES, NOW + 3600 + 240), NAMES, NOW) == ""


def der(tag: bytes, content: bytes) -> bytes:
    """A value of ASN.1."""
    size = len(content)
    length = bytes([size]) if size < 128 else b"\x82" + size.to_bytes(2, "big")
    return tag + length + content


def strange(before: bytes, after: bytes) -> bytes:
    """The first certificate with other bytes in it, and a right signature of its authority."""
    encoded = ssl.PEM_cert_to_DER_cert(FIRST.certificate.decode())
    begin = encoded[4:]  # without the outer head
    length = 4 + int.from_bytes(begin[2:4], "big")
    assert before in begin[:length]
    body = begin[:length].replace(before, after, 1)
    key = serialization.load_pem_private_key(FIRST.authority_key, None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    by_ecdsa = bytes.fromhex("300a06082a8648ce3d040302")
    signature = der(b"\x03", b"\0" + key.sign(body, ec.ECDSA(hashes.SHA256())))
    return ssl.DER_cert_to_PEM_cert(der(b"\x30", body + by_ecdsa + signature)).encode()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07"),  # no such version
        (b"\x55\x1d\x0e", b"\x55\x1d\x23"),  # the same extension twice
        (b"\x82\x0bhook.ns.svc", b"\xa3\x0bhook.ns.svc"),  # a name of X.400
        (bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030177")),  # no such curve
        (bytes.fromhex("2a8648ce3d0201"), bytes.fromhex("2a8648ce3d0277")),  # no such key
    ],
)
def test_a_strange_certificate_is_one_that_cannot_be_read(before: bytes, after: bytes) -> None:
    """The library has errors of several families; one that passes restarts the loop for ever."""
    assert (
        certificates.problem(
            msgspec.structs.replace(FIRST, certificate=strange(b"", b"")), NAMES, NOW
        )
        == ""
    )
    odd = strange(before, after)
    found = certificates.problem(msgspec.structs.replace(FIRST, certificate=odd), NAMES, NOW)
    assert found.startswith("it cannot be read: ")
    found = certificates.problem(msgspec.structs.replace(FIRST, authorities=odd), NAMES, NOW)
    assert found


def test_a_strange_authority_cannot_sign() -> None:
    """The error is ours, so that another authority is tried."""
    odd = strange(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x07")
    with pytest.raises(CertificateError, match="no certificate can be made"):
        certificates.make(NAMES, NOW, msgspec.structs.replace(FIRST, authorities=odd))


def test_what_cannot_be_made_is_one_error() -> None:
    """Callers catch `CertificateError` alone, whatever is wrong with the names or the texts."""
    with pytest.raises(CertificateError, match="no certificate can be made"):
        certificates.make(("später.svc",), NOW)
    with pytest.raises(CertificateError, match="no certificate can be made"):
        certificates.make(NAMES, NOW, ServerCertificate(b"", b"", b"", b""))
    with pytest.raises(CertificateError, match="cannot be used"):
        certificates.context_of(msgspec.structs.replace(FIRST, key=OTHER.key))


def test_openssl_agrees(tmp_path: Path) -> None:
    """An independent reader: the chain is right, and the extensions are what they should be."""
    authorities, certificate = tmp_path / "ca.pem", tmp_path / "crt.pem"
    authorities.write_bytes(FIRST.authorities)
    certificate.write_bytes(FIRST.certificate)
    command = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile"]
    done = subprocess.run([*command, authorities, certificate], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
