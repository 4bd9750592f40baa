"""Mirrors `vua.cli.warm`, with a server of ours; those of engines: tests/e2e."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from commands import documented, run, run_json
from helpers import DirectoryTest


class Server(ThreadingHTTPServer):
    """A server with OpenAI's API that keeps what it is asked."""

    def __init__(self, usage: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.usage = usage

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, body))
        is_long = len(str(body)) > 1000
        self._send(400 if is_long else 200, {"usage": self.server.usage})

    def _send(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def serving(usage: dict[str, Any]) -> Iterator[Server]:
    with Server(usage) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class WarmTest(DirectoryTest):
    def file(self, name: str, *lines: object) -> Path:
        path = self.root / name
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts))
        return path

    def test_as_it_is(self) -> None:
        """All of a line goes to the server, for both kinds; one token is asked for by default."""
        more = {
            "cache_salt": "tenant", "chat_template_kwargs": {"enable_thinking": False},
            "kv_transfer_params": {"vua": {"pin": True}}, "temperature": 0.5, "mine": [None, 1.5],
        }  # fmt: skip
        chat = {"messages": [{"role": "user", "content": "hello"}], "tools": [{"a": 1}], **more}
        prompts = self.file("p.jsonl", chat, "", {"prompt": "abc", **more},
                            {"prompt": [1, 2], "model": "other", "max_tokens": 3},
                            {**chat, "max_completion_tokens": 2, "stream": True})  # fmt: skip
        with serving({"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}) as server:
            code, report = run_json("warm", prompts, "--server", f"{server.address}/v1")
        sent = {"model": "served", "max_tokens": 1}
        self.assertEqual(0, code)
        self.assertEqual(
            [
                ("/v1/chat/completions", {**chat, **sent}),
                ("/v1/completions", {"prompt": "abc", **more, **sent}),
                ("/v1/completions", {"prompt": [1, 2], "model": "other", "max_tokens": 3}),
                ("/v1/chat/completions", {**chat, "model": "served", "max_completion_tokens": 2}),
            ],
            server.asked,
        )
        row = {"tokens": 7, "found": 4, "problem": ""}
        self.assertEqual([{"line": line, **row} for line in (1, 3, 4, 5)], report["prompts"])
        self.assertEqual((28, 16), (report["tokens"], report["found"]))
        fields = {*report, *(f"prompts[].{name}" for name in report["prompts"][0])} - {"prompts"}
        self.assertEqual(fields, documented("warm"))

    def test_what_is_known(self) -> None:
        """What the server does not say is not told, and a refusal is told; all lines are sent."""
        prompts = self.file("p", {"prompt": "t " * 1000}, {"prompt": "short"})
        with serving({}) as server:
            code, out, _ = run("warm", prompts, "--server", server.address, "--model", "m")
        self.assertEqual(1, code)
        self.assertEqual("short", server.asked[1][1]["prompt"])
        lines = out.splitlines()
        self.assertRegex(lines[1], r"1 +- +- +400: ")
        self.assertRegex(lines[2], r"2 +- +-")
        self.assertNotIn("stored", " ".join(lines[:4]))

    def test_prompts(self) -> None:
        """A line that is no request is named, and nothing is sent."""
        for line in ("{", '{"text": "a"}', '{"prompt": 3}', '{"messages": "a"}', '{"prompt": ""}',
                     "[" * 100_000, '"a"', '{"prompt": "a", "messages": [1]}'):  # fmt: skip
            file = self.file("prompts.jsonl", {"prompt": "a"}, line)
            code, _, err = run("warm", file, "--server", "http://127.0.0.1:1")
            self.assertEqual((2, 1), (code, len(err.splitlines())), err)
            self.assertIn("line 2", err)

    def test_words(self) -> None:
        """What is missing is said, and what cannot be reached."""
        file = self.file("prompts", {"prompt": "t4 t5"})
        for words in (
            [],
            ["--server", "file:///etc/passwd"],
            ["--server", "http://127.0.0.1:1"],
        ):
            code, _, err = run("warm", file, *words)
            self.assertEqual(2, code, err)
            self.assertIn("vua warm", err)
