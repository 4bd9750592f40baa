"""Traces of requests, through the real store and through simulated policies."""

from __future__ import annotations

import contextlib
import io
import json

from helpers import DirectoryTest, flip
from lab.__main__ import main
from lab.replay import Request, read, replay
from speed import MeasurementError
from suite.traces import multi_round
from vua.capacity.spaces import silent
from vua.errors import InputError


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

    def test_damage_stops_the_replay(self) -> None:
        """Control: a block that does not load as what was stored is no hit."""
        requests = [Request((1, 2, 3), 1536)]
        replay(self.root, requests, silent)
        flip(self.files()[0], 4200)

        with self.assertLogs("vua", "WARNING"), self.assertRaises(MeasurementError):
            replay(self.root, requests, silent)

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
        code, text = command("replay", str(trace), "--json", "--sizes", "100,20%")
        report = json.loads(text)
        hits = {(one["policy"], one["blocks"]): one["hit_ratio"] for one in report["bounded"]}

        self.assertEqual(0, code)
        self.assertEqual((0.5, 0.5), (report["hit_ratio"], hits["LRU", 100]))
        self.assertEqual(0.3, hits["Belady", 1])  # of 5 distinct blocks: the one all have
        self.assertEqual(8, len(hits))
