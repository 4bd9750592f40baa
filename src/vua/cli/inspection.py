"""`vua inspect`: what files say about themselves, and whether it is true."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from vua.capacity.scan import spaces
from vua.cli.check import Check, Checker, Place
from vua.cli.names import resolve
from vua.cli.text import DAMAGED, SOUND, UNUSABLE, Write, facts, size, when
from vua.errors import ConfigError
from vua.format.entry import FORMAT
from vua.format.layout import Shard
from vua.format.parse import EntryInfo
from vua.io.posix import close_quietly
from vua.storage.bucket import Bucket
from vua.storage.bucket_path import BucketPath
from vua.storage.description import Description
from vua.storage.local import SUFFIX
from vua.storage.names import is_compressed, plain_path
from vua.storage.urls import is_url
from vua.store.evidence import settled
from vua.store.far import description_at
from vua.store.namespace import check_root

__all__ = ["inspect"]

_DIGEST_DIGITS = 64


def inspect(files: Sequence[str], *, write: Write | None) -> int:
    """Print what each file says and is; return the exit code.

    Where the first of ``files`` is a directory, the others are first digits of its chunks' names:
    all files of these are meant. Raises ConfigError where no chunk is called so.
    """
    if not is_url(files[0]) and Path(files[0]).is_dir():
        files = list(_named(files[0], files[1:]))
    checker, reports, code = Checker(), [], SOUND
    for number, file in enumerate(files):
        path = _in_bucket(file) if is_url(file) else Path(os.path.abspath(file))  # noqa: PTH100 - keeps symlinks
        namespace, place = _place(path)
        check = _check(checker, path, place)
        if check.outcome != "sound":
            code = max(code, UNUSABLE if check.outcome == "error" else DAMAGED)
        if write is not None:
            reports.append(_describe(file, check))
            continue
        print(end="\n" * bool(number))
        facts(file, _lines(check, namespace, place))
    if write is not None:
        write(reports)
    return code


def _named(directory: str, names: Sequence[str]) -> Iterator[str]:
    """The files of the chunks that are called so in a cache's directory."""
    if not names:
        raise ConfigError(
            f"{directory} is a directory; name a chunk of it, as `vua ls --long` shows"
        )
    root = check_root(directory, create=False)
    with spaces(root) as found:
        for target in (resolve(found, name) for name in names):
            if not target.chunk:
                raise ConfigError(f"{target.space.name} is a namespace; name one of its chunks")
            folder = root / target.space.name / target.chunk[:2] / target.chunk
            yield from sorted(str(file) for file in folder.iterdir() if file.suffix == SUFFIX)


def _in_bucket(url: str) -> BucketPath:
    """Return the place of an object: below that of its cache, where it has one."""
    parts = url.split("/")
    depth = 4 if len(parts) > 7 and _is_digest(parts[-4]) else 1
    return functools.reduce(
        operator.truediv, parts[-depth:], BucketPath(Bucket.at("/".join(parts[:-depth])))
    )


def _check(checker: Checker, file: Path | BucketPath, place: Place) -> Check:
    if isinstance(file, BucketPath):
        try:
            data = file.bucket.get(file.key)[1]
        except OSError as problem:
            return Check("error", (problem.strerror or str(problem),), 0)
        compressed = is_compressed(file.name)
        return checker.check_bytes(memoryview(bytearray(data)), place, compressed=compressed)
    try:
        # O_NONBLOCK: does not wait for the writer of a FIFO
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as problem:
        return Check("error", (str(problem.strerror),), 0)
    try:
        return checker.check(fd, place)
    finally:
        close_quietly(fd)


def _place(path: Path | BucketPath) -> tuple[Description | None, Place]:
    """What follows from a path; only what it says when the file was copied elsewhere."""
    name = plain_path(path.name)
    shard = Shard.parse(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None
    chunk, directory = path.parent, path.parent.parent.parent
    if shard is None or not _is_digest(chunk.name):
        return None, Place(shard=shard)
    if chunk.parent.name != chunk.name[:2] or not _is_digest(directory.name):
        return None, Place(chunk=chunk.name, shard=shard)
    namespace = settled(description_at(directory))
    return namespace, Place(directory.name, chunk.name, shard, namespace.layout_of(shard))


def _is_digest(name: str) -> bool:
    return len(name) == _DIGEST_DIGITS and not name.strip("0123456789abcdef")


def _lines(check: Check, namespace: Description | None, place: Place) -> list[tuple[str, str]]:
    lines = _statements(check.info, namespace) if check.info else [("size", size(check.nbytes))]
    if check.codec:
        lines.append(("compressed", f"to {size(check.nbytes)} by {check.codec}"))
    known = [name for name in ("namespace", "chunk", "shard", "layout") if getattr(place, name)]
    against = f"the file itself, and its place's {', '.join(known)}" if known else "the file itself"
    lines.append(("checked", f"{against}: {'all agree' if check.outcome == 'sound' else 'not so'}"))
    lines.append(("verdict", check.outcome))
    return lines + [("reason", reason) for reason in check.reasons]


def _statements(info: EntryInfo, namespace: Description | None) -> list[tuple[str, str]]:
    layout, shard = info.layout, info.shard
    named = namespace.identity if namespace is not None else None
    model = f"  (model {named.name or named.model})" if named is not None else ""
    arrays = " and ".join(
        f"{name} [{shard.heads} heads, {shard.layers} layers, {layout.chunk_tokens} tokens, {dim}]"
        for name, dim in zip("KV", layout.dims, strict=False)
    )
    payload = info.file_nbytes - info.header_nbytes
    layers = f"layers {shard.layer_start}-{shard.layer_stop} of {layout.layers}"
    heads = f"KV heads {shard.head_start}-{shard.head_stop} of {layout.kv_heads}"
    seal = f"{info.kind} with key {info.seal_info.key_id}: whose it is only that key can tell"
    return [
        ("format", info.seal_info.format if info.kind else FORMAT),
        *([("sealed", seal)] if info.kind else []),
        ("namespace", info.namespace + model),
        ("chunk", info.prefix_hash),
        ("parent", info.parent or "none: it is the first chunk of a prompt"),
        ("tokens", f"{info.start} to {info.stop}"),
        ("shard", f"{layers}, {heads}"),
        ("arrays", f"{layout.dtype}: {arrays}"),
        ("created", f"{when(info.created)} by {info.writer or 'nobody it names'}"),
        (
            "size",
            f"{size(info.file_nbytes)}: header {size(info.header_nbytes)}, K/V {size(payload)}",
        ),
        ("checksums", f"{len(info.checksums)} xxh3-64"),
    ]


def _describe(file: str, check: Check) -> dict[str, object]:
    report: dict[str, object] = {
        "file": file,
        "outcome": check.outcome,
        "reasons": list(check.reasons),
        "nbytes": check.nbytes,
    }
    if check.info is not None:
        info = check.info
        report |= {
            "namespace": info.namespace,
            "prefix_hash": info.prefix_hash,
            "parent": info.parent or None,
            "tokens": [info.start, info.stop],
            "shard": info.shard.name,
            "layout": info.layout.describe(),
            "created_s": info.created,
            "writer": info.writer,
            "header_nbytes": info.header_nbytes,
            "file_nbytes": info.file_nbytes,
            "codec": check.codec or None,
            "seal": info.kind or None,
            "key": info.seal_info.key_id or None,
            "checksums": [f"{value:016x}" for value in info.checksums.tolist()],
        }
    return report
