"""`vua events`: tells a router which chunks a cache holds, as vLLM's KV cache events.

It looks at names and headers, whoever wrote them, and tells what is new and what is gone since the
look before. A block is a chunk, its hash the chunk's key, which anybody can compute from a prompt's
tokens (:class:`vua.format.keys.KeyChain`). Told are chunks that a lookup can find: all files are
there, and those of all chunks before it. Only a load knows whether the files are sound.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from vua.capacity.prefix_tree import PrefixTree, read_prefix_tree
from vua.capacity.scan import Show, Space, spaces
from vua.cli.arguments import between_looks_s, duration_s
from vua.cli.bucket_chunks import BucketSpace, listed_spaces, opened_bucket
from vua.cli.event_socket import EventSocket
from vua.cli.spread import over_fans
from vua.cli.text import SOUND, progress
from vua.cli.walk import walk_chunk
from vua.errors import ConfigError, StorageError
from vua.format.layout import KVLayout, Shard, cover
from vua.io.posix import close_quietly, is_local
from vua.storage.base import parse_name
from vua.storage.description import read_description
from vua.storage.names import entry_at
from vua.storage.problems import explained
from vua.storage.urls import is_url
from vua.store.evidence import settled
from vua.store.namespace import check_root

__all__ = ["Seen", "add_events", "events", "look"]

_INTERVAL_S: Final = 5.0
_BATCH: Final = 1024
"""Events in a batch: routers ask again for batches, of which some thousands are kept."""


_CLEARED: Final = {"type": "AllBlocksCleared"}


class _Outlet(Protocol):
    """Where events go."""

    newcomers: bool
    """Whether somebody is there who was not told everything yet."""

    def publish(self, batch: Sequence[Mapping[str, Any]]) -> None:
        """Send some events."""
        ...

    def wait(self, seconds: float) -> None:
        """Let so much time pass until the next look."""
        ...


@dataclass(slots=True)
class Seen:
    """A namespace as the last look found it."""

    layouts: tuple[KVLayout, ...]
    stored: dict[str, str]
    """Chunks that a lookup can find, parents before children, each with the one before it ("")."""
    tree: PrefixTree | None
    """None in a bucket."""
    whole: dict[str, int]
    """Chunks that have all their files, and their mtimes (ns) when these were looked for."""
    befores: dict[str, str | None]
    """In a bucket what follows what: it costs a request for each chunk, and never changes."""


def add_events(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    common: argparse.ArgumentParser,
) -> None:
    """Add the command's arguments."""
    one = commands.add_parser(
        "events", parents=[common], help="tell routers which chunks a cache holds"
    )
    one.add_argument("directory", metavar="DIR", help="directory of the cache")
    one.add_argument("--follow", action="store_true", help="go on with what is stored and removed")
    one.add_argument(
        "--interval",
        metavar="TIME",
        type=duration_s,
        help="between looks; default 5s, of a bucket 60s",
    )
    one.add_argument(
        "--locality",
        type=str.upper,
        choices=("LOCAL", "REMOTE"),
        help="of the storage; default by the file system's kind",
    )
    one.add_argument(
        "--zmq", metavar="ENDPOINT", help="publish there, like tcp://127.0.0.1:5557, not on stdout"
    )
    one.add_argument(
        "--connect", action="store_true", help="the router has bound that endpoint: connect to it"
    )
    one.add_argument("--topic", default="", help="of the messages; default none")
    one.add_argument(
        "--replay-endpoint", metavar="ENDPOINT", help="answer there who asks for missed batches"
    )


