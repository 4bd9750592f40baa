"""`benchmarks/speed.py`: how fast a directory or a bucket is."""

from __future__ import annotations

import contextlib
import io
import json
import unittest

import pytest

from buckets import memory_url
from helpers import DirectoryTest
from speed import (
    BucketLoad,
    Demand,
    Speed,
    load_seconds,
    main,
    probe,
    worth,
    worth_from_tokens,
)
from vua.capacity.scan import silent
from vua.errors import InputError
from vua.storage.bucket import Bucket


class TestPath(DirectoryTest):
    """What a directory can do."""

    def test_probe(self) -> None:
        """It measures writes and warm reads of every size, and leaves nothing behind."""
        report = probe(self.root, Demand("m", 1024, 100.0), silent, tiny=True)
        ways = {speed["what"] for speed in report["bandwidth"]}  # type: ignore[attr-defined]

        self.assertLessEqual({"write", "read, warm"}, ways)
        costs = report["write_cpu_ms_per_mib"]
        self.assertLessEqual({"new files", "written again"}, costs.keys())  # type: ignore[attr-defined]
        self.assertEqual([], list(self.root.iterdir()))

    def test_worth_loading(self) -> None:
        """Loading pays above the bytes that prefill makes per second, from a fixed cost on."""
        demand = Demand.of("Llama-3.1-8B", 10_000)
        rates = {"lookup, found, p99": 100.0, "open and close": 0.0}

        def cases(gb_s: float) -> dict[str, object]:
            speed = Speed("read, warm", 1 << 20, 1, gb_s, gb_s, gb_s)
            (case,) = worth(demand, [speed], rates)["cases"]  # type: ignore[misc]
            return case

        fixed = 22 * 100e-6  # 2 log2(131072 / 64) lookups
        gain = 1 / 10_000 - 131072 / 2e9
        self.assertIsNone(cases(1.3)["worth_from_tokens"])
        self.assertAlmostEqual(fixed / gain, cases(2.0)["worth_from_tokens"], delta=1)  # type: ignore[arg-type]

    def test_models(self) -> None:
        """Bytes per token follow from the model, its ranks, or are given."""
        self.assertEqual(131072, Demand.of("Llama-3.1-8B", 1).token_nbytes)
        self.assertEqual(16384, Demand.of("Llama-3.1-8B", 1, ranks=8).token_nbytes)
        self.assertEqual(70272, Demand.of("DeepSeek-V3", 1, ranks=8).token_nbytes)
        self.assertEqual(5, Demand.of("5", 1).token_nbytes)
        with self.assertRaisesRegex(InputError, "Llama-3.1-8B"):
            Demand.of("unheard", 1)

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

    def test_worth_loading_from_a_bucket(self) -> None:
        """A hit takes rounds of questions and a load; it pays where computing takes longer."""
        loads = [BucketLoad(n, s, s, s, 1.0) for n, s in ((1, 0.1), (16, 0.1), (32, 0.2))]
        took = [load_seconds(chunks, 0.01, loads) for chunks in (1, 16, 17, 24, 64, 2048)]
        for expected, found in zip((0.11, 0.11, 0.12625, 0.17, 0.42, 12.83), took, strict=True):
            self.assertAlmostEqual(expected, found)
        for tokens_s, expected in ((640.0, 128), (5000.0, 576), (10000.0, 8576), (11000.0, None)):
            demand = Demand("m", 1, tokens_s)
            self.assertEqual(expected, worth_from_tokens(demand, 0.01, loads), tokens_s)


if __name__ == "__main__":
    unittest.main()
