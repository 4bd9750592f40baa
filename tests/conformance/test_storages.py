"""The storages of VUA, and one of a stranger's, do what the contract says."""

from __future__ import annotations

import os
import unittest
from pathlib import Path
from unittest import mock

import pytest

from buckets import azurite, memory_url, moto, seaweedfs, speaking_to
from conformance.sqlite_storage import SQLiteStorage
from helpers import has_native, native_code
from vua.storage.base import Batch, ReadResult, Storage
from vua.storage.bucket import Bucket
from vua.storage.local import LocalStorage
from vua.storage.location import BucketPath
from vua.storage.object import ObjectStorage
from vua.testing import conformance


class TestDirectory(conformance.StorageConformance, unittest.TestCase):
    """Files in a directory."""

    def open_storage(self, directory: Path) -> Storage:
        storage = LocalStorage(directory)
        self.addCleanup(storage.close)
        return storage


class InPython(unittest.TestCase):
    """Without native code."""

    def setUp(self) -> None:
        if not has_native():
            self.skipTest("it is off for all tests")
        self.enterContext(native_code("off"))
        super().setUp()


class TestDirectoryInPython(InPython, TestDirectory):
    """Files in a directory, without native code."""


class TestSQLite(conformance.StorageConformance, unittest.TestCase):
    """The example of a storage of one's own."""

    def open_storage(self, directory: Path) -> Storage:
        storage = SQLiteStorage(directory / "chunks.db")
        self.addCleanup(storage.close)
        return storage


class TestBucketInMemory(conformance.StorageConformance, unittest.TestCase):
    """Objects in a bucket, without a server."""

    def setUp(self) -> None:
        pytest.importorskip("obstore")
        self.url = memory_url()
        super().setUp()

    def open_storage(self, directory: Path) -> Storage:
        return ObjectStorage(BucketPath(Bucket.at(self.url)) / ("c0" * 32))


class TestBucketOfFiles(TestBucketInMemory):
    """Objects that the same library keeps as files."""

    def open_storage(self, directory: Path) -> Storage:
        return ObjectStorage(BucketPath(Bucket.at(f"file://{directory}")) / ("c0" * 32))


@pytest.mark.thorough
class TestSeaweedFS(TestBucketInMemory):
    """Objects of a real server."""

    def setUp(self) -> None:
        self.url = seaweedfs().place()
        self.enterContext(speaking_to(seaweedfs().endpoint))
        conformance.StorageConformance.setUp(self)


@pytest.mark.thorough
class TestMoto(TestSeaweedFS):
    """Objects of another server of the S3 protocol."""

    def setUp(self) -> None:
        self.url = f"s3://vua/{memory_url().rpartition('/')[2]}"
        self.enterContext(speaking_to(moto()))
        conformance.StorageConformance.setUp(self)


@pytest.mark.thorough
class TestAzurite(TestSeaweedFS):
    """Objects of a server of Azure's protocol."""

    def setUp(self) -> None:
        self.url = f"az://vua/{memory_url().rpartition('/')[2]}"
        self.enterContext(mock.patch.dict(os.environ, azurite()))
        conformance.StorageConformance.setUp(self)


class Liar(SQLiteStorage):
    """It says that it has read everything, and has not."""

    def read(self, batch: Batch) -> ReadResult:
        return ReadResult(len(batch.names))


@pytest.mark.thorough
class TestLiar(unittest.TestCase):
    """The suite can fail, and no reader believes a storage."""

    def test_fails(self) -> None:
        """What is not read is noticed by tests that read."""

        class Case(conformance.StorageConformance, unittest.TestCase):
            def open_storage(self, directory: Path) -> Storage:
                storage = Liar(directory / "chunks.db")
                self.addCleanup(storage.close)
                return storage

        for name in ("test_digests", "test_first_missing"):
            with self.subTest(name):
                result = unittest.TestResult()
                Case(name).run(result)
                self.assertEqual(1, result.testsRun)
                self.assertFalse(result.wasSuccessful())


if __name__ == "__main__":
    unittest.main()
