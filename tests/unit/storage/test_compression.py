"""Mirrors `vua.storage.object`, and the compressed objects of `vua.storage.object`."""

from __future__ import annotations

import logging
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest

from commands import run, run_json
from compressed import KV, TOKENS, CompressedTest, config, entry
from helpers import Memory, keys_of, kv_bits, model_arrays, rectangle, save_chunk
from vua import VUA, VUAConfig
from vua.catalog import check
from vua.connector.config import ConnectorConfig
from vua.errors import ConfigError
from vua.format.entry import AUTO, CODEC, OFF
from vua.format.layout import KVLayout, Shard
from vua.storage.location import BucketPath
from vua.storage.names import is_compressed
from vua.storage.object import Compression, ObjectStorage
from vua.store.store import Store

pytest.importorskip("obstore")
pytest.importorskip("zstandard")


@contextmanager
def without_package() -> Iterator[None]:
    """As on a host where it is not installed."""
    with (
        mock.patch("vua.storage.object.is_available", return_value=False),
        mock.patch("vua.storage.object.is_available", return_value=False),
    ):
        yield


class BucketTest(CompressedTest):
    """What is in the bucket, and who finds it."""

    def test_put_and_get(self) -> None:
        """Objects are smaller, what comes back is the same, and nothing is written twice."""
        self.assertEqual(2, self.put())
        self.assertEqual([True] * 2, [is_compressed(key) for key in self.objects()])
        stored = sum(self.bucket.head(key).nbytes for key in self.objects())
        self.assertLess(stored, 0.8 * TOKENS.numel() * 2 * 2 * 4 * 64 * 2)
        self.assertEqual(128, self.found())
        self.assertEqual(128, self.found(AUTO))
        self.assertEqual(0, self.put())

    def test_off(self) -> None:
        """Who does not ask for compressed entries, as old versions, misses; nothing is deleted."""
        self.put()
        before = self.objects()
        self.assertEqual(0, self.found(OFF))
        self.assertEqual(before, self.objects())

    def test_both_forms(self) -> None:
        """Plain ones are found too; with both there either is read, and both are deleted."""
        self.put(OFF)
        self.assertEqual(128, self.found())
        self.assertEqual(0, self.put(), "what is there in the other form is there")
        self.assertFalse(any(map(is_compressed, self.objects())))
        plain = {key: bytes(self.bucket.get(key)[1]) for key in self.objects()}
        self.bucket.delete(list(plain))
        self.put()
        for key, data in plain.items():
            self.bucket.put(key, data)
        self.assertEqual(4, len(self.objects()))
        for codec in (CODEC, OFF):
            self.assertEqual(128, self.found(codec))
        self.assertEqual(0, run("gc", self.url, "--max-bytes", "1B")[0])
        self.assertEqual([], self.objects())

    def test_damage(self) -> None:
        """A damaged one is a miss and is deleted; the next put stores it anew."""
        self.put()
        harms = (
            lambda data: data[:-1] + bytes([data[-1] ^ 1]),
            lambda data: data[: len(data) // 2],
            lambda data: data[:100],
            lambda _: b"",
        )
        for harm in harms:
            first = next(key for key in self.objects() if self.is_first(key))
            self.bucket.put(first, harm(bytes(self.bucket.get(first)[1])))
            with self.assertLogs("vua", logging.WARNING):
                self.assertEqual(0, self.found())
            self.assertEqual(1, len(self.objects()))
            self.assertEqual(1, self.put())
        self.assertEqual(128, self.found())

    def test_plain_name(self) -> None:
        """A compressed file under a plain name is damaged, for readers and for `vua verify`."""
        self.put()
        for key in self.objects():
            data = self.bucket.get(key)[1]
            self.bucket.put(key.replace(".compressed", ""), bytes(data))
            self.bucket.delete([key])
        self.assertEqual(1, run("verify", self.url)[0])
        with self.assertLogs("vua", logging.WARNING):
            self.assertEqual(0, self.found())

    def test_without_package(self) -> None:
        """Compressed entries are misses, one warning names the package, and puts are plain."""
        self.put()
        with (
            without_package(),
            self.assertLogs("vua", logging.WARNING) as said,
            VUA(config(), self.url) as vua,
        ):
            for _ in range(3):
                self.assertEqual(0, vua.get_closest(TOKENS).num_tokens)
            self.assertEqual(2, vua.put(TOKENS, KV))
            self.assertEqual(128, vua.get_closest(TOKENS).num_tokens)
        (line,) = said.output
        self.assertIn("pip install zstandard", line)
        self.assertEqual([True, True, False, False], [*map(is_compressed, self.objects())])


class RanksTest(CompressedTest):
    """Readers that want a part of what was stored."""

    def test_parts(self) -> None:
        """Every rank has its part, bit by bit, and of a large chunk less is read than there is."""
        layout = KVLayout(20, 8, 64, 64, "F32", 32)
        storage = ObjectStorage(BucketPath(self.bucket) / ("ab" * 32), codec=CODEC)
        store = Store(storage, "ab" * 32, layout)
        keys = keys_of(range(64), 32)
        model = [array & 7 for array in model_arrays(layout, 2)]
        memory = Memory(layout, layout.full, 2).fill(model).map()
        self.assertEqual(
            2, sum(save_chunk(store, key, memory, place=n) for n, key in enumerate(keys))
        )
        self.assertTrue(all(map(is_compressed, self.objects())))
        stored = sum(self.bucket.head(key).nbytes for key in self.objects())
        for target in (layout.full, Shard(0, 20, 5, 6), Shard(2, 9, 0, 8), Shard(19, 20, 7, 8)):
            before = self.bucket.counts["read_nbytes"]
            into = Memory(layout, target, 2)
            self.assertEqual(2, store.load(keys, into.map(), target=target).chunks)
            expected = Memory(layout, target, 2).fill(rectangle(model, target))
            for want, got in zip(expected.buffers, into.buffers, strict=True):
                np.testing.assert_array_equal(want, got)
            read = self.bucket.counts["read_nbytes"] - before
            if target.heads == 1:
                self.assertLess(read, 0.6 * stored)


class AutoTest(unittest.TestCase):
    """Who decides by measurements."""

    def test_by_link(self) -> None:
        """Nothing before something was sent; then on slow links, and not on fast ones."""
        data = entry()
        for nbytes_s, compresses in ((1e6, True), (1e12, False)):
            compression = Compression(AUTO, "there")
            self.assertIsNone(compression.packed(data))
            compression.moved(1 << 10, 1.0)  # says nothing
            self.assertIsNone(compression.packed(data))
            compression.moved(1 << 20, (1 << 20) / nbytes_s)
            with self.subTest(nbytes_s):
                self.assertEqual(compresses, compression.packed(data) is not None)
        for _ in range(200):  # it became slow
            compression.moved(1 << 20, 1.0)
        self.assertIsNotNone(compression.packed(data))

    def test_name(self) -> None:
        """With a codec's name no link is too fast."""
        compression = Compression(CODEC, "there")
        self.assertIsNotNone(compression.packed(entry()))
        self.assertIsNone(compression.packed(b"no entry"))

    def test_settings(self) -> None:
        """Other names are refused, for the library and for engines."""
        self.assertEqual(OFF, VUAConfig().codec)
        with self.assertRaisesRegex(ConfigError, "codec"):
            VUAConfig(codec="zip")
        with self.assertRaisesRegex(ConfigError, "codec"):
            ConnectorConfig.from_extra_config(
                {"shared_storage_path": "/x", "worker": {"codec": "zip"}}
            )


class ToolsTest(CompressedTest):
    """Commands that look into buckets."""

    def test_verify_and_inspect(self) -> None:
        """They know compressed objects, and find damage in them."""
        self.put()
        code, report = run_json("verify", self.url)
        self.assertEqual(0, code, report)
        key = self.objects()[0]
        code, out, _ = run("inspect", f"{self.url}/{key}")
        self.assertEqual(0, code)
        self.assertRegex(out, f"compressed +to .* by {CODEC}")
        data = bytearray(self.bucket.get(key)[1])
        data[-1] ^= 1
        self.bucket.put(key, bytes(data))
        self.assertEqual(1, run("verify", self.url)[0])
        with without_package(), mock.patch.object(check, "decompressed", side_effect=ImportError):
            run("verify", self.url, "--repair")
        self.assertEqual(2, len(self.objects()), "what cannot be judged is not deleted")
        run("verify", self.url, "--repair")
        self.assertEqual(1, len(self.objects()))

    def test_export_and_import(self) -> None:
        """An archive has plain files: whoever imports it needs to know nothing of codecs."""
        self.put()
        archive, directory = self.root / "cache.tar", self.root / "directory"
        self.assertEqual(0, run("export", self.url, archive, "--all")[0])
        self.assertEqual(0, run("import", directory, archive)[0])
        with VUA(config(OFF), str(directory)) as vua:
            self.assertEqual(kv_bits(KV), kv_bits(vua.get_closest(TOKENS).data))


if __name__ == "__main__":
    unittest.main()
