"""Starts `vua ui` in a process of its own, and asks it over HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from helpers import until


class Served:
    """`vua ui` in a process of its own, asked over HTTP."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        place, _, self.token = url.partition("/#token=")
        self.port = int(place.rpartition(":")[2])

    def ask(
        self, method: str, path: str, body: object = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer; by default with the token."""
        line = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            said = {"Authorization": f"Bearer {self.token}", **headers}
            sent = None if body is None else json.dumps(body)
            line.request(method, path, body=sent, headers=said)
            answer = line.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            line.close()

    def overview(self) -> Any:
        status, _, content = self.ask("GET", "/api/overview")
        if status != 200:
            raise AssertionError(content)
        return json.loads(content)

    def looked(self, line: str = "") -> Any:
        """Wait until files were checked, and the first line begins so; return what is shown."""

        def done() -> Any:
            seen = self.overview()
            return seen if seen["level"] != "note" and seen["line"].startswith(line) else None

        return until(done)


@contextlib.contextmanager
def served(*words: object) -> Iterator[Served]:
    """Start `vua ui`, and end it with Ctrl-C."""
    command = [sys.executable, "-m", "vua", "ui", *map(str, words), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = "".join(iter(process.stdout.readline, "}\n"))
        yield Served(process, json.loads(said + "}")["url"])
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
        process.stdout.close()
