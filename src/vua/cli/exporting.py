"""`vua export`: chosen prefixes as one portable file. Reads and verifies, changes nothing.

Memory does not grow with what is read: a file is checked block by block, and then copied so. One
that is as long as no file of its namespace can be is not read at all. Of a bucket the objects of
one chunk are held in memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from vua.capacity.scan import AFTER, Show
from vua.cli.archive import Writer, file_sizes
from vua.cli.check import Place
from vua.cli.keys import NO_KEYS, prompt_keys
from vua.cli.prompt import prompt_ids, read_ids
from vua.cli.sources import Source, SourceFile, resolved, sources
from vua.cli.text import DAMAGED, SHORT, SOUND, Write, plain, progress, size
from vua.errors import (
    ConfigError,
    CorruptEntryError,
    EntryError,
    ForeignEntryError,
    LayoutError,
    StorageError,
)
from vua.format.entry import EntryCodec
from vua.format.keys import KeyChain
from vua.format.layout import Shard
from vua.format.parse import EntryInfo
from vua.security.settings import Security
from vua.storage.description import DESCRIPTION, MAX_DESCRIPTION_NBYTES
from vua.storage.local import SUFFIX, chunk_path
from vua.storage.problems import explained
from vua.store.opening import open_namespace

__all__ = ["ExportChoice", "export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportChoice:
    """What `vua export` is to take."""

    names: Sequence[str] = ()
    """First digits of chunks (each with its prefix) or of namespaces (all of it)."""
    following: bool = False
    """Also what follows the chunks that are named."""
    tokens: str | None = None
    """File of a prompt's token ids: what is stored of it, in every namespace."""
    prompt: str | None = None
    """File of its text, in place of ``tokens``; needs ``model`` for its tokenizer."""
    model: str | None = None
    salt: str = ""
    everything: bool = False
    security: Security = NO_KEYS
    """The keys that the prompt's chunks are named with; what is sealed is exported as it is."""


@dataclass(slots=True)
class _Done:
    chunks: int = 0
    files: int = 0
    nbytes: int = 0
    namespaces: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def export(directory: str, file: str, choice: ExportChoice, *, write: Write | None) -> int:
    """Write what is chosen to ``file`` (``-``: stdout); exit status 1 if some was damaged.

    A file appears under its name when it is whole, and never in place of another one. Raises
    ConfigError, InputError, StorageError.
    """
    if bool(choice.names) + bool(choice.tokens or choice.prompt) + choice.everything != 1:
        msg = "say what to export: names, or a prompt (--tokens, --prompt), or --all"
        raise ConfigError(msg)
    if file == "-" and write is not None:
        msg = "the archive goes to stdout, and so would --json; name a file"
        raise ConfigError(msg)
    try:
        with progress() as show, sources(directory, show) as found:
            wanted = _wanted(found, choice, show)
            if not any(wanted.values()):
                msg = "nothing of that is stored: there is nothing to export; see `vua explain`"
                raise ConfigError(msg)
            with _created(file) as stream:
                done = _write(wanted, Writer(stream), show)
    except OSError as problem:
        if isinstance(problem, StorageError):
            raise
        raise explained(problem, str(problem.filename or directory)) from problem
    if write is not None:
        write({"directory": directory, "file": file, "chunks": done.chunks, "files": done.files,
               "nbytes": done.nbytes, "namespaces": done.namespaces,
               "problems": done.problems})  # fmt: skip
    else:
        out = sys.stderr if file == "-" else sys.stdout
        for text in done.problems:
            print(plain(f"left out: {text}"), file=out)
        print(f"{file}: {done.chunks} chunks, {size(done.nbytes)}", file=out)
    return DAMAGED if done.problems else SOUND


def _wanted(found: Sequence[Source], choice: ExportChoice, show: Show) -> dict[Source, list[str]]:
    """The chunks of each namespace, parents before children, each once."""
    wanted: dict[Source, dict[str, None]] = {}
    if choice.tokens or choice.prompt:
        ids = read_ids(choice.tokens) if choice.tokens else prompt_ids(
            choice.prompt or "-", choice.model
        )  # fmt: skip
        for source in found:
            security = replace(choice.security, trusted_uids="any")  # names are all it reads
            namespace = open_namespace(source.description.path, security=security)
            if namespace is not None:
                keys, _ = prompt_keys(namespace, ids, choice.salt)
                wanted[source] = dict.fromkeys(_leading(source, keys))
        return {source: list(chunks) for source, chunks in wanted.items()}
    targets = [resolved(found, name) for name in choice.names] or [(one, "") for one in found]
    for source, chunk in targets:
        chunks = wanted.setdefault(source, {})
        if not chunk:
            chunks.update(dict.fromkeys(source.in_order(show)))
            continue
        prefix = [*source.ancestors(chunk)][::-1]
        chunks.update(dict.fromkeys(prefix))
        if choice.following:
            chunks.update(dict.fromkeys(source.descendants(chunk, show)))
    return {source: list(chunks) for source, chunks in wanted.items()}


