"""`vua bench`: what a directory can do, and traces of requests."""

from __future__ import annotations

import contextlib
import io
import json
import time
import unittest
from typing import Any
from unittest import mock

import pytest

from buckets import memory_url
from commands import run_json
from helpers import DirectoryTest, flip
from suite.traces import multi_round
from vua.capacity.evictor import Evictor, Freed
from vua.capacity.scan import silent
from vua.cli import main
from vua.cli.bench_bucket import BucketLoad, load_seconds, worth_from_tokens
from vua.cli.bench_files import MeasurementError
from vua.cli.bench_path import Demand, Speed, probe, worth
from vua.cli.bench_replay import (
    Request,
    block_file_nbytes,
    read,
    replay,
)
from vua.errors import InputError
from vua.storage.bucket import Bucket
from vua.store.store import Store


def command(*words: str) -> tuple[int, str]:
    """Run `vua` in this process; return its exit code and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(words)
    return code, out.getvalue()


class TestReplay(DirectoryTest):
    """Traces through the real store."""

    def test_hits_are_ideal(self) -> None:
        """An unbounded store serves every block that was there before, and writes each once."""
        requests = multi_round(users=3, rounds=4, blocks=2)
        done = replay(self.root, requests, silent)
        unique = {block for request in requests for block in request.whole}

        self.assertEqual(done.ideal_blocks, done.hit_blocks)
        self.assertEqual(len(unique), done.written_blocks)
        self.assertEqual(done.blocks, done.hit_blocks + done.written_blocks)

    def test_bounded(self) -> None:
        """With little room a store hits less than the ideal, and keeps to its room."""
        requests = multi_round(users=6, rounds=4, blocks=3)
        room = 30 * block_file_nbytes()
        done = replay(self.root, requests, silent, max_bytes=room)

        self.assertLess(0, done.hit_blocks)
        self.assertLess(done.hit_blocks, done.ideal_blocks)
        self.assertLess(sum(path.stat().st_size for path in self.files()), 1.05 * room)

    def test_damage_stops_the_replay(self) -> None:
        """Control: a block that does not load as what was stored is no hit."""
        requests = [Request((1, 2, 3), 1536)]
        replay(self.root, requests, silent)
        flip(self.files()[0], 4200)

        with self.assertLogs("vua", "WARNING"), self.assertRaises(MeasurementError):
            replay(self.root, requests, silent)

    def test_evicted_after_the_lookup(self) -> None:
        """What is evicted between lookup and load is a miss that is shown; the run goes on."""
        requests = [Request(tuple(range(20)), 20 * 512)] * 3  # one prompt, nearly all of the room
        evicted: list[Freed] = []
        look_up = Store.lookup

        def then_evict(store: Store, *keys: Any) -> int:
            found = look_up(store, *keys)
            if found == 20 and not evicted:  # the tail of what was found, which is the oldest
                evictor = Evictor(self.root)
                evicted.append(evictor.evict(5 * block_file_nbytes(), time.time_ns()))
            return found

        with mock.patch.object(Store, "lookup", then_evict):
            done = replay(self.root, requests, silent, max_bytes=22 * block_file_nbytes())

        self.assertEqual([5], [freed.chunks for freed in evicted])
        self.assertEqual((35, 5, 0), (done.hit_blocks, done.vanished_blocks, done.refused_blocks))
        self.assertEqual((25, 40), (done.written_blocks, done.ideal_blocks))

    def test_vanished_without_bounds(self) -> None:
        """Control: where nothing may be evicted a block that is gone stops the replay."""
        look_up = Store.lookup

        def then_delete(store: Store, *keys: Any) -> int:
            found = look_up(store, *keys)
            if found:
                self.files()[0].unlink()
            return found

        with (
            mock.patch.object(Store, "lookup", then_delete),
            self.assertRaisesRegex(MeasurementError, "missing"),
        ):
            replay(self.root, [Request((1, 2, 3), 1536)] * 2, silent)

    def test_trace_files(self) -> None:
        """A trace is read as its format says; anything else is refused with its line."""
        trace = self.root / "trace"
        trace.write_text('{"hash_ids": [4, 9], "input_length": 600}\n' * 3)
        bad = self.root / "bad"
        bad.write_text('{"hash_ids": [1], "input_length": 512}\n{"hash": 3}\n')

        self.assertEqual([(4,)] * 2, [request.whole for request in read(trace, 2)])
        with self.assertRaisesRegex(InputError, "bad, line 2"):
            read(bad)

    def test_command(self) -> None:
        """The command replays a trace and says what policies would have reached."""
        trace = self.root / "trace"
        lines = [
            {"hash_ids": list(r.blocks), "input_length": r.tokens} for r in multi_round(2, 2, 1)
        ]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, text = command("bench", "replay", str(trace), "--json", "--sizes", "100,20%")
        report = json.loads(text)
        hits = {(one["policy"], one["blocks"]): one["hit_ratio"] for one in report["bounded"]}

        self.assertEqual(0, code)
        self.assertEqual((0.5, 0.5), (report["hit_ratio"], hits["LRU", 100]))
        self.assertEqual(0.3, hits["Belady", 1])  # of 5 distinct blocks: the one all have
        self.assertEqual(8, len(hits))

    def test_policies_alone(self) -> None:
        """Without the store it prints the table only; what makes no sense is refused."""
        trace = self.root / "trace"
        trace.write_text('{"hash_ids": [4], "input_length": 600, "timestamp": 9}\n' * 3)
        words = ("bench", "replay", str(trace), "--simulated", "--sizes")
        code, text = command(*words, "1", "--policies", "all")

        self.assertEqual(0, code)
        for expected in ("ARC", "second touch", "0.6667 +0.00 0.50"):
            self.assertIn(expected, text)
        self.assertNotIn("lookup", text)
        for wrong in (("0",), ("x%",), ("1", "--policies", "LIFO")):
            with self.subTest(wrong), contextlib.redirect_stderr(io.StringIO()):
                self.assertNotEqual(0, command(*words, *wrong)[0])


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

    def test_command(self) -> None:
        """The command prints bandwidths, metadata and what is worth loading."""
        words = ("--tiny", "--path", str(self.root), "--model", "Qwen3-8B", "--prefill", "1000")
        code, text = command("bench", *words)

        self.assertEqual(0, code)
        for expected in ("read, warm", "lookup, found", "worth from tokens", "GPU-direct"):
            self.assertIn(expected, text)

    def test_bucket(self) -> None:
        """Of a bucket whole loads are measured; nothing stays there, and its tables are shown."""
        pytest.importorskip("obstore")
        url = memory_url()
        words = ("--tiny", "--path", url, "--model", "1024", "--prefill", "0.001")
        code, report = run_json("bench", *words)

        self.assertEqual((0, 64 * 1024), (code, report["chunk_nbytes"]))
        self.assertEqual([1, 4, 16], [one["chunks"] for one in report["load_times"]])
        self.assertEqual(64, report["worth_loading"]["worth_from_tokens"])
        self.assertEqual([], list(Bucket.at(url).walk()))
        code, text = command("bench", *words)
        self.assertEqual(0, code)
        self.assertIn("worth loading from 64 tokens on", text)

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
