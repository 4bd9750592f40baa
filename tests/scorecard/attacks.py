"""Hostile things to find in a cache directory: planted files, names, and damaged or forged bytes.

Material for tests of any store; nothing here knows how a store works. Generators are seeded, so
that what fails can be replayed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

FOREIGN_UID: Final = 4242
"""A user who is nobody on most machines."""


def clear(path: Path) -> None:
    """Take away whatever is at ``path``, if anything; a link itself, not what it names."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _socket(path: Path, victim: Path) -> None:
    """A socket; its path may have 107 bytes at most, so it is bound from within."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{directory}/{path.name[:60]}")
        os.replace(f"/proc/self/fd/{directory}/{path.name[:60]}", path)  # noqa: PTH105
    finally:
        os.close(directory)


PLANTS: Final[Mapping[str, Callable[[Path, Path], object]]] = {
    "symlink": lambda path, victim: path.symlink_to(victim),
    "dangling symlink": lambda path, victim: path.symlink_to(f"{victim}-absent"),
    "symlink to itself": lambda path, victim: path.symlink_to(path.name),
    "symlink to /dev/zero": lambda path, victim: path.symlink_to("/dev/zero"),
    "fifo": lambda path, victim: os.mkfifo(path),
    "socket": _socket,
    "directory": lambda path, victim: path.mkdir(),
    "full directory": lambda path, victim: (path / "a" / "b").mkdir(parents=True),
    "hard link": lambda path, victim: path.hardlink_to(victim),
}
"""What to plant at a path that is free, by name; each is given the path and a victim: a file that
must neither be read through it nor changed."""


@contextlib.contextmanager
def foreign_uid(path: Path, uid: int = FOREIGN_UID) -> Iterator[None]:
    """Let a file or directory belong to another user for a while. Only root can."""
    before = path.stat(follow_symlinks=False)
    os.chown(path, uid, -1, follow_symlinks=False)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.chown(path, before.st_uid, -1, follow_symlinks=False)


_NAMES: Final = (
    *("..", ".", "/", "//", "../", "../../etc/passwd", "/etc/passwd", "..\\..\\x", "a/../../b"),
    *("a/b", "a-b", "a_b", "a\\b", "a b", "a@b", "a:b", "a%2fb", "%2e%2e%2f", "a\x00b", "\x00"),
    *("", " ", "~", "~root", "-rf", "--", "$HOME", "$(id)", "`id`", "; id", "| id", "a\nb", "\r"),
    *("CON", "nul", "a.", "a ", ".tmp-x", "quarantine", "namespace.json", ".upkeep", "trash-x"),
    *("pin-x", "after-x", "bounds.json", "l0-1.h0-1.safetensors", "0" * 64, "f" * 64, "A" * 5000),
    *("\u202eabc", "\ufeffabc", "a\u0301", "á", "ａ", "ß", "SS", "İ", "\ud800", "\udfff"),  # noqa: RUF001
    *("😀" * 300, "{", "}", '{"a":1}', "'", '"', "<script>", "\x1b[31m", "\x7f", "\x85", "\u2028"),
)


def hostile_names(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` different strings that would do harm as file names, worst first."""
    chosen = list(dict.fromkeys(_NAMES))[:count]
    generator, seen = random.Random(seed), set(chosen)
    while len(chosen) < count:
        parts = generator.choices(_NAMES[:-1], k=generator.randint(2, 4))
        name = generator.choice(("", "/", "\x00", "..", "@")).join(parts)[:6000]
        if name not in seen:
            seen.add(name)
            chosen.append(name)
    return chosen


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Return bytes that differ from ``data`` by one to four random edits, mostly near its start."""
    result = bytearray(data)
    while bytes(result) == data:
        for _ in range(generator.randint(1, 4)):
            reach = min(len(result), generator.choice((8, 64, 1024, 4096, len(result))))
            at = generator.randrange(max(1, reach))
            span = generator.choice((1, 1, 2, 8, 64))
            edit = generator.randrange(5)
            if edit == 0 and result:
                result[min(at, len(result) - 1)] ^= 1 << generator.randrange(8)
            elif edit == 1:
                result[at : at + span] = generator.randbytes(span)
            elif edit == 2:
                result[at:at] = generator.randbytes(span)
            elif edit == 3:
                del result[at : at + span]
            else:
                result[at : at + span] = generator.choice((b"\x00", b"\xff", b'"', b"9")) * span
    return bytes(result)


def hostile_bytes(sound: bytes) -> dict[str, bytes]:
    """Return named attacks on the header of ``sound``, a whole safetensors file, as whole files.

    None of them is the file itself, so none may be taken for it.
    """
    (nbytes,) = struct.unpack_from("<Q", sound)
    text, payload = sound[8 : 8 + nbytes].rstrip(), sound[8 + nbytes :]
    header: dict[str, Any] = json.loads(text)

    def file(json_text: bytes, length: int | None = None) -> bytes:
        padded = json_text.ljust(nbytes)
        return struct.pack("<Q", len(padded) if length is None else length) + padded + payload

    found = _lengths(sound, file(text)[8:], nbytes)
    found |= {name: file(other) for name, other in _texts(text).items()}
    for name, changed in _changes(header):
        found[name] = file(json.dumps(changed, separators=(",", ":")).encode())
    return {name: data for name, data in found.items() if data != sound}


def _lengths(sound: bytes, rest: bytes, nbytes: int) -> dict[str, bytes]:
    """Files that are too short or long, or whose first eight bytes lie."""
    lies = (0, 1, 8, nbytes - 1, nbytes + 1, len(sound), 1 << 20, 1 << 31, 1 << 32, 1 << 63)
    found = {f"length {lie}": struct.pack("<Q", lie) + rest for lie in (*lies, (1 << 64) - 1)}
    cuts = (0, 1, 7, 8, 9, 8 + nbytes // 2, 8 + nbytes - 1, 8 + nbytes, len(sound) - 1)
    found |= {f"cut at {cut}": sound[:cut] for cut in cuts}
    found |= {"one byte more": sound + b"\0", "twice": sound + sound, "zeros": bytes(len(sound))}
    return found


def _texts(text: bytes) -> dict[str, bytes]:
    deep = 200_000
    return {
        "no JSON": b"not json",
        "empty": b"",
        "null": b"null",
        "list": b"[]",
        "number": b"1e999999",
        "huge integer": b'{"__metadata__":' + b"9" * 5000 + b"}",
        "NaN": b'{"__metadata__":NaN}',
        "deep lists": b"[" * deep,
        "deep objects": b'{"a":' * deep,
        "not UTF-8": b"\xff\xfe" + text[2:],
        "UTF-16": text.decode().encode("utf-16"),
        "byte order mark": b"\xef\xbb\xbf" + text,
        "NUL inside": text.replace(b'"layers"', b'"lay\x00ers"', 1),
        "lone surrogate": text.replace(b'"writer":"', b'"writer":"\\ud800', 1),
        "twice the metadata": text[:-1] + b"," + text[1:],
        "field given twice": text.replace(b'"shard"', b'"format":"x","shard"', 1),
        "trailing text": text + b"x",
        "white space": text.replace(b",", b", "),
        "escaped": text.replace(b'"format"', b'"\\u0066ormat"', 1),
        "pickle": b"\x80\x04cposix\nsystem\n(S'touch /tmp/vua-pwned'\ntR.",
        "python": b"__import__('os').system('touch /tmp/vua-pwned')",
        "yaml": b"!!python/object/apply:os.system ['touch /tmp/vua-pwned']",
        "zip": b"PK\x03\x04" + text[4:],
    }


def _changes(header: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Headers in which one field has another value, or is missing, or is one too many."""
    values = (*_VALUES, "f" * 63, "../" * 20, "1" * 5000, "l9-1.h0-1", "0" * 10 + "-" + "9" * 10)
    for part, fields in header.items():
        for field in (*fields, "extra"):
            if field in fields:
                rest = {one: fields[one] for one in fields if one != field}
                yield f"{field} of {part} missing", header | {part: rest}
            for number, value in enumerate(values):
                other = header | {part: fields | {field: value}}
                yield f"{field} of {part} = {value!r:.30} ({number})", other
        yield f"{part} missing", {one: header[one] for one in header if one != part}
        yield from ((f"{part} is {value!r}", header | {part: value}) for value in _VALUES)
    yield "another tensor", header | {"x": header["k"]}


_VALUES: Final[tuple[object, ...]] = (
    *("", "0", "-1", "\x00", "1e3", None, 7, -1, 1.5, [], {}, [1 << 62] * 4, [-1, 1, 1, 1]),
    *([0, 0, 0, 0], [0, 1 << 63], [8, 0], [0, 8], [1.5, 1, float("inf"), 1], "OBJECT"),
)
"""What a field may say to do harm: of a number, a name, a shape, offsets, a dtype."""
