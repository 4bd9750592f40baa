"""Mirrors `vua.cli.warm`, with transformers and a server of ours; those of engines: tests/e2e."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from commands import run, run_json
from helpers import SOON_S, DirectoryTest, caches_of
from seals import ALICE, KeysTest
from small_models import make_model
from vua.core import VUA, VUAConfig
from vua.security.settings import Security

WORDS = [f"t{number}" for number in range(4, 304)]
PROMPT = list(range(10))
"""Of two whole chunks of 4 tokens."""


class Engine(ThreadingHTTPServer):
    """A server with OpenAI's API that stores what it is asked, some time behind its answers."""

    def __init__(self, path: str | Path, security: Security, delay_s: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.vua = VUA(VUAConfig(split_factor=4, security=security), path)
        self.delay_s = delay_s
        self.saves: list[threading.Thread] = []

    @property
    def address(self) -> str:
        """Its URL."""
        return f"http://127.0.0.1:{self.server_port}"

    def store(self, ids: list[int]) -> None:
        """Store a prompt later."""
        time.sleep(self.delay_s)
        whole = torch.tensor(ids[: len(ids) - len(ids) % 4])
        self.vua.put(whole, caches_of(layers=1, heads=1, tokens=len(whole), dim=8))


class Answer(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Engine

    def do_POST(self) -> None:
        """Answer a completion of token ids, and store these."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids = asked["prompt"]
        saving = threading.Thread(target=self.server.store, args=[ids])
        self.server.saves.append(saving)
        saving.start()
        usage = {"prompt_tokens": len(ids)}
        body = json.dumps({"usage": usage, "choices": [{"prompt_token_ids": ids}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(path: str | Path, security: Security, delay_s: float = 0.0) -> Iterator[str]:
    """Have an engine answer; gives its address."""
    with Engine(path, security, delay_s) as engine, engine.vua:
        thread = threading.Thread(target=engine.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield engine.address
        finally:
            engine.shutdown()
            for one in (thread, *engine.saves):
                one.join()


class WarmTest(DirectoryTest):
    def file(self, name: str, *lines: str) -> Path:
        """A file of prompts."""
        path = self.root / name
        path.write_text("\n".join(lines))
        return path

    @pytest.mark.thorough
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
            [
                "--engine",
                "transformers",
                "--model",
                "m",
                "--path",
                self.root,
                "--engine-args",
                "[]",
            ],
            ["--server", "file:///etc/passwd"],
            ["--server", "http://127.0.0.1:1"],
            ["--server", "http://127.0.0.1:1", "--limit", "0"],
        ):
            code, _, err = run("warm", file, *words)
            self.assertEqual(2, code, err)
            self.assertIn("vua warm", err)


class ServerTest(KeysTest):
    """A server that stores with a key of the directory, or without one."""

    def setUp(self) -> None:
        """Write a prompt, and the settings with the directory's own key."""
        super().setUp()
        self.prompts = self.root / "prompts.jsonl"
        self.prompts.write_text(json.dumps({"prompt": PROMPT}))
        self.own = Security(key_file=str(self.key))

    def warm(self, address: str, *words: str | Path) -> tuple[int, int | None, str]:
        """Exit code, what is newly stored of the prompt, and what is said on stderr."""
        where = [] if "--path" in words else ["--path", self.cache]
        code, out, err = run(
            *("warm", self.prompts, "--server", address, "--model", "any", "--json"),
            *(*where, *words),
        )
        report: dict[str, Any] = json.loads(out)
        return code, report["prompts"][0]["stored"], err

    def test_keyed(self) -> None:
        """What is stored under names that are secret is counted by who has the key."""
        for own in (self.own, Security(key_file=str(self.key), encrypt=True)):
            words = ["--key-file", self.key, *(["--encrypt"] if own.encrypt else [])]
            with self.subTest(own), serving(self.cache, own) as address:
                self.assertEqual((0, 8, ""), self.warm(address, *words))
                self.assertEqual((0, 0, ""), self.warm(address, *words))

    @pytest.mark.thorough
    @mock.patch("vua.cli.warm._PATIENCE_S", SOON_S)
    @mock.patch("vua.cli.warm._BRIEFLY_S", 0.5)
    def test_other_names(self) -> None:
        """Who gives no key, another one, or one too many is told so without a long wait."""
        sealed, other = f"sealed (gmac) with key {self.id_of(self.key)}", self.id_of(self.wrong)
        hidden = f"sealed (aes-256-gcm) with key {self.id_of(self.key)}"
        for stored, words, found, expected in (
            (self.own, [], sealed, "not sealed"),
            (self.own, ["--key-file", self.wrong], sealed, f"sealed (gmac) with key {other}"),
            (self.own, ["--key-file", self.key, "--encrypt"], sealed, hidden),
            (Security(), ["--key-file", self.key], "not sealed", sealed),
        ):
            self.cache = self.root / f"cache-{len(words)}-{found}-{expected}"
            with self.subTest(words), serving(self.cache, stored) as address:
                for _ in range(2):  # newly stored; there already
                    start_s = time.monotonic()
                    code, new, err = self.warm(address, *words)
                    self.assertLess(time.monotonic() - start_s, SOON_S)
                    self.assertEqual((2, None), (code, new))
                    self.assertIn(f"found: chunks that are {found}; expected: {expected}", err)
                    self.assertIn("--key-file", err)

    @unittest.skipUnless(find_spec("obstore"), "obstore is not installed")
    @mock.patch("vua.cli.warm._BRIEFLY_S", 0.5)
    def test_bucket(self) -> None:
        """Both hold for buckets."""
        from buckets import memory_url

        url = memory_url()
        with serving(url, self.own) as address:
            words = ("--path", url)
            self.assertEqual((0, 8, ""), self.warm(address, *words, "--key-file", self.key))
            code, new, err = self.warm(address, *words)
        self.assertEqual((2, None), (code, new))
        self.assertIn(f"with key {self.id_of(self.key)}; expected: not sealed", err)

    @pytest.mark.thorough
    @mock.patch("vua.cli.warm._BRIEFLY_S", 0.1)
    def test_others(self) -> None:
        """What others store in the directory with keys of their own does not end the wait."""
        for stored, words in ((Security(), []), (self.own, ["--key-file", self.key])):
            shutil.rmtree(self.cache, ignore_errors=True)
            self.save(self.store(security=self.security()), ALICE)
            with self.subTest(words), serving(self.cache, stored, delay_s=1.0) as address:
                self.assertEqual((0, 8, ""), self.warm(address, *words))

    def test_engines(self) -> None:
        """Transformers cannot store with keys; vLLM and SGLang are asked as servers alone."""
        words = ("--model", "absent", "--path", self.cache)
        keys = ("--key-file", self.key)
        code, _, err = run("warm", self.prompts, "--engine", "transformers", *words, *keys)
        self.assertEqual(2, code)
        self.assertIn("without keys", err)
        for engine in ("vllm", "sglang"):
            code, _, err = run("warm", self.prompts, "--engine", engine, *words)
            self.assertEqual(2, code)
            self.assertIn("--server", err)


if __name__ == "__main__":
    unittest.main()
