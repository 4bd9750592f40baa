"""`benchmarks/speed.py`: how fast a directory or a bucket is."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from buckets import memory_url
from helpers import DirectoryTest
from speed import (
    main,
)
from vua.storage.bucket import Bucket


class TestPath(DirectoryTest):
    """What a directory can do."""

    def test_program(self) -> None:
        """The program prints bandwidths, metadata and what is worth loading."""
        words = [str(self.root), "--tiny", "--model", "Qwen3-8B", "--prefill", "1000"]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main(words)

        for expected in ("read, warm", "lookup, found", "worth from tokens", "GPU-direct"):
            self.assertIn(expected, out.getvalue())

    def test_bucket(self) -> None:
        """Of a bucket whole loads are measured; nothing stays there, and its tables are shown."""
        pytest.importorskip("obstore")
        url, file = memory_url(), self.root / "report.json"
        with contextlib.redirect_stdout(io.StringIO()) as out:
            main([url, "--tiny", "--model", "1024", "--prefill", "0.001", "--json", str(file)])
        report = json.loads(file.read_text("utf-8"))

        self.assertEqual(64 * 1024, report["chunk_nbytes"])
        self.assertEqual([1, 4, 16], [one["chunks"] for one in report["load_times"]])
        self.assertEqual(64, report["worth_loading"]["worth_from_tokens"])
        self.assertEqual([], list(Bucket.at(url).walk()))
        self.assertIn("worth loading from 64 tokens on", out.getvalue())