def _leading(source: Source, keys: KeyChain) -> Iterator[str]:
    for place in range(len(keys)):
        name = keys[place].name
        if not source.holds(name):
            return
        yield name


def _write(wanted: dict[Source, list[str]], writer: Writer, show: Show) -> _Done:
    done = _Done()
    total = sum(map(len, wanted.values()))
    for source, chunks in wanted.items():
        if not chunks:
            continue
        if source.description.layout is None:
            done.problems.append(f"{source.name}: {DESCRIPTION} is missing or damaged")
            continue
        done.namespaces.append(source.name)
        with source.opened(DESCRIPTION) as file:
            data = file.stream.read(MAX_DESCRIPTION_NBYTES)
        writer.add(f"{source.name}/{DESCRIPTION}", data)
        kept: set[str] = set()
        for chunk in chunks:
            _write_chunk(source, chunk, writer, done, kept)
            show(source.name[:SHORT], done.chunks, total, amount=done.nbytes)
    writer.close()
    return done


def _write_chunk(source: Source, chunk: str, writer: Writer, done: _Done, kept: set[str]) -> None:
    """Add a chunk whose files are all sound and whose prefix is there too."""
    path = chunk_path(chunk)
    names = source.listed(chunk)
    marks = [name for name in names if name.startswith(AFTER)]
    before = marks[0][len(AFTER) :] if marks else ""
    with contextlib.ExitStack() as stack:
        files: list[tuple[str, SourceFile, object]] = []
        try:
            for name in names:
                shard = Shard.parse(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
                layout = source.description.layout_of(shard)
                if shard is None or layout is None:
                    continue
                file = stack.enter_context(source.opened(f"{path}/{name}"))
                state = file.state()
                info = _checked(file, EntryCodec(source.name, layout, shard), chunk)
                before = before or (info.parent if info.start else "")
                files.append((name, file, state))
        except FileNotFoundError:
            return  # evicted this moment; what follows has no prefix then
        except (EntryError, LayoutError, OSError) as problem:
            done.problems.append(f"{source.name}/{path}: {problem}")
            return
        if not files or (before and before not in kept):
            return
        for name in marks[:1]:
            writer.add(f"{source.name}/{path}/{name}", b"")
        for name, file, state in files:
            done.nbytes += writer.add_file(f"{source.name}/{path}/{name}", file.stream)
            done.files += 1
            if file.state() != state:
                raise StorageError(errno.EIO, f"{path}/{name} was changed while it was exported")
    done.chunks += 1
    kept.add(chunk)


def _checked(file: SourceFile, codec: EntryCodec, chunk: str) -> EntryInfo:
    """What a file says that is wholly sound and belongs here. Raises EntryError, OSError."""
    sizes = file_sizes(codec)
    if file.nbytes not in sizes:
        msg = f"{file.nbytes} bytes long, expected {' or '.join(map(str, sizes))}"
        raise CorruptEntryError(msg)
    found = file.check(Place(codec.namespace, chunk, codec.shard, codec.layout))
    if found.outcome == "sound" and found.info is not None:
        return found.info
    text = "; ".join(found.reasons)
    if found.outcome == "error":
        raise OSError(errno.EIO, text)
    raise CorruptEntryError(text) if found.outcome == "corrupt" else ForeignEntryError(text)


@contextlib.contextmanager
def _created(file: str) -> Iterator[BinaryIO]:
    """A file that appears under its name when all went well, or stdout."""
    if file == "-":
        yield sys.stdout.buffer
        return
    path = Path(file)
    if os.path.lexists(path):
        msg = f"{file}: it exists; remove it or name another file"
        raise ConfigError(msg)
    temporary = path.with_name(f".{path.name[:100]}-{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as stream:  # noqa: PTH123
            yield stream
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
