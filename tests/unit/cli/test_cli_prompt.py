"""Mirrors `vua.cli.prompt`: the tokens that an engine gets, and what `vua warm` sends."""

from __future__ import annotations

import json
import threading
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from commands import documented, put_prompt, run, run_json
from helpers import DirectoryTest

WORDS = [f"w{number}" for number in range(40)]
TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for one in messages %}{{ one.content or one.tool_calls[0].function.arguments.city }} "
    "{% endfor %}{% if add_generation_prompt %}w39{% endif %}{% if thinking %} w38{% endif %}"
)


def ids_of(text: str, *, bos: bool) -> list[int]:
    """What the model's tokenizer makes of words; BOS is 0."""
    return [0] * bos + [1 + WORDS.index(word) for word in text.split()]


@unittest.skipUnless(find_spec("tokenizers"), "needs tokenizers")
class PromptTest(DirectoryTest):
    """A model whose tokenizer puts BOS before each text, as does its chat template."""

    def setUp(self) -> None:
        from tokenizers import Tokenizer, models, pre_tokenizers, processors

        super().setUp()
        self.cache, self.model = self.root / "cache", self.root / "model"
        self.model.mkdir()
        names = {"<s>": 0, **{word: at for at, word in enumerate(WORDS, 1)}}
        made = Tokenizer(models.WordLevel(names, unk_token="w0"))
        made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        made.add_special_tokens(["<s>"])
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        made.save(str(self.model / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
        (self.model / "tokenizer_config.json").write_text(json.dumps(settings))
        (self.model / "chat_template.jinja").write_text(TEMPLATE)

    def file(self, content: object, name: str = "prompt") -> Path:
        """A file of a text, or of JSON."""
        path = self.root / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    def found(self, content: object, *words: str, name: str = "prompt") -> tuple[int, int]:
        """Tokens of a prompt, and how many of them explain finds."""
        file = self.file(content, name)
        words = ("--prompt", str(file), "--model", str(self.model), *words)
        code, report = run_json("explain", self.cache, *words)
        self.assertEqual(0, code)
        return report["tokens"], report["namespaces"][0]["usable_tokens"]

    def test_begins(self) -> None:
        """What a chat template made keeps its one BOS; a plain text gets one, as completions do."""
        text = " ".join(WORDS[:11])
        put_prompt(self.cache, ids_of(text, bos=True))
        self.assertEqual((12, 12), self.found(text))
        self.assertEqual((12, 12), self.found(f"<s>{text}"))
        self.assertEqual((12, 12), self.found({"prompt": text}))
        self.assertEqual((12, 12), self.found({"prompt": ids_of(text, bos=True)}))
        no_second = {"prompt": f"<s>{text}", "add_special_tokens": False}
        self.assertEqual((12, 12), self.found(no_second))
        self.assertEqual((13, 0), self.found({"prompt": f"<s>{text}"}))  # vLLM gives it two

    @pytest.mark.thorough
    @unittest.skipUnless(find_spec("transformers"), "needs transformers")
    def test_chat(self) -> None:
        """A chat is put into the model's template, with tools and the template's arguments."""
        call = {"function": {"name": "w1", "arguments": '{"city": "w7"}'}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "w2 w3 w4"}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "w5 w6"},
        ]  # fmt: skip
        request = {"messages": messages, "tools": [{"function": {"name": "w1"}}], "max_tokens": 5}
        ids = ids_of("w1 w2 w3 w4 w7 w5 w6 w39", bos=True)
        put_prompt(self.cache, [*ids[:8], *ids_of("w38 w38 w38 w38", bos=False)])
        self.assertEqual((9, 8), self.found(request))
        self.assertEqual((10, 8), self.found({**request, "chat_template_kwargs": {"thinking": 1}}))
        self.assertEqual((8, 8), self.found({**request, "add_generation_prompt": False}))
        self.assertEqual((8, 0), self.found({"messages": messages}))
        self.assertEqual((9, 0), self.found({**request, "cache_salt": "s"}))
        several = "\n".join(json.dumps(one) for one in (request, {"messages": messages}))
        file = self.file(several, "chats.jsonl")
        words = ("--prompt", file, "--model", self.model)
        code, report = run_json("explain", self.cache, *words)
        rows = [(one["line"], one["tokens"], one["namespaces"][0]["usable_tokens"])
                for one in report["prompts"]]  # fmt: skip
        self.assertEqual((0, [(1, 9, 8), (2, 8, 0)]), (code, rows))
        code, out, _ = run("explain", self.cache, *words)
        self.assertEqual(0, code)
        self.assertRegex(out, "(?s)^line 1: .*\nline 2: ")

    def test_unknown(self) -> None:
        """What may change a prompt and is not known is refused in one line, which names it."""
        put_prompt(self.cache, list(range(4)))
        messages = [{"role": "user", "content": "w1"}]
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        for content, name, expected in (
            ({"text": "w1"}, "prompt", "line 1: expected"),
            ([1, 2], "prompt", "line 1: expected"),
            ({"prompt": ["w1", "w2"]}, "prompt", "expected an integer token id"),
            ({"prompt": "w1", "messages": messages}, "prompt", "of one prompt"),
            ({"prompt": ""}, "prompt", "line 1: expected"),
            ({"messages": messages, "documents": []}, "prompt", "'documents' may change"),
            ({"messages": image}, "prompt", "message 0 has no text"),
            ('{"prompt": "w1"}\n{"prompt": 3}', "prompt", "line 2: expected"),
            ('{"prompt": "w1"}\nw1', "prompt", "line 2: expected"),
            ("w1 w2", "chats.jsonl", "line 1: expected"),
            ("[" * 100_000, "chats.jsonl", "found no JSON"),
        ):
            with self.subTest(content if len(str(content)) < 100 else "deep", name=name):
                file = self.file(content, name)
                words = ("--prompt", file, "--model", self.model)
                code, out, err = run("explain", self.cache, *words)
                self.assertEqual((2, "", 1), (code, out, len(err.splitlines())))
                self.assertIn(expected, err)
        self.assertEqual((2, 0), self.found("{w1"))  # a text, if a strange one
        (self.model / "tokenizer.json").write_text("{}")
        words = ("--prompt", self.file("w1"), "--model", self.model)
        self.assertIn("not a tokenizer", run("explain", self.cache, *words)[2])


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
