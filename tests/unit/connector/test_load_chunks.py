"""How many chunks an engine loads at once."""

from __future__ import annotations

import unittest
from typing import Any

from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import load_chunks

MIB = 1 << 20


class LoadChunksTest(unittest.TestCase):
    def test_places(self) -> None:
        """Of a bucket up to 64 in 64 MiB, in sixteens; else what fits into 16 MiB."""
        cases: tuple[tuple[Any, int, int], ...] = (
            ("/kv", 3 * MIB, 5),
            ("/kv", 80 * MIB, 1),
            ("s3://bucket/prefix", 3 * MIB, 16),
            (("/kv", "s3://bucket"), 3 * MIB, 16),
            ("s3://bucket", 3 * MIB // 2, 32),
            ("s3://bucket", MIB // 2, 64),
            ("s3://bucket", 8 * MIB, 8),
            ("s3://bucket", MIB // 16, 256),
            ("s3://bucket", 80 * MIB, 1),
        )
        for path, nbytes, expected in cases:
            with self.subTest(path=path, nbytes=nbytes):
                config = ConnectorConfig(shared_storage_path=path)
                self.assertEqual(expected, load_chunks(config, nbytes))
