"""`vua events`: tells routers which chunks a cache holds, as vLLM's KV cache events.

It looks at names and headers of all writers' chunks, and reports what is new and gone since the
previous look. A block is a chunk, its hash the chunk's key, which can be computed from a prompt's
tokens (:class:`vua.format.keys.KeyChain`). Reported are chunks that a lookup can find: all their
files exist, and those of all chunks before them. Only a load knows whether the files are sound.

:class:`EventSocket` publishes batches of events over ZeroMQ, in the wire form of vLLM's publisher.
A message is (topic, number of the batch as 8 bytes, payload), the payload msgpack of ``[time,
events, rank]``. Nothing is sent before there is a subscriber. A later or returning subscriber is
sent everything with the next look, beginning with ``AllBlocksCleared``, so a router that comes back
does not rely on chunks that were deleted meanwhile. The same holds for a restarted publisher, whose
numbers begin at 0.

Memory is bounded per peer. A subscriber that does not read is waited for briefly, and then misses
batches, which it notices by their numbers: it subscribes again. Needs pyzmq and msgspec, which vLLM
installs, and not vLLM.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final

from vua.capacity.listing import Listing
from vua.capacity.spaces import Show
from vua.catalog import open_catalog
from vua.catalog.base import Catalog, NamespaceCatalog
from vua.cli.command import command, duration_s, option
from vua.cli.output import SOUND, progress
from vua.errors import ConfigError, explaining
from vua.format.layout import KVLayout, Shard, cover
from vua.storage.names import SUFFIX

log = logging.getLogger(__name__)

_QUEUED: Final = 32
"""Batches queued per peer that does not read: some 200 KB each at most."""
_PATIENCE_MS: Final = 10_000
_QUIET_S: Final = 60.0
"""Least time between two log lines about peers that do not read."""
_ASKED_NBYTES: Final = 4096
"""Longest message of a peer; a longer one ends its connection."""
_LINGER_S: Final = 60.0
"""How long subscribers have at the end to receive what was sent."""
_CLOSE_S: Final = 1.0
"""How long libzmq has to close its connections after that."""


class EventSocket:
    """A publisher of events; closed at the end of its block. Not thread-safe."""

    def __init__(self, endpoint: str, *, connect: bool = False, topic: str = "") -> None:
        """Bind the endpoint; or connect to it, which the subscriber has bound.

        ``topic`` is that of all messages. Raises ConfigError if the endpoint is unusable or a
        package is missing.
        """
        try:
            self._zmq: Any = import_module("zmq")
            self._pack = import_module("msgspec").msgpack.encode
        except ImportError as problem:
            msg = f"--zmq needs pyzmq and msgspec: pip install pyzmq msgspec ({problem})"
            raise ConfigError(msg) from problem
        self._topic, self._numbers = topic.encode(), itertools.count()
        self._subscribed, self._told_s = False, -math.inf
        self.newcomers = False
        """Whether a subscriber has not been sent everything yet."""
        zmq, self._context = self._zmq, self._zmq.Context()
        self._out = self._context.socket(zmq.XPUB)
        self._out.set_hwm(_QUEUED)
        self._out.setsockopt(zmq.MAXMSGSIZE, _ASKED_NBYTES)
        self._out.setsockopt(zmq.XPUB_MANUAL, 1)  # bounds the memory of topics
        self._out.setsockopt(zmq.XPUB_NODROP, 1)
        self._out.setsockopt(zmq.SNDTIMEO, _PATIENCE_MS)
        try:
            (self._out.connect if connect else self._out.bind)(endpoint)
        except zmq.ZMQError as problem:
            self._close(0.0)
            raise ConfigError(f"{endpoint}: {problem.strerror}") from problem

    def __enter__(self) -> EventSocket:  # noqa: PYI034 - Python 3.10 has no Self
        try:
            while not self._subscribed:
                self._serve(None)
        except BaseException:
            self._close(0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close once subscribers have received everything; at once after an error."""
        self._close(_LINGER_S if kind is None else 0.0)

    def _close(self, linger_s: float) -> None:
        self._out.close(linger=int(linger_s * 1000))
        # libzmq 4.3.5 sometimes never returns from this if a subscriber that does not read
        # disconnects meanwhile, so another thread calls it.
        end = threading.Thread(target=self._context.term, name="vua-events-end", daemon=True)
        end.start()
        end.join(linger_s + _CLOSE_S)

    def publish(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Send some events in one message to all subscribers.

        One that does not read is waited for once, then misses it.
        """
        zmq, out = self._zmq, self._out
        number = next(self._numbers).to_bytes(8, "big")
        parts = (self._topic, number, self._pack([time.time(), batch, 0]))
        try:
            out.send_multipart(parts)
            out.setsockopt(zmq.SNDTIMEO, _PATIENCE_MS)
        except zmq.Again:
            self._tell("a subscriber does not read: it misses batches, and sees that by a number")
            out.setsockopt(zmq.SNDTIMEO, 0)
            out.setsockopt(zmq.XPUB_NODROP, 0)
            out.send_multipart(parts)
            out.setsockopt(zmq.XPUB_NODROP, 1)

    def _tell(self, text: str) -> None:
        if time.monotonic() - self._told_s >= _QUIET_S:
            self._told_s = time.monotonic()
            log.warning("%s", text)

    def wait(self, seconds: float) -> None:
        """Sleep, and take subscriptions meanwhile."""
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            self._serve(left_s)

    def _serve(self, seconds: float | None) -> None:
        if self._out.poll(None if seconds is None else max(1, seconds * 1000)):
            try:
                self._subscribe(self._out.recv_multipart(self._zmq.DONTWAIT))
            except Exception as problem:  # noqa: BLE001 - none may end it for other peers
                self._tell(f"a peer's message is not answered: {problem}")

    def _subscribe(self, asked: list[bytes]) -> None:
        """Handle a subscription to our topic (1 and the topic), or its end (0); ignore the rest."""
        topic, begins = asked[0][1:], asked[0][:1] == b"\1"
        if len(asked) != 1 or not self._topic.startswith(topic):
            return
        self._out.setsockopt(self._zmq.SUBSCRIBE if begins else self._zmq.UNSUBSCRIBE, topic)
        if begins:
            self.newcomers = self._subscribed = True


_INTERVAL_S: Final = 5.0
_BATCH: Final = 1024
_CLEARED: Final = {"type": "AllBlocksCleared"}


@dataclass(slots=True)
class StoredNamespace:
    """A namespace as the last look found it."""

    layouts: tuple[KVLayout, ...]
    listing: Listing


@command("events")
@option("--follow", "then print changes, until Ctrl-C")
@option(
    "--interval TIME",
    "between looks; default 5s, of a bucket 60s",
    name="interval_s",
    type=duration_s,
)
@option("--zmq ENDPOINT", "publish to this endpoint, like tcp://127.0.0.1:5557, not on stdout")
@option("--connect", "connect to that endpoint, which the router has bound")
@option("--topic TEXT", "of the messages; default none", default="")
def events(
    directory: str,
    *,
    follow: bool = False,
    interval_s: float | None = None,
    zmq: str | None = None,
    **publishing: Any,
) -> int:
    """Report what is stored, and with ``follow`` what changes: as lines, or over ZeroMQ.

    ``publishing`` are :class:`EventSocket`'s further arguments. Raises ConfigError, StorageError.
    """
    if zmq is None and any(publishing.values()):
        text = "--connect and --topic configure publishing: give --zmq ENDPOINT"
        raise ConfigError(text)
    catalog = open_catalog(directory)
    interval_s = interval_s or catalog.look_s or _INTERVAL_S
    with explaining(directory):
        locality = "LOCAL" if catalog.is_local() else "REMOTE"
        with nullcontext(_Lines()) if zmq is None else EventSocket(zmq, **publishing) as outlet:
            seen: dict[str, StoredNamespace] = {}
            while True:
                now = content(catalog, seen)
                found = changes(seen, now, locality)
                if outlet.newcomers:  # their knowledge is from before
                    outlet.newcomers = False
                    found = itertools.chain([_CLEARED], changes({}, now, locality))
                while batch := list(itertools.islice(found, _BATCH)):
                    outlet.publish(batch)
                if not follow:
                    return SOUND
                seen = now
                outlet.wait(interval_s)


class _Lines:
    newcomers = False

    def publish(self, batch: Sequence[Mapping[str, Any]]) -> None:
        now_s = time.time()
        for one in batch:
            print(json.dumps({"ts": now_s, **one}, default=bytes.hex))
        sys.stdout.flush()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


# -- what is there --------------------------------------------------------------------------------


def content(catalog: Catalog, past: Mapping[str, StoredNamespace]) -> dict[str, StoredNamespace]:
    """Look at everything once, given what the last look found ({} for the first).

    A namespace without a description cannot be judged, and is left out. Raises ConfigError,
    StorageError, OSError.
    """
    with progress() as show, catalog.namespaces(show) as (found, _):
        seen = ((one.name, _content_of(one, past.get(one.name), show)) for one in found)
        return {name: one for name, one in seen if one is not None}


def _content_of(
    space: NamespaceCatalog, past: StoredNamespace | None, show: Show
) -> StoredNamespace | None:
    layouts = past.layouts if past else space.layouts
    if not layouts:
        return None
    listing = space.listing(show, past.listing if past else None)
    listing.judge(partial(_is_whole, layouts))
    return StoredNamespace(layouts, listing)


def _is_whole(layouts: Sequence[KVLayout], files: Iterable[str]) -> bool:
    full = [one for one in layouts if one.window is None] or layouts
    shards = (Shard.parse(one.removesuffix(SUFFIX)) for one in files if one.endswith(SUFFIX))
    there = [shard for shard in shards if shard is not None]
    return all(cover(one.full, there) is not None for one in full)


# -- what is told of it ---------------------------------------------------------------------------


def changes(
    past: Mapping[str, StoredNamespace], now: Mapping[str, StoredNamespace], locality: str
) -> Iterator[dict[str, Any]]:
    """Yield removed chunks, children before parents, then new ones, parents before children."""
    for namespace in sorted({*past, *now}):
        common = {"medium": "STORAGE", "locality": locality, "ownership": namespace}
        old, new = past.get(namespace), now.get(namespace)
        was, found = (None if one is None else one.listing for one in (old, new))
        for name, _ in was.news(found, leaves_first=True) if was is not None else ():
            yield {"type": "BlockRemoved", "block_hashes": [bytes.fromhex(name)], **common}
        for name, before in found.news(was) if found is not None else ():
            yield {
                "type": "BlockStored",
                "block_hashes": [bytes.fromhex(name)],
                "parent_block_hash": bytes.fromhex(before) or None,
                "token_ids": [],
                "block_size": now[namespace].layouts[0].chunk_tokens,
                "lora_id": None,
                "lora_name": None,
                **common,
            }
