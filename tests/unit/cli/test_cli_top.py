"""Mirrors `vua.cli.looks`, `vua.catalog.directory`, `vua.cli.output`, and `vua verify --repair`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from unittest import mock

import pytest
import torch

from commands import TOKENS, CliTest, run, run_json
from helpers import caches_of, flip
from vua.capacity.lru import touch
from vua.core import VUA, VUAConfig


class TestTop(CliTest):
    """`vua top`."""

    def test_what_goes_on(self) -> None:
        """Chunks that are stored, used and deleted while it looks are counted, by namespace."""
        with mock.patch("time.sleep", side_effect=self.traffic):
            code, report = run_json("top", self.root, "--once")
        rows = {row["model"]: row for row in report["namespaces"]}
        seconds = report["seconds"]

        self.assertEqual(0, code)
        self.assertEqual(5, report["chunks"])
        counts = {
            model: [round(row[k] * seconds) for k in ("new_per_s", "used_per_s", "gone_per_s")]
            for model, row in rows.items()
        }
        self.assertEqual({"llama": [0, 2, 1], "qwen": [2, 1, 0]}, counts)
        self.assertEqual({"60": 3, "3600": 3, "86400": 3}, rows["qwen"]["used_within"])
        self.assertEqual({"-": 1}, rows["qwen"]["salts"])

    def test_last_use_long_ago(self) -> None:
        """How long ago chunks were used counts from now, not from the newest of them."""
        for path in self.files():
            os.utime(path.parent, (0, time.time() - 40 * 86400))
        report = run_json("top", self.root, "--once", "--interval", "0.01")[1]
        nowhere = {"60": 0, "3600": 0, "86400": 0}
        self.assertEqual([nowhere] * 2, [row["used_within"] for row in report["namespaces"]])

    def traffic(self, _: float) -> None:
        """Use and lose chunks of one model, store some of the other."""
        entries = self.entries()
        namespace = entries[0].parents[2]
        order = sorted(entries, key=lambda path: -path.parent.stat().st_mtime_ns)
        fd = os.open(namespace, os.O_RDONLY)
        touch(fd, [path.parent.name for path in order[:2]])
        os.close(fd)
        order[2].unlink()
        order[2].parent.rmdir()
        with VUA(VUAConfig(split_factor=4, model="qwen"), self.root) as vua:
            cache = caches_of(layers=3, heads=2, tokens=12, dim=8, dtype=torch.bfloat16)
            vua.put(TOKENS[:12], cache)


class TestRepair(CliTest):
    """`vua verify --repair`."""

    def test_damage_goes(self) -> None:
        """What is damaged is taken out of sight, the rest is not touched; the next save heals."""
        entries = self.entries()
        sound = {path: path.read_bytes() for path in entries}
        flip(entries[0], 4100)
        entries[1].unlink()
        entries[1].symlink_to("/etc/passwd")
        self.assertEqual(1, run("verify", self.root)[0])
        self.assertTrue(entries[0].exists())
        code, report = run_json("verify", self.root, "--repair")
        (one,) = [row for row in report["namespaces"] if row["model"] == "llama"]
        self.assertEqual((0, 2, 2), (code, one["removed"], len(one["problems"])))
        self.assertEqual([False, False, True], [os.path.lexists(path) for path in entries])
        self.assertEqual(sound[entries[2]], entries[2].read_bytes())
        self.assertEqual(0, run("verify", self.root)[0])
        self.put("llama", 3)
        healed = [path.read_bytes()[4096:] == sound[path][4096:] for path in entries]
        self.assertEqual([True] * 3, healed)

    def test_what_stays(self) -> None:
        """What cannot be mended so is told, and is still damage."""
        namespace = self.entries()[0].parents[2]
        (namespace / "namespace.json").write_text("{")
        code, out, _ = run("verify", self.root, "--repair")
        self.assertEqual(1, code)
        self.assertIn("next save writes it anew", out)


LARGE = """
    import sys
    from vua.capacity import spaces
    from vua.cli import main
    spaces._LARGE = 0
    sys.exit(main(sys.argv[1:]))
"""


class TestSpread(CliTest):
    """A large namespace is looked at by several processes."""

    @pytest.mark.thorough
    def test_same_answers(self) -> None:
        """They say what one process says, damage included."""
        flip(self.entries()[0], 4100)
        for command in (["du", "--exact"], ["ls", "--long"], ["verify"], ["gc", "--quick"], ["gc"]):
            arguments = [command[0], str(self.root), *command[1:]]
            code, alone = run_json(*arguments)
            script = [sys.executable, "-c", textwrap.dedent(LARGE), *arguments, "--json"]
            done = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300)
            self.assertEqual((code, ""), (done.returncode, done.stderr))
            self.assertEqual(self.steady(alone), self.steady(json.loads(done.stdout)))

    @staticmethod
    def steady(report: dict[str, object]) -> dict[str, object]:
        """What does not change from one look to the next."""
        return {name: report[name] for name in report if name not in ("seconds", "free_nbytes")}
