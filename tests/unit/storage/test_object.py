from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import unittest
from typing import Any
from unittest import mock

import pytest
import torch

from buckets import memory_url, seaweedfs, speaking_to
from helpers import DirectoryTest, caches_of, kv_bits
from vua import VUA, VUAConfig
from vua.errors import ConfigError, StorageError
from vua.security.settings import Security
from vua.storage.base import FAILED
from vua.storage.bucket import Bucket
from vua.storage.bucket_client import explained
from vua.storage.location import BucketPath
from vua.storage.mark import MARK, mark_text
from vua.storage.object import ObjectStorage
from vua.store.place import prepare
from vua.store.tiered import whole_batch

obstore = pytest.importorskip("obstore")

CONFIG = VUAConfig(split_factor=16, model="tiny")
TOKENS = torch.arange(64)
KV = caches_of(layers=2, heads=2, tokens=64, dim=8, seed=1)


def get(url: str, config: VUAConfig = CONFIG) -> tuple[int, list]:
    """What a user of a place finds there."""
    with VUA(config, url) as vua:
        found = vua.get_closest(TOKENS)
    return found.num_tokens, kv_bits(found.data)


class BucketTest(DirectoryTest):
    """The library on a bucket in memory."""

    def setUp(self) -> None:
        super().setUp()
        self.url = memory_url()

    def put(self, url: str, config: VUAConfig = CONFIG) -> int:
        with VUA(config, url) as vua:
            return vua.put(TOKENS, KV)

    def test_parts(self) -> None:
        """A large object comes in parts, of one version."""
        bucket, data = Bucket.at(self.url), os.urandom(100)
        bucket.put("x", data)
        with mock.patch("vua.storage.bucket._PART_NBYTES", 30):
            for offset, nbytes in ((0, 100), (7, 93), (5, 60), (40, 200), (0, 30), (0, 90)):
                meta, found = bucket.get("x", offset, nbytes)
                self.assertEqual(data[offset : offset + nbytes], bytes(found))
                self.assertEqual(100, meta.nbytes)
            self.assertEqual(4, self.put(f"{self.url}/kv"))
            self.assertEqual((64, kv_bits(KV)), get(f"{self.url}/kv"))
            got = obstore.get

            def replaced(*args: Any, **more: Any) -> Any:
                answer = got(*args, **more)
                bucket.put("x", os.urandom(100))
                return answer

            with mock.patch("obstore.get", replaced), self.assertRaises(FileNotFoundError):
                bucket.get("x", 0, 100)

    def test_damage(self) -> None:
        """An object that was damaged is a shorter prefix, and is stored anew by the next put."""
        self.put(self.url)
        bucket = Bucket.at(self.url)
        keys = [one.key for one in bucket.walk() if one.key.endswith(".safetensors")]
        self.assertEqual(4, len(keys))
        for key in keys:
            data = bytearray(bucket.get(key)[1])
            data[-1] ^= 1
            bucket.put(key, bytes(data))
        with self.assertLogs("vua", logging.WARNING):
            self.assertEqual((0, []), get(self.url))
        self.assertEqual(4, self.put(self.url))
        self.assertEqual(64, get(self.url)[0])

    def test_copied_both_ways(self) -> None:
        """A directory copied as it is into a bucket is a cache, and the reverse."""
        source, target = self.root / "source", self.root / "target"
        self.put(str(source))
        shutil.copytree(source, self.root / "bucket")
        self.assertEqual((64, kv_bits(KV)), get(f"file://{self.root}/bucket"))
        self.put(f"file://{self.root}/other")
        shutil.copytree(self.root / "other", target)
        for path in target.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        target.chmod(0o700)
        self.assertEqual((64, kv_bits(KV)), get(str(target)))

    def test_not_a_cache(self) -> None:
        """A place that holds other things is refused, and nothing is written there."""
        bucket = Bucket.at(self.url)
        bucket.put("thesis.tex", b"x")
        with self.assertRaisesRegex(ConfigError, "thesis.tex"):
            VUA(CONFIG, self.url)
        self.assertEqual(["thesis.tex"], [one.key for one in bucket.walk()])

    def test_nothing_without_the_mark(self) -> None:
        """While the mark cannot be written, nothing else is: it would never be deleted."""
        bucket, trials = Bucket.at(self.url), iter([StorageError(5, "down"), None])

        def renew() -> None:
            problem = next(trials)
            if problem is not None:
                raise problem

        storage = ObjectStorage(BucketPath(bucket, "0" * 64), renew)
        batch = whole_batch(f"{'1' * 64}/l0-2.h0-2", b"some bytes")
        written = storage.write(batch)
        self.assertEqual(([FAILED], 5), (list(written.statuses), written.problem.errno))
        self.assertEqual([], list(bucket.walk()))
        for _ in range(2):
            self.assertIsNone(storage.write(batch).problem)
        self.assertEqual(1, len(list(bucket.walk())))

    def test_deleted_under_a_writer(self) -> None:
        """Somebody empties the place while it is used: the next minute describes it anew."""
        with VUA(CONFIG, self.url) as vua:
            vua.put(TOKENS[:16], [[x[:, :, :16] for x in pair] for pair in KV])
            bucket = Bucket.at(self.url)
            bucket.delete([one.key for one in bucket.walk()])
            with mock.patch("vua.storage.object._RENEW_S", 0.0):
                vua.put(TOKENS, KV)
        self.assertEqual((64, kv_bits(KV)), get(self.url))

    def test_another_version(self) -> None:
        """A cache of another version is refused: what was found, expected, and what to do."""
        self.put(self.url)
        Bucket.at(self.url).put(MARK, mark_text().replace(b".v1", b".v9"))
        with self.assertRaisesRegex(ConfigError, "'vua.root.v9', expected 'vua.root.v1'.*Use that"):
            VUA(CONFIG, self.url)

    @pytest.mark.thorough
    def test_forked_after_a_trial(self) -> None:
        """An engine's start tries the place, and forks then: its children can use it."""
        url = f"file://{self.root}/tried"
        code = (
            "import os, sys, torch\n"
            "from vua import VUA, VUAConfig\n"
            "from vua.security.settings import Security\n"
            "from vua.store.place import prepare\n"
            "prepare(sys.argv[1], Security())\n"
            "child = os.fork()\n"
            "if not child:\n"
            "    with VUA(VUAConfig(split_factor=16), sys.argv[1]) as vua:\n"
            "        kv = [[torch.ones(1, 1, 16, 8)] * 2]\n"
            "        os._exit(40 + vua.put(torch.arange(16), kv))\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        )
        done = subprocess.run([sys.executable, "-c", code, url], check=False)
        self.assertEqual(41, done.returncode)  # it wrote one chunk

    def test_a_trial_says_what_is_wrong(self) -> None:
        """Also though another process finds it out."""
        Bucket.at(f"file://{self.root}/full").put("thesis.tex", b"x")
        with self.assertRaisesRegex(ConfigError, "thesis.tex"):
            prepare(f"file://{self.root}/full", Security())

    def test_a_forked_child(self) -> None:
        """A child cannot use connections of its parent, and does not hang: it finds nothing."""
        self.put(self.url)
        with VUA(CONFIG, self.url) as vua:
            self.assertEqual(64, vua.get_closest(TOKENS).num_tokens)
            child = os.fork()
            if not child:
                os._exit(0 if vua.get_closest(TOKENS).num_tokens == 0 else 1)
            self.assertEqual(0, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


class URLTest(unittest.TestCase):
    """Which URLs are taken, and what they say."""

    def test_secrets(self) -> None:
        """A URL with a secret in it is refused, without repeating it."""
        for url in ("s3://me:geheim@bucket/x", "s3://bucket/x?sig=geheim", "az://c/x#geheim"):
            with self.assertRaises(ConfigError) as refused:
                VUA(CONFIG, url)
            self.assertNotIn("geheim", str(refused.exception))

    def test_names_are_no_advice(self) -> None:
        """An object's name, which the client repeats, does not choose the remedy."""
        text = "Generic S3 error: 403 Forbidden: /Expired/NoSuchBucket/redirect/Quota"
        found = explained(obstore.exceptions.GenericError(text), "get", "s3://b/k")
        self.assertIn("no reason is given", str(found))

    def test_unknown(self) -> None:
        """Another scheme, no bucket, and a prefix that no key can begin with are refused."""
        for url in ("ftp://host/x", "s3:///x", "s3://b kt/x", "s3://bkt/a//b", "s3://bkt/../x",
                    "s3://bkt/a\x01", "s3://[/x"):  # fmt: skip
            with self.subTest(url), self.assertRaises(ConfigError):
                VUA(CONFIG, url)

    def test_plain_http(self) -> None:
        """It is refused unless it is asked for; no secret is in the error."""
        with (
            speaking_to("http://127.0.0.1:9", AWS_ALLOW_HTTP="false"),
            self.assertRaisesRegex(StorageError, "AWS_ALLOW_HTTP") as refused,
        ):
            VUA(CONFIG, "s3://plain-http/x")
        self.assertNotIn("vuatestsecret", str(refused.exception))

    def test_without_the_package(self) -> None:
        """It says what to install."""
        code = (
            "import sys; sys.modules['obstore'] = None\n"
            "from vua.storage.bucket import Bucket; Bucket.at('s3://bucket/x')"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True
        )
        self.assertIn("pip install obstore", done.stderr)


@pytest.mark.thorough
class SeaweedFSTest(BucketTest):
    """The same on a real server."""

    def setUp(self) -> None:
        DirectoryTest.setUp(self)
        self.url = seaweedfs().place()
        self.enterContext(speaking_to(seaweedfs().endpoint))

    def test_wrong_credentials(self) -> None:
        """They are said at the start, without a secret."""
        endpoint = seaweedfs().endpoint
        with (
            speaking_to(endpoint, AWS_SECRET_ACCESS_KEY="geheim"),
            self.assertRaisesRegex(StorageError, "refused") as refused,
        ):
            VUA(CONFIG, f"{self.url}/wrong-key")
        self.assertNotRegex(str(refused.exception), "geheim|vuatestkey")
