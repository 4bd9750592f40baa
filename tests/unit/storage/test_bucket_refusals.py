"""Mirrors `vua.storage.bucket`: what some servers refuse has a way round.

moto is the server, a proxy in front of it refuses. Object lock is SeaweedFS's, and AWS's wish for a
checksum the proxy's.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from buckets import moto, seaweedfs, speaking_to
from commands import run, run_json
from helpers import DirectoryTest, caches_of, kv_bits
from proxy import FaultyProxy
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket
from vua.storage.location import BucketPath
from vua.storage.mark import is_marked

pytest.importorskip("obstore")

CONFIG = VUAConfig(split_factor=4, model="tiny")
TOKENS = torch.arange(12)
KV = caches_of(layers=1, heads=1, tokens=12, dim=8)


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
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(3, vua.put(TOKENS, KV))
            found = vua.get_closest(TOKENS)
            self.assertEqual((12, kv_bits(KV)), (found.num_tokens, kv_bits(found.data)))
            self.assertEqual(0, vua.put(TOKENS, KV))
        self.assertTrue(is_marked(BucketPath(self.bucket)))

    @pytest.mark.thorough
    def test_bad_conditions(self) -> None:
        """A server that takes no `If-None-Match` is asked first, and then written to."""
        self.proxy.plan = lambda *_: "bad conditions"
        self.check()
        with self.assertRaises(FileExistsError):
            self.bucket.put("vua.json", b"other", create=True)

    @pytest.mark.thorough
    def test_failing_conditions(self) -> None:
        """So is one for which each object is there already."""
        self.proxy.plan = lambda *_: "failing conditions"
        self.check()

    @pytest.mark.thorough
    def test_no_conditions(self) -> None:
        """The client begins such an answer anew for some seconds; VUA asks once."""
        self.proxy.plan = lambda *_: "no conditions"
        self.check()

    @pytest.mark.thorough
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

    @pytest.mark.thorough
    def test_locked(self) -> None:
        """Deletions that an object lock refuses are tried, counted and said; nothing else ends."""
        self.check()
        self.proxy.plan = lambda *_: "locked"
        code, _, err = run("rm", self.url, "--all", "--yes")
        self.assertEqual(2, code)
        self.assertRegex(err, "object lock")
        self.assertEqual(0, run("verify", self.url)[0])

    @pytest.mark.thorough
    def test_damaged_and_locked(self) -> None:
        """What is damaged and cannot be deleted is written over, and is found again."""
        self.check()
        key = min(one.key for one in self.bucket.walk() if one.key.endswith(".safetensors"))
        data = bytearray(self.bucket.get(key)[1])
        data[-1] ^= 1
        self.bucket.put(key, bytes(data))
        self.proxy.plan = lambda *_: "locked"
        with VUA(CONFIG, self.url) as vua:
            self.assertLess(vua.get_closest(TOKENS).num_tokens, 12)
            self.assertGreaterEqual(vua.put(TOKENS, KV), 1)
            self.assertEqual(12, vua.get_closest(TOKENS).num_tokens)

    @pytest.mark.thorough
    def test_checksum(self) -> None:
        """A server that wants a checksum with each write gets it, from then on at once."""
        self.proxy.plan = lambda *_: "no checksum"
        self.check()
        before = self.sent()
        self.bucket.put("other", b"1")
        self.assertEqual(1, (self.sent() - before)["put"])

    @pytest.mark.thorough
    def test_object_lock(self) -> None:
        """A bucket with a retention, on a real server: a deletion leaves a version."""
        boto3, server = pytest.importorskip("boto3"), seaweedfs()
        name = f"lock-{self.root.name}".lower().replace("_", "-")
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

    @pytest.mark.thorough
    def test_requests(self) -> None:
        """A usual server sees as many requests as before there was a way round."""
        with VUA(CONFIG, self.url) as vua:
            vua.put(TOKENS, KV)
        sent = self.sent()
        self.assertEqual((6, 4, 0), (sent["put"], sent["head"], sent["delete"]))
        self.assertEqual(0, run("rm", self.url, "--all", "--yes")[0])
        sent = self.sent() - sent
        self.assertEqual({"get": 2, "list": 3, "delete": 2}, dict(sent))
