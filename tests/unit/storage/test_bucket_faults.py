"""Mirrors `vua.storage.bucket`: what a server does wrong costs hits and bounded time."""

from __future__ import annotations

import datetime as dt
import ipaddress
import logging
import ssl
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch

from buckets import moto, seaweedfs, speaking_to
from commands import run, run_json
from helpers import DirectoryTest, caches_of, kv_bits
from proxy import HARMS, REFUSALS, FaultyProxy
from vua.core import VUA, VUAConfig
from vua.errors import StorageError
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath
from vua.storage.mark import is_marked

pytest.importorskip("obstore")
pytest.importorskip("cryptography")
pytestmark = pytest.mark.thorough

SAID = {
    **dict.fromkeys(("wrong region", "redirected"), "AWS_REGION"),
    "expired": "AWS_SESSION_TOKEN",
    "clock": "the clock of this machine",
    "no bucket": "no such bucket",
}
"""What an operator reads."""
BOUND_S = 60.0
"""Far more than the 4 s of trying again, since a test may run on a slow machine."""
CHUNKS: Final = 8
CONFIG: Final = VUAConfig(split_factor=16, model="tiny")
TOKENS: Final = torch.arange(16 * CHUNKS)
KV: Final = caches_of(layers=2, heads=2, tokens=16 * CHUNKS, dim=64, seed=1)


class ProxiedTest(DirectoryTest):
    """The prompt was stored without harm."""

    def setUp(self) -> None:
        super().setUp()
        self.proxy = FaultyProxy(seaweedfs().endpoint)
        self.addCleanup(self.proxy.close)
        self.enterContext(speaking_to(self.proxy.endpoint))
        self.url = seaweedfs().place()
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(CHUNKS, vua.put(TOKENS, KV))

    def found_by(self, vua: VUA) -> int:
        """How many tokens of the prompt are found; they are right."""
        found = vua.get_closest(TOKENS)
        tokens = found.num_tokens
        self.assertEqual(kv_bits(KV, tokens) if tokens else [], kv_bits(found.data))
        return tokens


class FaultTest(ProxiedTest):
    """A bucket of a real server behind a proxy, with a prompt in it."""

    def found(self, vua: VUA) -> int:
        """How many tokens of the prompt are found in bounded time; they are right."""
        began_s = time.monotonic()
        tokens = self.found_by(vua)
        self.assertLess(time.monotonic() - began_s, BOUND_S)
        return tokens

    def go_on(self) -> None:
        """Do no more harm, and do not wait until the breaker finds that out."""
        self.proxy.plan = lambda *_: ""
        Bucket.at(self.url).breaker.went(well=True)

    def write(self, harm: str, write: Callable[[], object]) -> str:
        """Try a write that has to be refused, unless it has happened; return what the error says.

        Of an answer that is cut a client may have heard enough: nothing follows its headers.
        """
        try:
            write()
        except StorageError as problem:
            return str(problem)
        self.assertIn(harm, ("reset", "truncated"))
        return ""

    def check(self, harm: str) -> None:
        """Harm every answer: a miss, a refused write, and afterwards everything as before."""
        other = TOKENS + 1000
        with VUA(CONFIG, self.url) as vua, self.assertLogs("vua", logging.DEBUG) as said:
            self.assertEqual(0, vua.put(TOKENS, KV))
            self.proxy.plan = lambda *_: harm
            self.assertEqual(0, self.found(vua))
            self.go_on()
            self.proxy.plan = lambda *_: harm
            began_s = time.monotonic()
            self.write(harm, lambda: vua.put(other, KV))
            self.assertLess(time.monotonic() - began_s, BOUND_S)
            Bucket.at(self.url).breaker.went(well=True)
            refused = self.write(harm, lambda: Bucket.at(self.url).put("x", b"x"))
            self.assertRegex(refused, SAID.get(harm, ".*"))
            said.output.append(refused)
            self.go_on()
            vua.put(other, KV)
        self.assertNotIn("vuatestsecret", "".join(said.output))
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(128, self.found(vua))
            self.assertEqual(128, vua.get_closest(other).num_tokens)

    def check_behind(self, harm: str) -> None:
        """The same behind a directory: nothing is refused, and what waits is sent later."""
        places, other = [str(self.root / "near"), self.url], TOKENS + 1000
        with VUA(CONFIG, places) as vua:
            self.assertEqual(128, self.found(vua))
            self.proxy.plan = lambda *_: harm
            self.assertEqual(CHUNKS, vua.put(other, KV))
            self.assertEqual(128, vua.get_closest(other).num_tokens)
            self.go_on()
        with VUA(CONFIG, places) as vua:
            self.assertEqual(128, vua.get_closest(other).num_tokens)
        with VUA(CONFIG, self.url) as vua:
            stop_s = time.monotonic() + BOUND_S
            while vua.get_closest(other).num_tokens < 128 and time.monotonic() < stop_s:
                with VUA(CONFIG, places) as sender:
                    sender.get_closest(TOKENS[:16])
            self.assertEqual(128, vua.get_closest(other).num_tokens)

    def test_server_killed_and_restarted(self) -> None:
        """It is gone, and comes back with its data."""
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(128, self.found(vua))
            seaweedfs().stop()
            try:
                self.assertEqual(0, self.found(vua))
                with self.assertRaises(StorageError):
                    vua.put(TOKENS + 1000, KV)
            finally:
                seaweedfs().start()
            self.go_on()
            self.assertEqual(128, self.found(vua))
            self.assertEqual(CHUNKS, vua.put(TOKENS + 1000, KV))


