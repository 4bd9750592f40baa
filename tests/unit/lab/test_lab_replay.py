"""Traces of requests, through the real store and through simulated policies."""

from __future__ import annotations

import contextlib
import io
import json
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from helpers import DirectoryTest, flip
from lab.__main__ import main
from lab.replay import Request, block_file_nbytes, read, replay
from speed import MeasurementError
from suite.traces import multi_round
from vua.capacity.evictor import DeletionTotals, Evictor
from vua.capacity.scan import silent
from vua.errors import InputError
from vua.store.store import Store


def command(*words: str) -> tuple[int, str]:
    """Run `python -m lab` in this process; return its exit code and what it printed."""
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

    @pytest.mark.thorough
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
        evicted: list[DeletionTotals] = []
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

    def write(self, name: str, *lines: tuple[list[int], int]) -> str:
        """A trace of blocks and tokens."""
        trace = self.root / name
        text = (json.dumps({"hash_ids": ids, "input_length": tokens}) for ids, tokens in lines)
        trace.write_text("\n".join(text))
        return str(trace)

    def test_blocks_of_another_size(self) -> None:
        """A trace is read with the size of its blocks; with another one nothing is cut: refused."""
        small = self.write("small", ([1, 2, 3], 130), ([1, 2, 4], 192), ([], 1))
        found = read(Path(small), block_tokens=64)
        self.assertEqual([(1, 2), (1, 2, 4), ()], [request.whole for request in found])
        for size in (512, 128, 32):
            with self.subTest(size), contextlib.redirect_stderr(io.StringIO()) as err:
                words = () if size == 512 else ("--block-tokens", str(size))
                self.assertEqual(2, command("replay", small, "--simulated", *words)[0])
                self.assertRegex(err.getvalue(), rf"line 1: .*blocks of {size}.*--block-tokens")
                self.assertIn("hold about 43 tokens", err.getvalue())

    def test_blocks_that_are_no_prefixes(self) -> None:
        """An id that follows two ids does not stand for a prefix: hits would be counted wrongly."""
        trace = self.write("trace", ([1, 9], 1024), ([2, 9], 1024))
        with self.assertRaisesRegex(InputError, "line 2: block 9 follows 2, and 1"):
            read(Path(trace))

    def test_small_blocks_in_a_store(self) -> None:
        """Blocks of 64 tokens go through the real store, too."""
        requests = [Request(one.blocks, 64 * len(one.blocks), 0.0, 64)
                    for one in multi_round(users=3, rounds=4, blocks=2)]  # fmt: skip
        done = replay(self.root, requests, silent)

        self.assertEqual(done.ideal_blocks, done.hit_blocks)
        self.assertEqual(done.hit_blocks * 64 / done.tokens, done.token_hit_ratio)
        self.assertEqual({block_file_nbytes(64)}, {path.stat().st_size for path in self.files()})

    @pytest.mark.thorough
    def test_too_little_to_learn_from(self) -> None:
        """It is said that the policy has learned nothing, or late: until then it is LRU."""
        short = self.write("short", *[([1, 2], 1024)] * 20)
        long = self.write("long", *[([1, 2], 1024)] * 2000)
        for trace, words in ((short, ("nothing",)), (long, ())):
            with self.subTest(trace), contextlib.redirect_stderr(io.StringIO()) as err:
                self.assertEqual(0, command("replay", trace, "--simulated", "--sizes", "1")[0])
                self.assertEqual(bool(words), "it is LRU" in err.getvalue())
                self.assertTrue(all(word in err.getvalue() for word in words))

    def test_command(self) -> None:
        """The command replays a trace and says what policies would have reached."""
        trace = self.root / "trace"
        lines = [
            {"hash_ids": list(r.blocks), "input_length": r.tokens} for r in multi_round(2, 2, 1)
        ]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        code, text = command("replay", str(trace), "--json", "--sizes", "100,20%")
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
        words = ("replay", str(trace), "--simulated", "--sizes")
        code, text = command(*words, "1", "--policies", "all")

        self.assertEqual(0, code)
        for expected in ("ARC", "second touch", "0.6667 +0.00 0.50"):
            self.assertIn(expected, text)
        self.assertNotIn("lookup", text)
        for wrong in (("0",), ("x%",), ("1", "--policies", "LIFO")):
            with self.subTest(wrong), contextlib.redirect_stderr(io.StringIO()):
                self.assertNotEqual(0, command(*words, *wrong)[0])


if __name__ == "__main__":
    unittest.main()
