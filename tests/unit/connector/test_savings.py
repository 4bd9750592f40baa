"""Mirrors `vua.connector.savings` and `vua.capacity.saved`."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from unittest import mock

from commands import run
from helpers import DirectoryTest, until
from vua.capacity.saved import Totals, saved_at, saved_today
from vua.connector.load_policy import PrefillSpeed
from vua.connector.savings import Savings
from vua.storage.mark import make_mark

NOON = 1_700_000_000.0  # 2023-11-14
DAY = "2023-11-14"


class TestSavings(DirectoryTest):
    """Engines whose prefills take 2 ms a token."""

    def setUp(self) -> None:
        super().setUp()
        make_mark(self.root)
        self.now = NOON

    def engine(self, kind: str = "k", prefills: int = 3) -> Savings:
        speed = PrefillSpeed(64)
        for _ in range(prefills):
            speed.measured(1000, 500_000, 2.0)
        savings = Savings(speed, wall=lambda: self.now)
        savings.keep_at(self.root, kind, 0o600)
        self.addCleanup(savings.close)
        return savings

    def test_totals(self) -> None:
        """All engines' files are added up, by day."""
        for _ in range(2):
            engine = self.engine()
            engine.looked_up(3, 4)
            engine.loaded(100, 400, 0.05)
            engine.close()
        self.now += 86_400
        engine = self.engine()
        engine.looked_up(0, 7)
        engine.close()
        first, second = saved_at(self.root).values()
        self.assertEqual(Totals(8, 6, 200, 200, first.saved_s), first)
        self.assertAlmostEqual(2 * (0.2 - 0.05), first.saved_s)
        self.assertEqual(Totals(7), second)
        self.assertEqual("0.3 s saved, 200 tokens loaded, 6 of 8 chunks found", str(first))
        self.assertEqual("nothing loaded, 0 of 7 chunks found", str(second))

    def test_unknown(self) -> None:
        """Before three prefills the time is unknown; then all loads get their price."""
        speed = PrefillSpeed(64)
        engine = Savings(speed, wall=lambda: self.now)
        engine.looked_up(1, 1)
        engine.loaded(100, 0, 0.05, rows=2)
        self.assertIn("unknown time saved", str(engine.total))
        self.assertIsNone(engine.total.describe()["saved_s"])
        for _ in range(3):
            speed.measured(1000, 500_000, 2.0)
        self.assertEqual(Totals(1, 1, 200, 200, engine.total.saved_s), engine.total)
        self.assertAlmostEqual(0.4 - 0.05, engine.total.saved_s)

    def test_first_step_compiles(self) -> None:
        """One of three prefills that took a hundred times as long is not the price."""
        speed = PrefillSpeed(64)
        for tokens, seconds in ((1000, 200.0), (500, 1.0), (1000, 2.0)):
            speed.measured(tokens, tokens * tokens / 2, seconds)
        engine = Savings(speed)
        engine.loaded(1000, 0, 0.0)
        self.assertAlmostEqual(2.0, engine.total.saved_s, delta=0.5)

    def test_restarted(self) -> None:
        """A new engine takes the prefills of the latest one of its kind."""
        for kind, prefills in (("k", 3), ("other", 9)):
            engine = self.engine(kind, prefills)
            engine.looked_up(0, 1)
            engine.close()
        for kind, known in (("k", True), ("x", False), ("", False)):
            engine = self.engine(kind, prefills=0)
            engine.loaded(100, 0, 0.05)
            engine.close()
            self.assertEqual(known, engine.total.priced_tokens > 0, kind)

    def test_written_meanwhile(self) -> None:
        """A running engine's file is there soon."""
        engine = self.engine()
        engine.looked_up(1, 2)
        until(lambda: saved_at(self.root) == {DAY: Totals(2, 1)})

    def test_odd_files(self) -> None:
        """Files that make no sense are left out, whatever is in them."""
        engine = self.engine()
        engine.looked_up(1, 2)
        engine.close()
        (path,) = (self.root / ".upkeep" / "saved").iterdir()
        good = json.loads(path.read_bytes())
        odd = [b"", b"[]", b"{}", b"[" * 9999, b"\xff", b'{"days": 3}', b'{"days": {"x": [1]}}']
        days = (
            {"long ago": [1, 2, 3, 4, 5]},
            {DAY: [1, 2, 3, 4]},
            {DAY: [1, 2, 3, 4, 5], "none": 3},
            {DAY: [float("nan"), 2, 3, 4, 5]},
            {DAY: ["1", 2, 3, 4, 5]},
        )
        odd += [json.dumps(good | {"days": each}).encode() for each in days]
        odd.append(json.dumps(good).encode() + b" " * (1 << 15) + b"x")
        for at, data in enumerate(odd):
            path.with_name(f"odd{at}").write_bytes(data)
        os.mkfifo(path.with_name("pipe"))
        path.with_name("link").symlink_to(path)
        self.assertEqual({DAY: Totals(2, 1)}, saved_at(self.root))

    def test_storage_hangs(self) -> None:
        """An engine ends, though its file cannot be written."""
        engine, answer = self.engine(), threading.Event()
        self.addCleanup(answer.set)
        hanging = {"side_effect": lambda *_, **__: answer.wait()}
        with mock.patch("vua.connector.savings.atomic_write", **hanging) as writing:
            engine.looked_up(1, 2)
            until(lambda: writing.called)
            engine.close()

    def test_no_file(self) -> None:
        """An engine whose directory is gone goes on."""
        engine = self.engine()
        engine.keep_at(self.root / "gone", "k", 0o600)
        engine.looked_up(1, 2)
        engine.close()
        self.assertEqual(Totals(2, 1), engine.total)
        self.assertIsNone(saved_today("s3://bucket/x"))

    def test_tools(self) -> None:
        """`vua ls` and `vua top` tell the same sentence."""
        engine = self.engine()
        self.now = Path(self.root).stat().st_mtime
        engine.looked_up(3, 4)
        engine.loaded(1000, 0, 0.5)
        engine.close()
        line = f"today: {engine.total}"
        self.assertEqual("today: 1.5 s saved, 1,000 tokens loaded, 3 of 4 chunks found", line)
        self.assertIn(line, run("ls", self.root)[1])
        self.assertIn(line, run("top", self.root, "--once", "--interval", "0.05s")[1])