class BreakerTest(ProxiedTest):
    def test_left_alone(self) -> None:
        """A server that fails again and again is left alone: its requests fail at once."""
        self.proxy.plan = lambda *_: "503"
        bucket = Bucket.at(self.url)
        for _ in range(3):
            with self.assertRaises(StorageError):
                bucket.head("x")
        asked = sum(self.proxy.counts.values())
        with self.assertRaisesRegex(StorageError, "is not asked again"):
            bucket.head("x")
        self.assertEqual(asked, sum(self.proxy.counts.values()))


def _tests() -> None:
    """A test per harm, with the bucket alone and behind a directory."""
    for harm in dict.fromkeys((*HARMS, *REFUSALS)):
        if harm in ("slow", "flipped"):  # they let writes through
            continue

        def alone(self: FaultTest, harm: str = harm) -> None:
            self.check(harm)

        def behind(self: FaultTest, harm: str = harm) -> None:
            self.check_behind(harm)

        name = harm.replace(" ", "_")
        setattr(FaultTest, f"test_{name}", alone)
        setattr(FaultTest, f"test_{name}_behind_a_directory", behind)


_tests()


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

    def test_unknown_certificate(self) -> None:
        """Nothing is sent to a server that nobody vouches for."""
        self.speak()
        with self.assertRaises(StorageError), VUA(CONFIG, self.url) as vua:
            vua.put(TOKENS, KV)
        self.assertEqual(0, sum(self.proxy.counts.values()))

    def test_bodies_are_not_signed(self) -> None:
        """Unless the environment asks for it."""
        for more, unsigned in (({}, True), ({"AWS_UNSIGNED_PAYLOAD": "false"}, False)):
            self.url = seaweedfs().place()
            before = self.proxy.unsigned["PUT"]
            self.speak(AWS_CA_BUNDLE=str(self.pem), **more)
            with VUA(CONFIG, self.url) as vua:
                vua.put(TOKENS, KV)
            self.assertEqual(unsigned, self.proxy.unsigned["PUT"] - before >= CHUNKS, more)


FEW_CONFIG = VUAConfig(split_factor=4, model="tiny")
FEW = torch.arange(12)
FEW_KV = caches_of(layers=1, heads=1, tokens=12, dim=8)


