"""Mirrors `vua.catalog.inventory`: a bucket listed by a report."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import unittest
from typing import Any
from urllib.parse import quote_plus, urlsplit

import pytest
import torch

from buckets import memory_url
from commands import run, run_json
from helpers import DirectoryTest, caches_of
from vua.core import VUA, VUAConfig
from vua.storage.bucket import Bucket

pytest.importorskip("obstore")

FIELDS = ("Bucket", "Key", "VersionId", "IsLatest", "IsDeleteMarker", "Size", "LastModifiedDate")
TOKENS = torch.arange(500, 532)
DATE = "2026-11-26T01-00Z"


class InventoryTest(DirectoryTest):
    """A cache in a bucket, and a report of it in a folder, as S3 writes one."""

    def setUp(self) -> None:
        """Store three chunks of one model and one of another."""
        super().setUp()
        self.url = memory_url()
        self.bucket = Bucket.at(self.url)
        self.put("llama", 3)
        self.put("a model+1", 1)
        self.config = self.root / "inventories" / "bucket" / "all"
        self.manifest = f"file://{self.config}/{DATE}/manifest.json"

    def put(self, model: str, chunks: int, first: int = 0) -> None:
        """Store chunks of a model's cache."""
        with VUA(VUAConfig(split_factor=4, model=model), self.url) as vua:
            cache = caches_of(layers=3, heads=2, tokens=4 * chunks, dim=8)
            self.assertEqual(chunks, vua.put(first + TOKENS[: 4 * chunks], cache))

    def report(self, *, fields: tuple[str, ...] = FIELDS, **said: Any) -> None:
        """Write a report of what is in the bucket, in some files, with others' objects in it."""
        path = urlsplit(self.url).path.strip("/")
        rows = [
            {
                "Bucket": "",
                "Key": quote_plus(f"{path}/{one.key}"),
                "VersionId": "1",
                "IsLatest": "true",
                "IsDeleteMarker": "false",
                "Size": str(one.nbytes),
                "LastModifiedDate": "2026-11-25T10:00:00.500Z",
            }
            for one in self.bucket.walk()
        ]
        old = {**rows[0], "IsLatest": "false", "Size": str(10**12)}
        gone = {**rows[1], "IsDeleteMarker": "true", "Size": "0"}
        other = {**rows[0], "Key": f"{path}-other/{'a' * 64}/x", "Size": str(10**12)}
        rows = [*rows[::-1], old, gone, other]
        listed = []
        for number in range(2):
            text = io.StringIO()
            some = rows[number::2]
            csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(
                [row[field] for field in fields] for row in some
            )
            data = gzip.compress(text.getvalue().encode())
            name = f"part-{number}.csv.gz"
            (self.config / "data").mkdir(parents=True, exist_ok=True)
            (self.config / "data" / name).write_bytes(data)
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            key = f"inventories/bucket/all/data/{name}"
            listed.append({"key": key, "size": len(data), "MD5checksum": digest})
        manifest = {
            "sourceBucket": "",
            "destinationBucket": "arn:aws:s3:::reports",
            "version": "2016-11-30",
            "creationTimestamp": "1764118800000",
            "fileFormat": "CSV",
            "fileSchema": ", ".join(fields),
            "files": listed,
            **said,
        }
        (self.config / DATE).mkdir(exist_ok=True)
        (self.config / DATE / "manifest.json").write_text(json.dumps(manifest))

    def test_as_listed(self) -> None:
        """`du` and `ls` answer as by listings, and send none for chunks."""
        for command in (["du"], ["ls"], ["ls", "--long"]):
            expected = run_json(*command, self.url)
            self.report()
            found = run_json(*command, self.url, "--inventory", self.manifest)
            self.assertEqual(1764118800.0, found[1].pop("listed_s"))
            for report in (expected[1], found[1]):
                report.pop("requests", None)
                report.pop("requests_dollars", None)
                for space in report["namespaces"]:
                    for name in ("oldest_ns", "newest_ns", "oldest_s", "newest_s"):
                        space.pop(name, None)
                    for entry in space.get("entries", ()):
                        self.assertIsInstance(entry.pop("modified_s"), float)
            self.assertEqual(expected, found)

    def test_as_of_then(self) -> None:
        """What came since is not in it; the output names the report's time."""
        self.report()
        self.put("llama", 2, first=1000)
        self.assertEqual(6, run_json("du", self.url)[1]["chunks"])
        before = dict(self.bucket.counts)
        code, found = run_json("du", self.url, "--inventory", self.manifest)
        self.assertEqual((0, 4), (code, found["chunks"]))
        newest = {one["newest_s"] for one in found["namespaces"]}
        self.assertEqual({1764064800.5 + 365 * 86400}, newest)
        self.assertLessEqual(self.bucket.counts["list"] - before["list"], 2)  # folders alone
        self.assertIn(
            "listed by an inventory of ", run("ls", self.url, "--inventory", self.manifest)[1]
        )

    def test_damaged(self) -> None:
        """A file that is missing, or is not what the manifest says, is told; nothing is counted."""
        self.report()
        part = self.config / "data" / "part-1.csv.gz"
        sound = part.read_bytes()
        other = gzip.compress(gzip.decompress(sound)[:-20])
        for data in (sound[:-9], other, b"no gzip", sound + b"x", None):
            if data is None:
                part.unlink()
            else:
                part.write_bytes(data)
            code, out, err = run("du", self.url, "--inventory", self.manifest)
            self.assertEqual((2, ""), (code, out))
            self.assertIn("part-1.csv.gz", err)

    def test_refused(self) -> None:
        """What cannot be used is told with what to do."""
        self.report(fields=FIELDS[:5])
        cases = [(self.manifest, "without Size, LastModifiedDate")]
        for url, said in (
            (f"{self.manifest}.gz", "give the URL of an inventory's manifest.json"),
            (self.manifest.replace(DATE, "none"), "no such object"),
        ):
            cases.append((url, said))
        for url, said in cases:
            code, _, err = run("du", self.url, "--inventory", url)
            self.assertEqual(2, code)
            self.assertIn(said, err)
        for changed, said in (
            ({"fileFormat": "Parquet"}, "an inventory in Parquet"),
            ({"sourceBucket": "another"}, "an inventory of 'another'"),
            ({"files": None}, "not the manifest"),
        ):
            self.report(**changed)
            code, _, err = run("du", self.url, "--inventory", self.manifest)
            self.assertEqual(2, code)
            self.assertIn(said, err)
        code, _, err = run("du", str(self.root), "--inventory", self.manifest)
        self.assertEqual(2, code)


if __name__ == "__main__":
    unittest.main()