def events(options: argparse.Namespace) -> int:
    """Tell what is stored, and with ``--follow`` what changes. Raises ConfigError, StorageError."""
    where = options.directory
    interval_s = between_looks_s(options.interval, where, _INTERVAL_S)
    if options.zmq is None and (options.connect or options.topic or options.replay_endpoint):
        msg = "--connect, --topic and --replay-endpoint say how to publish: give --zmq ENDPOINT"
        raise ConfigError(msg)
    try:
        locality = options.locality or _locality(where)
        with _outlet(options) as outlet:
            seen: dict[str, Seen] = {}
            while True:
                now = look(where, seen)
                found = _changes(seen, now, locality)
                if outlet.newcomers:  # what they believe is of before
                    outlet.newcomers = False
                    found = itertools.chain([_CLEARED], _changes({}, now, locality))
                while batch := list(itertools.islice(found, _BATCH)):
                    outlet.publish(batch)
                if not options.follow:
                    return SOUND
                seen = now
                outlet.wait(interval_s)
    except OSError as problem:
        if isinstance(problem, (StorageError, BrokenPipeError)):
            raise
        raise explained(problem, where) from problem


def _outlet(options: argparse.Namespace) -> AbstractContextManager[_Outlet]:
    if options.zmq is None:
        return nullcontext(_Lines())
    return EventSocket(
        options.zmq,
        connect=options.connect,
        topic=options.topic,
        replay_endpoint=options.replay_endpoint,
    )


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


def _locality(where: str) -> str:
    """Whether what is stored there is this machine's alone; REMOTE when in doubt."""
    if is_url(where):
        return "REMOTE"
    fd = os.open(check_root(where, create=False), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return "LOCAL" if is_local(fd) else "REMOTE"
    finally:
        close_quietly(fd)


def look(where: str, past: Mapping[str, Seen]) -> dict[str, Seen]:
    """Look at everything once, given what the last look found ({} for the first).

    What a namespace without a description holds cannot be judged, and is left out. Raises
    ConfigError, StorageError, OSError.
    """
    with progress() as show:
        if is_url(where):
            found = listed_spaces(opened_bucket(where), show)
            seen = ((one.name, _look_at_bucket(one, past.get(one.name), show)) for one in found)
            return {name: one for name, one in seen if one is not None}
        root = check_root(where, create=False)
        with spaces(root) as there:
            seen = ((one.name, _look_at(root, one, past.get(one.name), show)) for one in there)
            return {name: one for name, one in seen if one is not None}


def _look_at(root: Path, space: Space, past: Seen | None, show: Show) -> Seen | None:
    """Look at a namespace in a directory, after the first time only at what has changed."""
    layouts = past.layouts if past else ()
    layouts = layouts or settled(read_description(root / space.name)).layouts
    if not layouts:
        return None
    if past is None:
        tree = read_prefix_tree(space, show, over_fans)
    else:
        tree = read_prefix_tree(space, show, known=past.tree)
    names = [tree.name(index) for index in range(len(tree.names))]
    befores = {
        name: "" if above == index else names[above]
        for index, (name, above) in enumerate(zip(names, tree.parent.tolist(), strict=True))
        if above < len(names)
    }
    known = past.whole if past else {}
    whole = {
        name: mtime_ns
        for name, mtime_ns in zip(names, tree.mtimes_ns.tolist(), strict=True)
        if known.get(name) == mtime_ns or _is_whole(layouts, _shards(space, name))
    }
    stored = _reached(tree.in_order(), befores, whole)
    return Seen(layouts, stored, tree, whole, {})


def _look_at_bucket(space: BucketSpace, past: Seen | None, show: Show) -> Seen | None:
    """Look at a namespace in a bucket."""
    layouts = past.layouts if past else settled(space.description).layouts
    if not layouts:
        return None
    for name, chunk in space.chunks.items():
        if past is not None and chunk.before is None:
            chunk.before = past.befores.get(name)
    order = space.in_order(show)
    befores = {name: chunk.before for name, chunk in space.chunks.items()}
    whole = {
        name: int(chunk.written_s * 1e9)
        for name, chunk in space.chunks.items()
        if _is_whole(layouts, [parse_name(entry_at(path))[1] for path in chunk.paths])
    }
    return Seen(layouts, _reached(order, befores, whole), None, whole, befores)


def _shards(space: Space, name: str) -> list[Shard | None]:
    """Return the shards of a chunk that are files in its directory."""
    return [one.shard for one in walk_chunk(space, name) if one.kind == "entry" and one.regular]


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
