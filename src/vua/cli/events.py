"""`vua events`: tells a router which chunks a cache holds, as vLLM's KV cache events.

It looks at names and headers of all writers, and tells what is new and what is gone since the
look before. A block is a chunk, its hash the chunk's key, which anybody can compute from a prompt's
tokens (:class:`vua.format.keys.KeyChain`). Told are chunks that a lookup can find: all files are
there, and those of all chunks before it. Only a load knows whether the files are sound.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final

import click

from vua.capacity.scan import Show
from vua.catalog.base import Catalog, Links, NamespaceCatalog
from vua.catalog.opening import open_catalog
from vua.cli.command import command, duration_s
from vua.cli.event_socket import EventSocket
from vua.cli.looks import between_looks_s
from vua.cli.output import SOUND, progress
from vua.errors import ConfigError
from vua.format.layout import KVLayout, Shard, cover
from vua.storage.problems import explaining

__all__ = ["Seen", "events", "look"]

_INTERVAL_S: Final = 5.0
_BATCH: Final = 1024
"""Events in a batch: routers ask again for batches, of which some thousands are kept."""


_CLEARED: Final = {"type": "AllBlocksCleared"}


@dataclass(slots=True)
class Seen:
    """A namespace as the last look found it."""

    layouts: tuple[KVLayout, ...]
    stored: dict[str, str]
    """Chunks that a lookup can find, parents before children, each with the one before it ("")."""
    links: Links
    whole: dict[str, int]
    """Chunks that have all their files, and their mtimes (ns) when these were looked for."""


@command("events", "tell routers which chunks a cache holds")
@click.option("--follow", is_flag=True, help="go on with what is stored and removed")
@click.option(
    "--interval",
    "interval_s",
    metavar="TIME",
    type=duration_s,
    help="between looks; default 5s, of a bucket 60s",
)
@click.option(
    "--locality",
    type=click.Choice(("LOCAL", "REMOTE"), case_sensitive=False),
    help="of the storage; default by the file system's kind",
)
@click.option(
    "--zmq", metavar="ENDPOINT", help="publish there, like tcp://127.0.0.1:5557, not on stdout"
)
@click.option("--connect", is_flag=True, help="the router has bound that endpoint: connect to it")
@click.option("--topic", default="", help="of the messages; default none")
@click.option(
    "--replay-endpoint", metavar="ENDPOINT", help="answer there who asks for missed batches"
)
def events(
    directory: str,
    *,
    follow: bool = False,
    interval_s: float | None = None,
    locality: str | None = None,
    zmq: str | None = None,
    **publishing: Any,
) -> int:
    """Tell what is stored, and with ``follow`` what changes: as lines, or over ZeroMQ.

    ``publishing`` is what :class:`EventSocket` takes beside its endpoint. Raises ConfigError,
    StorageError.
    """
    if zmq is None and any(publishing.values()):
        text = "--connect, --topic and --replay-endpoint say how to publish: give --zmq ENDPOINT"
        raise ConfigError(text)
    catalog = open_catalog(directory)
    interval_s = between_looks_s(interval_s, catalog, _INTERVAL_S)
    with explaining(directory):
        locality = locality or ("LOCAL" if catalog.is_local() else "REMOTE")
        with nullcontext(_Lines()) if zmq is None else EventSocket(zmq, **publishing) as outlet:
            seen: dict[str, Seen] = {}
            while True:
                now = look(catalog, seen)
                found = _changes(seen, now, locality)
                if outlet.newcomers:  # what they believe is of before
                    outlet.newcomers = False
                    found = itertools.chain([_CLEARED], _changes({}, now, locality))
                while batch := list(itertools.islice(found, _BATCH)):
                    outlet.publish(batch)
                if not follow:
                    return SOUND
                seen = now
                outlet.wait(interval_s)


class _Lines:
    """A line of JSON on stdout for each event, hashes in hex."""

    newcomers = False

    def publish(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Print them."""
        now_s = time.time()
        for one in batch:
            print(json.dumps({"ts": now_s, **one}, default=bytes.hex))
        sys.stdout.flush()

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


# -- what is there --------------------------------------------------------------------------------


def look(catalog: Catalog, past: Mapping[str, Seen]) -> dict[str, Seen]:
    """Look at everything once, given what the last look found ({} for the first).

    What a namespace without a description holds cannot be judged, and is left out. Raises
    ConfigError, StorageError, OSError.
    """
    with progress() as show, catalog.namespaces(show) as (found, _):
        seen = ((one.name, _look_at(one, past.get(one.name), show)) for one in found)
        return {name: one for name, one in seen if one is not None}


def _look_at(space: NamespaceCatalog, past: Seen | None, show: Show) -> Seen | None:
    """Look at a namespace, after the first time only at what has changed."""
    layouts = past.layouts if past else space.layouts
    if not layouts:
        return None
    links = space.links(show, past.links if past else None)
    known = past.whole if past and links.tree is not None else {}  # else a look costs nothing
    whole = {
        name: mtime_ns
        for name, mtime_ns in links.mtimes_ns.items()
        if known.get(name) == mtime_ns or _is_whole(layouts, space.shards(name))
    }
    return Seen(layouts, _reached(links.order, links.befores, whole), links, whole)


def _is_whole(layouts: Sequence[KVLayout], shards: Iterable[Shard | None]) -> bool:
    """Whether a chunk's files hold every group of layers of which each chunk is stored."""
    full = [one for one in layouts if one.window is None] or layouts
    there = [shard for shard in shards if shard is not None]
    return all(cover(one.full, there) is not None for one in full)


def _reached(
    order: Iterable[str], befores: Mapping[str, str | None], whole: Mapping[str, int]
) -> dict[str, str]:
    """Return the whole chunks whose prefix is whole, in ``order``, with the chunks before them."""
    found: dict[str, str] = {}
    for name in order:
        before = befores[name] or ""
        if name in whole and (not before or before in found):
            found[name] = before
    return found


# -- what is told of it ---------------------------------------------------------------------------


def _changes(
    past: Mapping[str, Seen], now: Mapping[str, Seen], locality: str
) -> Iterator[dict[str, Any]]:
    """Yield what is gone, children before parents, and what is new, parents before children."""
    for namespace in sorted({*past, *now}):
        common = {"medium": "STORAGE", "locality": locality, "ownership": namespace}
        old = past[namespace].stored if namespace in past else {}
        new = now[namespace].stored if namespace in now else {}
        for name in reversed(old):
            if name not in new:
                yield {"type": "BlockRemoved", "block_hashes": [bytes.fromhex(name)], **common}
        for name, before in new.items():
            if name not in old:
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