class RefusalTest(DirectoryTest):
    """A place behind a proxy."""

    def setUp(self) -> None:
        """Start the proxy, which passes everything on at first."""
        super().setUp()
        self.proxy = FaultyProxy(moto())
        self.addCleanup(self.proxy.close)
        self.enterContext(speaking_to(self.proxy.endpoint))
        self.url = f"s3://vua/{self.root.name}"
        self.bucket = Bucket.at(self.url)

    def sent(self) -> Counter[str]:
        """The requests of this process to the bucket, but for bytes and failures."""
        kinds = ("get", "head", "put", "list", "copy", "delete")
        return Counter({kind: self.bucket.counts[kind] for kind in kinds})

    def check(self) -> None:
        """Store, load, and store again, which sends nothing twice."""
        with VUA(FEW_CONFIG, self.url) as vua:
            self.assertEqual(3, vua.put(FEW, FEW_KV))
            found = vua.get_closest(FEW)
            self.assertEqual((12, kv_bits(FEW_KV)), (found.num_tokens, kv_bits(found.data)))
            self.assertEqual(0, vua.put(FEW, FEW_KV))
        self.assertTrue(is_marked(BucketPath(self.bucket)))

    def test_conditions(self) -> None:
        """A server that refuses `If-None-Match`, or says that all is there, is asked first.

        A client of 501 begins anew for some seconds; VUA asks once.
        """
        for harm in ("bad", "failing", "no"):
            with self.subTest(harm):
                self.url = f"s3://vua/{self.root.name}-{harm}"
                self.bucket = Bucket.at(self.url)
                self.proxy.plan = lambda *_, harm=harm: f"{harm} conditions"
                self.check()
                with self.assertRaises(FileExistsError):
                    self.bucket.put("vua.json", b"other", create=True)

    def test_no_bulk(self) -> None:
        """Without deletion of many objects are deleted one by one, from then on at once."""
        self.check()
        self.proxy.plan = lambda *_: "no bulk"
        self.assertEqual(0, run("gc", self.url, "--max-bytes", "0", "--yes")[0])
        self.check()
        before = self.sent()
        code, report = run_json("rm", self.url, "--all", "--yes")
        self.assertEqual((0, 4), (code, report["objects"]))
        self.assertEqual(["vua.json"], [one.key for one in self.bucket.walk()])
        self.assertEqual(4, (self.sent() - before)["delete"] - 2)  # bulk: chunks; the description

    def test_locked(self) -> None:
        """Deletions that an object lock refuses are tried, counted and said; nothing else ends."""
        self.check()
        self.proxy.plan = lambda *_: "locked"
        code, _, err = run("rm", self.url, "--all", "--yes")
        self.assertEqual(2, code)
        self.assertRegex(err, "object lock")
        self.assertEqual(0, run("verify", self.url)[0])

    def test_damaged_and_locked(self) -> None:
        """What is damaged and cannot be deleted is written over, and is found again."""
        self.check()
        key = min(one.key for one in self.bucket.walk() if one.key.endswith(".safetensors"))
        data = bytearray(self.bucket.get(key)[1])
        data[-1] ^= 1
        self.bucket.put(key, bytes(data))
        self.proxy.plan = lambda *_: "locked"
        with VUA(FEW_CONFIG, self.url) as vua:
            self.assertLess(vua.get_closest(FEW).num_tokens, 12)
            self.assertGreaterEqual(vua.put(FEW, FEW_KV), 1)
            self.assertEqual(12, vua.get_closest(FEW).num_tokens)

    def test_checksum(self) -> None:
        """A server that wants a checksum with each write gets it, from then on at once."""
        self.proxy.plan = lambda *_: "no checksum"
        self.check()
        before = self.sent()
        self.bucket.put("other", b"1")
        self.assertEqual(1, (self.sent() - before)["put"])

    def test_object_lock(self) -> None:
        """A bucket with a retention, on a real server: a deletion leaves a version."""
        boto3, server = pytest.importorskip("boto3"), seaweedfs()
        name = f"lock-{self.root.name}-kv".lower().replace("_", "-")
        with speaking_to(server.endpoint):
            s3 = boto3.session.Session().client("s3", endpoint_url=server.endpoint)
            s3.create_bucket(Bucket=name, ObjectLockEnabledForBucket=True)
            retention = {"Mode": "COMPLIANCE", "Days": 1}
            rule = {"ObjectLockEnabled": "Enabled", "Rule": {"DefaultRetention": retention}}
            s3.put_object_lock_configuration(Bucket=name, ObjectLockConfiguration=rule)
            self.url = f"s3://{name}/kv"
            self.bucket = Bucket.at(self.url)
            self.check()
            self.assertEqual(0, run("rm", self.url, "--all", "--yes")[0])
            self.assertEqual(["vua.json"], [one.key for one in self.bucket.walk()])
            self.check()
