"""Mirrors `vua.connector.load_policy` and `vua.capacity.upkeep`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from commands import run, told
from helpers import DirectoryTest, caches_of, until
from vua.capacity.upkeep import Totals, advice, parted_at, prefills_of, saved_at, saved_today
from vua.connector.load_policy import PrefillSpeed, Savings, savings_at
from vua.connector.log import logger
from vua.core import VUA, VUAConfig
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.storage.mark import make_mark

QUICK = mock.patch("vua.connector.load_policy._FIRST_S", 0.01)
HANGING = mock.patch("vua.connector.load_policy._END_S", 0.01)
NOON = 1_700_000_000.0  # 2023-11-14
DAY = "2023-11-14"
NAME, OTHER = "ab" * 32, "cd" * 32
ENDS = {"short": 3, "64": 20, "128": 1, "512": 2, "whole": 4}
"""Where the prompts of :meth:`TestSavings.prompts` part from what is stored."""


class TestSavings(DirectoryTest):
    """Engines whose prefills take 2 ms a token."""

    def setUp(self) -> None:
        super().setUp()
        make_mark(self.root)
        self.now = NOON

    def engine(self, kind: str = "k", prefills: int = 3, **security: Any) -> Savings:
        speed = PrefillSpeed(64)
        for _ in range(prefills):
            speed.measured(1000, 500_000, 2.0)
        savings = Savings(speed, wall=lambda: self.now)
        savings.keep_at(self.root, kind, Security(**security))
        self.addCleanup(savings.close)
        return savings

    def test_totals(self) -> None:
        """All engines' files are added up, by day."""
        for _ in range(2):
            engine = self.engine()
            engine.looked_up(NAME, 3, 4, 64)
            engine.loaded(100, 400, 0.05)
            engine.close()
        self.now += 86_400
        engine = self.engine()
        engine.looked_up(NAME, 0, 7, 64)
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
        engine.looked_up(NAME, 1, 1, 64)
        engine.loaded(100, 0, 0.05, rows=2)
        self.assertIn("unknown time saved (its engine", str(engine.total))
        self.assertIsNone(engine.total.describe()["saved_s"])
        for _ in range(3):
            speed.measured(1000, 500_000, 2.0)
        self.assertEqual(Totals(1, 1, 200, 200, engine.total.saved_s), engine.total)
        self.assertAlmostEqual(0.4 - 0.05, engine.total.saved_s)

    def test_restarted(self) -> None:
        """A new engine takes the prefills of the latest one of its kind."""
        for kind, prefills in (("k", 3), ("other", 9)):
            engine = self.engine(kind, prefills)
            engine.looked_up(NAME, 0, 1, 64)
            engine.close()
        for kind, known in (("k", True), ("x", False), ("", False)):
            engine = self.engine(kind, prefills=0)
            engine.loaded(100, 0, 0.05)
            engine.close()
            self.assertEqual(known, engine.total.priced_tokens > 0, kind)

    @QUICK
    def test_short_prompts(self) -> None:
        """Short prompts, whose tokens take five times as long, are not the price of a long load.

        Neither of an engine that has computed long ones before, nor of one that was restarted.
        """
        speed = PrefillSpeed(64)
        for files in (1, 2):
            engine = Savings(speed, wall=lambda: self.now)
            engine.keep_at(self.root, "k", Security())
            self.addCleanup(engine.close)
            for _ in range(3 if files == 1 else 0):
                speed.measured(1000, 500_000, 2.0)
            engine.looked_up(NAME, 0, 1, 64)
            until(lambda files=files: self.kept() == files)
            for _ in range(40):
                speed.measured(100, 5_000, 1.0)
            for tokens, saved_s in ((1000, 2.0), (100, 1.0)):
                before_s = engine.total.saved_s
                engine.loaded(tokens, 0, 0.0)
                self.assertAlmostEqual(saved_s, engine.total.saved_s - before_s)
            engine.close()
            speed = PrefillSpeed(64)

    def kept(self) -> int:
        return len([*(self.root / ".upkeep" / "saved").glob("*")])

    def test_forged(self) -> None:
        """With the key what it did not make is not counted: neither by tools nor by engines."""
        self.now = time.time()
        own, other = (str(self.root / name) for name in ("own", "other"))
        for key_file in (own, other):
            write_key(Path(key_file))
        engine = self.engine(key_file=own)
        engine.looked_up(NAME, 1, 2, 64)
        engine.close()
        (path,) = (self.root / ".upkeep" / "saved").iterdir()
        made = path.read_bytes()
        path.with_name("renamed").write_bytes(made)
        path.with_name("bare").write_bytes(made.partition(b"\n")[0])
        changed = made.replace(b"[2, 1,", b"[7, 1,")
        self.assertNotEqual(made, changed)
        path.with_name("changed").write_bytes(changed)
        for kind, key_file in (("plain", None), ("foreign", other)):
            forger = self.engine(kind, key_file=key_file)
            forger.looked_up(NAME, 1, 2, 64)
            forger.close()
            self.assertTrue(prefills_of(self.root, kind))
            self.assertEqual([], prefills_of(self.root, kind, own))
        self.assertTrue(prefills_of(self.root, "k", own))
        for each, known in ((["--key-file", own], "1 of 2 "), ([], "6 of 17 ")):
            self.assertIn(f", {known}chunks found", run("ls", self.root, *each)[1])
        path.write_bytes(changed)
        self.assertEqual({}, saved_at(self.root, own))
        Path(own).chmod(0o644)
        code, _, problem = run("ls", self.root, "--key-file", own)
        self.assertEqual(2, code)
        self.assertIn("has mode 644", problem)

    def test_key_is_gone(self) -> None:
        """An engine whose key is gone goes on, and notes nothing until it is there again."""
        write_key(self.root / "own")
        engine = self.engine(key_file=str(self.root / "own"))
        (self.root / "own").rename(self.root / "gone")
        engine.looked_up(NAME, 1, 2, 64)
        engine.close()
        self.assertEqual(0, self.kept())
        (self.root / "gone").rename(self.root / "own")
        engine.looked_up(NAME, 1, 2, 64)
        engine.close()
        self.assertEqual(1, self.kept())
        self.assertEqual(Totals(4, 2), engine.total)

    @QUICK
    @HANGING
    def test_storage_hangs(self) -> None:
        """An engine ends, though its file cannot be written."""
        engine, answer = self.engine(), threading.Event()
        self.addCleanup(answer.set)
        hanging = {"side_effect": lambda *_, **__: answer.wait()}
        with mock.patch("vua.connector.load_policy.atomic_write", **hanging) as writing:
            engine.looked_up(NAME, 1, 2, 64)
            until(lambda: writing.called)
            engine.close()

    def test_no_file(self) -> None:
        """An engine whose directory is gone, or that names none, goes on."""
        for where in (self.root / "gone", [], "s3://bucket/x"):
            engine = self.engine()
            engine.keep_at(where, "k", Security())
            engine.looked_up(NAME, 1, 2, 64)
            engine.close()
            self.assertEqual(Totals(2, 1), engine.total)
        self.assertIsNone(saved_today("s3://bucket/x"))

    def test_kinds(self) -> None:
        """Log, tools and page tell one number, also of sealed files and of tiers."""
        write_key(self.root / "key")
        tokens = list(range(8))
        plain, sealed, near = (self.root / name for name in ("plain", "sealed", "near"))
        security = Security(key_file=str(self.root / "key"))
        for root, path, config in (
            (plain, str(plain), VUAConfig(split_factor=4)),
            (sealed, str(sealed), VUAConfig(split_factor=4, security=security)),
            (near, [str(near), str(self.root / "far")], VUAConfig(split_factor=4)),
        ):
            with (
                self.assertLogs(logger("savings"), "INFO") as logged,
                VUA(config, path) as vua,
            ):
                vua.put(tokens, caches_of(layers=1, heads=1, tokens=8, dim=8))
                vua.get_closest([*tokens, 7, 7, 7, 7])
            self.assertRegex(told(root), "^unknown time saved .* 8 tokens loaded, 2 of 3 chunks")
            self.assertIn(f"began: {told(root)}", logged.records[-1].getMessage())
            ((_, noted),) = parted_at(root).items()
            self.assertEqual([{"16": 1}], [*noted.values()])

    def test_some_priced(self) -> None:
        """Beside an engine that knows its prefills the line says whose time is known."""
        engine, library = self.engine(), savings_at(self.root, Security())
        self.now = time.time()
        engine.loaded(1000, 0, 0.5)
        library.loaded(160, 0, 0.5)
        for each in (engine, library):
            each.close()
        said = "today: 1.5 s saved by 1,000 of 1,160 tokens loaded, "
        self.assertIn(said, run("ls", self.root)[1])

    def prompts(self, engine: Savings, name: str = NAME) -> None:
        """Thirty prompts."""
        for found, asked, times in ((0, 0, 3), (0, 9, 20), (1, 9, 1), (7, 9, 2), (9, 9, 4)):
            for _ in range(times):
                engine.looked_up(name, found, asked, 64)

    def test_all_processes(self) -> None:
        """All engines' counts are added up, by day and namespace."""
        for name in (NAME, NAME, OTHER):
            engine = self.engine()
            self.prompts(engine, name)
            engine.close()
        self.now += 86_400
        engine = self.engine()
        engine.looked_up(NAME, 1, 9, 64, before=1000)
        engine.looked_up(NAME, 5, 9, 48)  # in tokens 240 to 288
        engine.close()
        twice = Counter({name: 2 * number for name, number in ENDS.items()})
        self.assertEqual(
            {DAY: {NAME: twice, OTHER: ENDS}, "2023-11-15": {NAME: {"2048": 1, "512": 1}}},
            parted_at(self.root),
        )
        self.assertEqual(729, saved_at(self.root)[DAY].asked_chunks)

    def test_nothing_of_prompts(self) -> None:
        """A file has the mode of the cache's files, and numbers alone."""
        engine = self.engine(prefills=0, group_read=True)
        self.prompts(engine)
        engine.close()
        (path,) = (self.root / ".upkeep" / "saved").iterdir()
        self.assertEqual(0o640, path.stat().st_mode & 0o777)
        kept = {"kind": "k", "prefills": [], "days": {DAY: [243, 51, 0, 0, 0.0]}}
        kept["parted"] = {f"{DAY} {NAME}": ENDS}
        self.assertEqual(kept, json.loads(path.read_bytes()))

    def test_bounds(self) -> None:
        """However many days, namespaces and lengths there are, a file is small and is read."""
        engine = self.engine()
        for day in range(20):
            self.now = NOON + 86_400 * day
            for number in range(20):
                for length in range(30):
                    engine.looked_up(f"{number:064}", 1 << length, 1 << 40, 64)
        engine.close()
        (path,) = (self.root / ".upkeep" / "saved").iterdir()
        self.assertLess(path.stat().st_size, 1 << 14)
        ((day, spaces),) = parted_at(self.root).items()
        self.assertEqual("2023-12-03", day)
        self.assertEqual(30, len(spaces[f"{19:064}"]))

    def test_odd_files(self) -> None:
        """Files that make no sense, and invalid values, are left out; the rest is read."""
        engine = self.engine()
        self.prompts(engine)
        engine.close()
        (path,) = (self.root / ".upkeep" / "saved").iterdir()
        at = f"{DAY} {NAME}"
        odd = [b"", b"[]", b"{}", b"[" * 9999, b"\xff" * 99, os.urandom(99), b'{"days": 3}']
        odd += [json.dumps({"days": days}).encode() for days in (
            {"x": [1]}, {"long ago": [1, 2, 3, 4, 5]}, {DAY: [1, 2, 3, 4]},
            {DAY: [1, 2, 3, 4, 5], "none": 3}, {DAY: [float("nan"), 2, 3, 4, 5]},
            {DAY: ["1", 2, 3, 4, 5]},
        )]  # fmt: skip
        odd += [json.dumps({"days": {}, "parted": parted}).encode() for parted in (
            3, [], None, {f"2023-99-9 {NAME}": {"64": 1}}, {f"x {at}": {"64": 1}},
            {at: 3}, {at: ["64"]}, {at: {"64": "1"}}, {at: {"64": float("nan")}}, {at: {"x": 1}},
            {at: {"-64": 1}}, {at: {"6_4": 1}}, {at: {"\u0663": 1}}, {at: {"9" * 5000: 1}},
            {at: {"64": -9}}, {at: {"64": 1e300}}, {at: {"": 1}}, {at: {"64\n": 1}},
        )]  # fmt: skip
        odd.append(path.read_bytes() + b" " * (1 << 15) + b"x")
        for number, data in enumerate(odd):
            path.with_name(f"odd{number}").write_bytes(data)
        os.mkfifo(path.with_name("pipe"))
        path.with_name("link").symlink_to(path)
        self.assertEqual({DAY: Totals(243, 51)}, saved_at(self.root))
        self.assertEqual({DAY: {NAME: ENDS}}, parted_at(self.root))

    def test_advice(self) -> None:
        """The sentence is of what most prompts do, and there is none of a few."""
        part = "prompts part within their first"
        for parted, said in (
            ({"64": 7}, ""),
            (ENDS, f"20 of 30 {part} 64 tokens: a date, a name or a salt?"),
            ({"64": 5, "512": 6}, f"11 of 11 {part} 512 tokens: another order, or a cut history?"),
            ({"64": 300, "whole": 1000}, "1,000 of 1,300 prompts were found whole"),
            ({"short": 8}, "8 of 8 prompts are shorter than a chunk: a smaller chunk_tokens?"),
        ):  # fmt: skip
            self.assertEqual(said, advice(Counter(parted)))

    @QUICK
    def test_each_hour(self) -> None:
        """A running engine says it once an hour, and each at its end; of a few prompts nothing."""
        said = "began: nothing loaded, 51 of 243 chunks found; 20 of 30 prompts part within their"
        past = SimpleNamespace(**vars(time) | {"monotonic": lambda: time.monotonic() + 3601})
        engine, asked = self.engine(), threading.Event()
        first = mock.patch(
            "vua.connector.load_policy.prefills_of", side_effect=lambda *_: asked.wait() * []
        )
        with self.assertLogs(logger("savings"), "INFO") as logged:
            with mock.patch("vua.connector.load_policy.time", past), first:
                self.prompts(engine)
                asked.set()
                until(lambda: logged.output)
            engine.looked_up(NAME, 1, 2, 64)
            engine.close()
        first, last = (record.getMessage() for record in logged.records)
        self.assertIn(said, first)
        self.assertIn("began: nothing loaded, 52 of 245 chunks found; 20 of 31 prompts part", last)
        few = self.engine()
        few.looked_up(NAME, 0, 0, 64)
        with self.assertNoLogs(logger("savings"), "INFO"):
            few.close()
