"""Publishes batches of KV cache events over ZeroMQ, in the wire form of vLLM's publisher.

A message is (topic, number of the batch as 8 bytes, payload), the payload msgpack of ``[time,
events, rank]``. Nothing is sent before somebody subscribes, so whoever waits misses nothing; who
comes later, or lost something, asks the replay endpoint for all batches from a number on. Needs the
packages pyzmq and msgspec, which vLLM has, and not vLLM.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from vua.errors import ConfigError

__all__ = ["EventSocket"]

_KEPT: Final = 10_000
"""Batches that can be asked for again, as many as vLLM keeps."""
_QUEUED: Final = 100_000
"""Batches that are kept for a slow subscriber, likewise."""
_LINGER_MS: Final = 60_000
"""How long subscribers have at the end to take what was sent."""
_END: Final = (-1).to_bytes(8, "big", signed=True)
"""Number that ends a replay."""


class EventSocket:
    """A publisher of events; closed at the end of its block. For one thread."""

    def __init__(
        self,
        endpoint: str,
        *,
        connect: bool = False,
        topic: str = "",
        replay_endpoint: str | None = None,
    ) -> None:
        """Bind the endpoints.

        Args:
            endpoint: where subscribers connect.
            connect: the subscriber has bound it; connect to it.
            topic: of all messages.
            replay_endpoint: where missed batches are asked for; by default they cannot be.

        Raises ConfigError where an endpoint cannot be used or a package is missing.
        """
        try:
            self._zmq: Any = import_module("zmq")
            self._pack = import_module("msgspec").msgpack.encode
        except ImportError as problem:
            msg = f"--zmq needs pyzmq and msgspec: pip install pyzmq msgspec ({problem})"
            raise ConfigError(msg) from problem
        self._topic, self._numbers = topic.encode(), itertools.count()
        self._kept = deque[tuple[bytes, bytes]](maxlen=_KEPT)
        self._context, self._poller = self._zmq.Context(), self._zmq.Poller()
        self._subscribed = False
        try:
            self._out = self._opened(self._zmq.XPUB, endpoint, connect=connect)
            self._replay = None
            if replay_endpoint is not None:
                self._replay = self._opened(self._zmq.ROUTER, replay_endpoint)
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def _opened(self, kind: int, endpoint: str, *, connect: bool = False) -> Any:  # noqa: ANN401
        socket = self._context.socket(kind)
        socket.set_hwm(_QUEUED)
        self._poller.register(socket, self._zmq.POLLIN)
        try:
            (socket.connect if connect else socket.bind)(endpoint)
        except self._zmq.ZMQError as problem:
            msg = f"{endpoint}: {problem.strerror}"
            raise ConfigError(msg) from problem
        return socket

    def __enter__(self) -> EventSocket:  # noqa: PYI034 - Python 3.10 has no Self
        """Wait until somebody subscribes."""
        try:
            while not self._subscribed:
                self._serve(None)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close, when subscribers have taken everything; at once where an error ends it."""
        self._context.destroy(linger=_LINGER_MS if kind is None else 0)

    def publish(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Send some events in one message."""
        number = next(self._numbers).to_bytes(8, "big")
        payload = self._pack([time.time(), batch, 0])
        self._out.send_multipart((self._topic, number, payload))
        if self._replay is not None:
            self._kept.append((number, payload))

    def wait(self, seconds: float) -> None:
        """Let time pass, answering who asks for missed batches."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._serve(left_s)

    def _serve(self, seconds: float | None) -> None:
        """Answer what comes in, or wait so long (None: for ever) for something to come in."""
        ready = dict(self._poller.poll(None if seconds is None else max(1, seconds * 1000)))
        if self._out in ready:
            asked = self._out.recv()  # 1 or 0, and the topic that is subscribed or left
            self._subscribed |= asked[:1] == b"\1" and self._topic.startswith(asked[1:])
        if self._replay is not None and self._replay in ready:
            self._send_again(self._replay.recv_multipart())

    def _send_again(self, request: list[bytes]) -> None:
        if len(request) != 3 or self._replay is None:
            return  # nothing that a subscriber of vLLM's events sends
        who, _, first = request
        for number, payload in self._kept:
            if number >= first:
                self._replay.send_multipart((who, b"", self._topic, number, payload))
        self._replay.send_multipart((who, b"", b"", _END, b""))
