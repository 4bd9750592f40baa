"""Mirrors `vua.cli.warm`, with transformers; servers and vLLM: tests/e2e."""

from __future__ import annotations

import json
import re
import unittest
from importlib.util import find_spec
from pathlib import Path

from commands import run, run_json
from helpers import DirectoryTest
from vua.testing.models import make_model

WORDS = [f"t{number}" for number in range(4, 304)]


class WarmTest(DirectoryTest):
    def file(self, name: str, *lines: str) -> Path:
        """A file of prompts."""
        path = self.root / name
        path.write_text("\n".join(lines))
        return path

    @unittest.skipUnless(find_spec("transformers"), "transformers is not installed")
    def test_transformers(self) -> None:
        """What is computed is stored, and told once; the second time it is found."""
        model, path = make_model(self.root / "model"), self.root / "kv"
        ids = list(range(4, 204))
        prompts = self.file(
            "prompts.jsonl",
            json.dumps({"prompt": " ".join(WORDS)}),
            "",
            json.dumps({"prompt": [*ids[:130], *ids]}),
            json.dumps({"prompt": ids}),
            json.dumps({"prompt": " ".join(WORDS[::-1])}),
        )
        words = ("warm", prompts, "--engine", "transformers", "--model", model, "--path", path)
        code, out, _ = run(*words, "--limit", "3")
        self.assertEqual(0, code)
        # 300 tokens have 4 chunks of 64; the next ones begin with 2 and 3 of these
        rows = [[1, 300, 0, 256], [3, 330, 128, 192], [4, 200, 192, 0], ["all", 830, 320, 448]]
        self.assertEqual([list(map(str, row)) for row in rows],
                         [line.split() for line in out.splitlines()[1:]])  # fmt: skip
        code, warm = run_json(*words)
        self.assertEqual(0, code)
        self.assertEqual([256, 320, 192, 0], [one["found"] for one in warm["prompts"]])
        self.assertEqual([0, 0, 0, 256], [one["stored"] for one in warm["prompts"]])
        self.assertEqual(
            (1130, 768, 256), tuple(warm[sum_] for sum_ in ("tokens", "found", "stored"))
        )
        table = (Path(__file__).parents[3] / "docs" / "cli.md").read_text("utf-8")
        section = table.split("### warm", 1)[1].split("###", 1)[0]
        fields = {*warm, *(f"prompts[].{name}" for name in warm["prompts"][0])} - {"prompts"}
        self.assertEqual(fields, set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)))

    def test_prompts(self) -> None:
        """A line that is no prompt is named; nothing is started for it."""
        words = ("--engine", "transformers", "--model", "absent", "--path", self.root / "kv")
        for line in ("{", '{"text": "a"}', '{"prompt": 3}', '{"messages": "a"}', '{"prompt": ""}',
                     "[" * 100_000):  # fmt: skip
            file = self.file("prompts.jsonl", '{"prompt": "a"}', line)
            code, _, err = run("warm", file, *words)
            self.assertEqual((2, 1), (code, len(err.splitlines())), err)
            self.assertIn("line 2", err)
        self.assertFalse((self.root / "kv").exists())

    def test_words(self) -> None:
        """What is missing is said, and what cannot be reached."""
        file = self.file("prompts.txt", "t4 t5")
        for words in (
            [],
            ["--engine", "transformers"],
            ["--engine", "sglang", "--model", "m", "--path", self.root],
            ["--engine", "vllm", "--model", "m", "--path", self.root, "--engine-args", "[]"],
            ["--server", "file:///etc/passwd"],
            ["--server", "http://127.0.0.1:1"],
            ["--server", "http://127.0.0.1:1", "--limit", "0"],
        ):
            code, _, err = run("warm", file, *words)
            self.assertEqual(2, code, err)
            self.assertIn("vua warm", err)


if __name__ == "__main__":
    unittest.main()
