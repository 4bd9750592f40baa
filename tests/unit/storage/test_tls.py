"""Mirrors `vua.storage.bucket`: a server behind https, whose certificate is checked."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

import pytest

from buckets import seaweedfs, speaking_to
from helpers import DirectoryTest, kv_bits
from proxied import CHUNKS, CONFIG, KV, TOKENS
from proxy import FaultyProxy
from vua.core import VUA
from vua.errors import StorageError

pytest.importorskip("obstore")
pytest.importorskip("cryptography")


def certificate(folder: Path) -> Path:
    """Write a certificate of 127.0.0.1, signed by itself, and its key into one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "vua tests")])
    now = dt.datetime.now(dt.UTC)
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(hosts, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path = folder / "certificate.pem"
    path.write_bytes(made.public_bytes(pem) + secret)
    return path


class TlsTest(DirectoryTest):
    """A real server behind a proxy that speaks https; nothing allows http."""

    def setUp(self) -> None:
        super().setUp()
        self.pem = certificate(self.root)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.pem)
        self.proxy = FaultyProxy(seaweedfs().endpoint, tls=context)
        self.addCleanup(self.proxy.close)
        self.url = seaweedfs().place()

    def speak(self, **more: str) -> None:
        self.enterContext(speaking_to(self.proxy.endpoint, AWS_ALLOW_HTTP="false", **more))

    def found(self) -> int:
        """How many tokens of the prompt are found; they are right."""
        with VUA(CONFIG, self.url) as vua:
            found = vua.get_closest(TOKENS)
        self.assertEqual(kv_bits(KV, found.num_tokens) if found else [], kv_bits(found.data))
        return found.num_tokens

    @pytest.mark.thorough
    def test_stored_and_found(self) -> None:
        """With the certificate's authority in the environment."""
        self.speak(AWS_CA_BUNDLE=str(self.pem))
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(CHUNKS, vua.put(TOKENS, KV))
        asked: list[str] = []
        self.proxy.plan = lambda _, method, path: asked.append(f"{method} {path}") or ""
        self.assertEqual(len(TOKENS), self.found())
        bodies = [one for one in asked if one.startswith("GET") and ".safetensors" in one]
        described = 2  # entries whose headers tell the layout when the namespace is opened
        self.assertEqual(CHUNKS + described, len(bodies))

    @pytest.mark.thorough
    def test_unknown_certificate(self) -> None:
        """Nothing is sent to a server that nobody vouches for."""
        self.speak()
        with self.assertRaises(StorageError), VUA(CONFIG, self.url) as vua:
            vua.put(TOKENS, KV)
        self.assertEqual(0, sum(self.proxy.counts.values()))

    @pytest.mark.thorough
    def test_bodies_are_not_signed(self) -> None:
        """Unless the environment asks for it."""
        for more, unsigned in (({}, True), ({"AWS_UNSIGNED_PAYLOAD": "false"}, False)):
            self.url = seaweedfs().place()
            before = self.proxy.unsigned["PUT"]
            self.speak(AWS_CA_BUNDLE=str(self.pem), **more)
            with VUA(CONFIG, self.url) as vua:
                vua.put(TOKENS, KV)
            self.assertEqual(unsigned, self.proxy.unsigned["PUT"] - before >= CHUNKS, more)
