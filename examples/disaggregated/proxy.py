"""A proxy in front of a prefill server and a decode server that share one VUA directory.

Each completion goes first to the prefill server, with ``max_tokens=1``, which computes the prompt
and stores its KV cache; then, as it came, to the decode server, which loads it and generates. The
decode server is told (``wait_s``) to wait for chunks that are still being written. A prefill that
fails costs time, not the request: the decode server then computes the prompt itself.

Only the standard library; one thread per connection. An example, not a product: no retries, no
balancing between several servers, no authentication of its own.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger("disaggregated")

COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens", "n", "best_of")
KEPT_HEADERS = ("Authorization", "Content-Type", "X-Request-Id")


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The request whose only purpose is that its prompt is computed and stored."""
    kept = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL}
    return {**kept, "max_tokens": 1, "stream": False}


def for_decode(body: dict[str, Any], wait_s: float) -> dict[str, Any]:
    """The request as it came, with the word that its prompt is being stored by somebody else."""
    params = dict(body.get("kv_transfer_params") or {})
    params["vua"] = {"wait_s": wait_s, **(params.get("vua") or {})}
    return {**body, "kv_transfer_params": params}


class Proxy(BaseHTTPRequestHandler):
    """Serves one connection. The class's attributes are set by :func:`main`."""

    prefill = decode = ""
    wait_s = timeout_s = 0.0

    def do_GET(self) -> None:
        """Pass on: health, models, and the decode server's metrics."""
        self._pass_on(self.decode, None)

    def do_POST(self) -> None:
        """Pass a completion through both servers, anything else to the decode server."""
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if self.path not in COMPLETIONS or not isinstance(body, dict):
            self._pass_on(self.decode, data)
            return
        try:
            self._compute(for_prefill(body))
        except (OSError, http.client.HTTPException) as problem:
            log.warning("no prefill, the decode server computes the prompt: %s", problem)
        self._pass_on(self.decode, json.dumps(for_decode(body, self.wait_s)).encode())

    def _compute(self, body: dict[str, Any]) -> None:
        connection, answer = self._ask(self.prefill, json.dumps(body).encode())
        with closing(connection):
            text = answer.read()
        if answer.status != http.client.OK:  # a bad request: the decode server will say so too
            log.warning("prefill answered %d: %.200s", answer.status, text)

    def _ask(
        self, server: str, data: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        where = urlsplit(server)
        connection = http.client.HTTPConnection(
            str(where.hostname), where.port, timeout=self.timeout_s
        )
        headers = {name: self.headers[name] for name in KEPT_HEADERS if name in self.headers}
        try:
            connection.request(self.command, self.path, body=data, headers=headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def _pass_on(self, server: str, data: bytes | None) -> None:
        """Answer as the server answers, piece by piece as it comes."""
        try:
            connection, answer = self._ask(server, data)
        except (OSError, http.client.HTTPException) as problem:
            self.send_error(502, explain=f"{server}: {problem}")
            return
        with closing(connection):
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers.get("Content-Type", "text/plain"))
            self.end_headers()  # HTTP/1.0: the end of the connection is the end of the answer
            while piece := answer.read1(1 << 16):
                self.wfile.write(piece)
                self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log through `logging`."""
        log.info(format, *args)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefill", required=True, help="address, e.g. http://127.0.0.1:8100")
    parser.add_argument("--decode", required=True, help="address, e.g. http://127.0.0.1:8200")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait-s", type=float, default=5.0, help="wait for chunks being written")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of a connection")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    Proxy.prefill, Proxy.decode = given.prefill, given.decode
    Proxy.wait_s, Proxy.timeout_s = given.wait_s, given.timeout_s
    with ThreadingHTTPServer((given.host, given.port), Proxy) as server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
