"""Writes `implementations/conformance/cases.json`: what a reader must take, and must refuse.

`python tests/make_conformance.py` from the root of the repository, with `src` or an installed vua.
Every case is a golden file with some bytes changed, so the table stays small.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from conformity import Entry, golden_entries, mended
from forgery import checksums_of
from make_golden import CASES, CHUNK, GOLDEN
from vua.format.entry import EntryCodec
from vua.format.identity import Identity
from vua.format.parse import parse_entry

TABLE = Path(__file__).parent.parent / "implementations" / "conformance" / "cases.json"
WRITER = b"golden                                          "
Change = Callable[[Entry], bytes]


@dataclass(frozen=True)
class Case:
    """One file under the name of one entry."""

    name: str
    entry: Entry
    data: bytes
    kind: str
    """"right", or why it is a miss: "damaged" or "foreign"."""
    reason: str


def text_changed(entry: Entry, old: str, new: str, *, check: bool = True) -> bytes:
    """The file with other text in its JSON; spaces after it keep its length."""
    stop = int(8 + struct.unpack("<Q", entry.data[:8])[0])
    text = entry.data[8:stop]
    if text.count(old.encode()) != 1:
        raise AssertionError(f"{entry.name}: {old!r} is there {text.count(old.encode())} times")
    text = text.replace(old.encode(), new.encode()).rstrip(b" ").ljust(len(text))
    if 8 + len(text) != stop:
        raise AssertionError("no room for it")
    data = entry.data[:8] + text + entry.data[stop:]
    return mended(data, entry.payload_at) if check else data


def bytes_changed(entry: Entry, at: int, new: bytes, *, check: bool = False) -> bytes:
    """The file with other bytes from a place on."""
    data = entry.data[:at] + new + entry.data[at + len(new) :]
    return mended(data, entry.payload_at) if check else data


def flipped(entry: Entry, at: int, *, check: bool = False) -> bytes:
    """The file with its lowest bit turned at a place; counted from the end where below 0."""
    at %= len(entry.data)
    return bytes_changed(entry, at, bytes([entry.data[at] ^ 1]), check=check)


def length_changed(entry: Entry, length: int) -> bytes:
    """The file with another number in its first eight bytes."""
    return struct.pack("<Q", length) + entry.data[8:]


def checksums_mended(entry: Entry, data: bytes) -> bytes:
    """The file with checksums of the bytes that it holds, and a right check."""
    info = parse_entry(entry.data)
    codec = EntryCodec(info.namespace, info.layout, info.shard, info.kind)
    sums = checksums_of(codec, data[info.header_nbytes :]).tobytes()
    at = codec.table_offset
    return mended(data[:at] + sums + data[at + len(sums) :], info.header_nbytes)


def plain_cases(entry: Entry, earlier: Entry) -> Iterator[Case]:
    """Cases of the second chunk of a prompt; ``earlier`` is the first."""
    info = parse_entry(entry.data)
    codec = EntryCodec(info.namespace, info.layout, info.shard)
    table, at = codec.table_offset, info.header_nbytes
    created = text_changed(entry, '"created":"1767225600"', '"created":"0000000001"')
    odd = WRITER[:6] + b" 1.2/_-+:" + WRITER[15:]
    yield Case("another time", entry, created, "right", "nothing depends on `created`")
    yield Case(
        "another writer",
        entry,
        text_changed(entry, WRITER.decode(), odd.decode()),
        "right",
        "any writer's name",
    )
    for name, data, reason in (
        ("first byte of K", flipped(entry, at), "the checksum of a block is wrong"),
        ("last byte of V", flipped(entry, -1), "the checksum of a block is wrong"),
        ("a checksum", flipped(entry, table), "the check is wrong"),
        (
            "a checksum, and the check mended",
            flipped(entry, table, check=True),
            "the checksum of a block is wrong, in its lowest bit",
        ),
        ("the check", flipped(entry, codec.check_offset), "the check is wrong"),
        (
            "created, and the check not mended",
            text_changed(entry, "1767225600", "1767225601", check=False),
            "the check covers `created`",
        ),
        (
            "writer, and the check not mended",
            text_changed(entry, "golden ", "golder ", check=False),
            "the check covers `writer`",
        ),
        (
            "the check in capitals",
            entry.data[: codec.check_offset]
            + entry.data[codec.check_offset : codec.check_offset + 16].upper()
            + entry.data[codec.check_offset + 16 :],
            "hex digits are lower case",
        ),
        ("a letter in created", text_changed(entry, '"1767225600"', '"176722560x"'), "ten digits"),
        ("a sign in created", text_changed(entry, '"1767225600"', '"+767225600"'), "ten digits"),
        (
            "a character in writer",
            text_changed(entry, "golden ", "golden;"),
            "not one of those allowed",
        ),
        (
            "a space that counts",
            bytes_changed(entry, table - 1, b"\t", check=True),
            "spaces, and no tabs",
        ),
        ("one byte less", entry.data[:-1], "another length"),
        ("one byte more", entry.data + b"\0", "another length"),
        ("nothing", b"", "another length"),
        ("eight bytes", entry.data[:8], "another length"),
        ("the header alone", entry.data[:at], "another length"),
        ("zeros before K", bytes(at) + entry.data[at:], "a page that the disk lost"),
        ("J of 0", length_changed(entry, 0), "another J"),
        ("J one more", length_changed(entry, table - 8 + 1), "another J"),
        (
            "J one more, and the check mended",
            mended(length_changed(entry, table - 8 + 1), at),
            "another J",
        ),
        ("J of 2^63", length_changed(entry, 1 << 63), "another J: nothing may be allocated for it"),
    ):
        yield Case(name, entry, data, "damaged", reason)
    first, shard = earlier.asked.name, entry.shard.name
    for name, data, reason in (
        ("the chunk before, in its place", earlier.data, "prefix_hash, parent and tokens"),
        ("another namespace", text_changed(entry, info.namespace, "0" * 64), "namespace"),
        ("another chunk", text_changed(entry, entry.asked.name, "0" * 64), "prefix_hash"),
        ("another parent", text_changed(entry, first, "0" * 64), "parent"),
        (
            "another position",
            text_changed(entry, "0000000004-0000000008", "0000000008-0000000012"),
            "tokens",
        ),
        ("a model of more layers", text_changed(entry, '"layers":"2"', '"layers":"3"'), "layers"),
        (
            "a model of more heads",
            text_changed(entry, '"kv_heads":"2"', '"kv_heads":"3"'),
            "kv_heads",
        ),
        ("a group", text_changed(entry, f'"{shard}"', f'"w8.{shard}"'), "shard"),
        ("another dtype", dtype_changed(entry, "F16"), "dtype"),
    ):
        yield Case(name, entry, data, "foreign", reason)
    for name, old, new, reason in (
        (
            "a shard outside the model",
            f'"{shard}"',
            '"l1-3.h1-3"',
            "layers 1 to 3 of a model of 2 layers",
        ),
        ("no layers", '"layers":"2"', '"layers":"0"', "at least 1"),
        ("an odd position", "0000000004-0000000008", "0000000002-0000000006", "a multiple of 4"),
        ("no parent", first, "-" * 64, "only the first chunk of a prompt has none"),
        ("a parent in capitals", first, first.upper(), "hex digits are lower case"),
        ("a namespace that is none", info.namespace, "g" * 64, "hex digits"),
    ):
        data = text_changed(entry, old, new)
        yield Case(name, entry, data, "damaged", f"{reason}: no reader asks for such an entry")
    yield from json_cases(entry)


def dtype_changed(entry: Entry, dtype: str) -> bytes:
    """The file with another dtype of as many bytes."""
    data = entry.data
    for name in "kv":
        old, new = f'"{name}":{{"dtype":"BF16"', f'"{name}":{{"dtype":"{dtype}"'
        data = text_changed(replace(entry, data=data), old, new)
    return data


def json_cases(entry: Entry) -> Iterator[Case]:
    """JSON that says the same, or almost, and is not byte for byte what is demanded."""
    last = "[160,288]}}"
    for name, old, new, reason in (
        ("white space", '"layers":"2",', '"layers":"2", ', "the JSON has no white space"),
        ("a line break at its end", last, last + "\n", "spaces alone follow the JSON"),
        (
            "members in another order",
            '"layers":"2","kv_heads":"2"',
            '"kv_heads":"2","layers":"2"',
            "members have one order",
        ),
        ("a member twice", '"layers":"2",', '"layers":"2","layers":"2",', "each member once"),
        ("a member missing", '"layers":"2",', "", "no member is missing"),
        ("a number for a text", '"layers":"2"', '"layers":2', "all are strings"),
        ("a leading zero", '"layers":"2"', '"layers":"02"', "no leading zeros"),
        ("a float for an integer", '"shape":[2,2,1]', '"shape":[2,2,1.0]', "integers"),
        (
            "an escaped letter",
            '"format":"vua.entry.v1"',
            '"format":"\\u0076ua.entry.v1"',
            "no escapes",
        ),
        ("a byte after the JSON", last, last + "x", "spaces alone follow the JSON"),
        (
            "K one token longer",
            '"k":{"dtype":"BF16","shape":[2,2,4,4]',
            '"k":{"dtype":"BF16","shape":[2,2,5,4]',
            "the shape of K",
        ),
        ("offsets of K shifted", "[32,160]", "[31,160]", "no gaps and no overlaps"),
        ("tokens without zeros", '"0000000004-0000000008"', '"4-8"', "ten digits each"),
        (
            "no V",
            ',"v":{"dtype":"BF16","shape":[2,2,4,4],"data_offsets":[160,288]}',
            "",
            "V is there unless v_dim is 0",
        ),
    ):
        yield Case(name, entry, text_changed(entry, old, new), "damaged", reason)
    below = text_changed(entry, "vua.entry.v1", "vua.entry.v0")
    yield Case("format 0", entry, below, "damaged", "no version has this number")
    for name, old, new, reason in (
        ("format 2", "vua.entry.v1", "vua.entry.v2", "another format has other namespaces"),
        ("an unknown member", '"layers":"2",', '"layers":"2","new":"1",', "all members are known"),
        (
            "an unknown array",
            '},"k":',
            '},"scales":{"dtype":"F32","shape":[0],"data_offsets":[32,32]},"k":',
            "all arrays are known",
        ),
        ("an unknown dtype", None, None, "all dtypes are known"),
    ):
        data = dtype_changed(entry, "F4_9") if old is None else text_changed(entry, old, str(new))
        yield Case(name, entry, data, "damaged", reason)


def sealed_cases(entry: Entry, plain: Entry) -> Iterator[Case]:
    """Cases of a sealed file."""
    info = parse_entry(entry.data)
    codec = EntryCodec(info.namespace, info.layout, info.shard, info.kind)
    at, tags = info.header_nbytes, codec.table_offset + 8 * codec.blocks
    changed = flipped(entry, at)
    wrong_nonce = text_changed(entry, info.seal_info.nonce, "f" * 32)
    for name, data, reason in (
        ("a byte of K, and all else mended", checksums_mended(entry, changed), "a tag is wrong"),
        ("a tag", flipped(entry, tags, check=True), "a tag is wrong"),
        ("another nonce", wrong_nonce, "a tag is wrong: the file's key is made of the nonce"),
        (
            "a nonce in capitals",
            text_changed(entry, info.seal_info.nonce, "F" * 32),
            "hex digits are lower case",
        ),
        ("cut short", entry.data[:-16], "another length"),
        (
            "format 1",
            text_changed(entry, "vua.sealed.v2", "vua.sealed.v1"),
            "no version has this number",
        ),
    ):
        yield Case(name, entry, data, "damaged", reason)
    for name, data, reason in (
        ("a plain file in its place", plain.data, "a keyed reader takes no plain file"),
        ("the id of another key", text_changed(entry, info.seal_info.key_id, "0" * 16), "key"),
        ("the other kind", text_changed(entry, f'"seal":"{info.kind}"', '"seal":"other"'), "seal"),
    ):
        yield Case(name, entry, data, "foreign", reason)
    stranger = replace(entry, key=bytes(32))
    yield Case(
        "another key asks for it",
        stranger,
        entry.data,
        "foreign",
        "names, key and tags are another key's",
    )
    if codec.blocks > 1:
        size = codec.block_nbytes()[0]
        swapped = entry.data[at + size : at + 2 * size] + entry.data[at : at + size]
        data = entry.data[:tags] + entry.data[tags + 16 : tags + 32] + entry.data[tags : tags + 16]
        data += entry.data[tags + 32 : at] + swapped + entry.data[at + 2 * size :]
        yield Case(
            "two blocks swapped with their tags and checksums",
            entry,
            checksums_mended(entry, data),
            "damaged",
            "a tag belongs to its block's number",
        )


def cases() -> list[Case]:
    """All cases, in order."""
    entries = golden_entries()
    named = {(one.identity.model, one.name.partition("/")[0], one.chunk): one for one in entries}
    found = [Case("unchanged", one, one.data, "right", "") for one in entries]
    whole = [named["golden whole", "golden", chunk] for chunk in (0, 1)]
    found += plain_cases(whole[1], whole[0])
    for model, plain in (
        ("golden sealed", whole[0]),
        ("golden encrypted", named["golden latent", "golden", 0]),
    ):
        found += sealed_cases(named[model, "golden_sealed_v2", 0], plain)
    return found


# -- the table ------------------------------------------------------------------------------------


def edits(old: bytes, new: bytes) -> list[list[Any]]:
    """What makes ``new`` of ``old``, once that is cut or filled up with zeros to its length."""
    padded = old[: len(new)].ljust(len(new), b"\0")
    differs = np.frombuffer(padded, np.uint8) != np.frombuffer(new, np.uint8)
    found: list[list[Any]] = []
    stop = -1
    for at in np.flatnonzero(differs).tolist():
        if at - stop <= 8 and found:
            found[-1][1] = new[found[-1][0] : at + 1].hex()
        else:
            found.append([at, new[at : at + 1].hex()])
        stop = at
    return found


def table() -> dict[str, Any]:
    """The table as JSON."""
    rows, entries = [], {}
    golden = {one.data: one for one in golden_entries()}
    for case in cases():
        asked = case.entry.described()
        place = f"{case.entry.name}{' by another key' if case.entry.key == bytes(32) else ''}"
        entries[place] = {
            **asked,
            "tokens": list(case.entry.tokens),
            "extras": {
                str(chunk): [[tag, value.hex()] for tag, value in pairs]
                for chunk, pairs in case.entry.extras.items()
            },
        }
        row: dict[str, Any] = {"name": case.name, "asked": place, "expected": case.kind}
        source = golden.get(case.data, case.entry)
        row |= {"file": source.name, "edits": edits(source.data, case.data)}
        if len(case.data) != len(source.data):
            row["length"] = len(case.data)
        row["sha256"] = hashlib.sha256(case.data).hexdigest()
        if case.reason:
            row["reason"] = case.reason
        rows.append(row)
    return {"about": ABOUT, "entries": entries, "files": rows, "descriptions": descriptions()}


ABOUT: Final = "See README.md. Made by tests/make_conformance.py."


def described_as(text: str, **changes: object) -> str:
    """A description with other members of the identity, whose digest is right."""
    described = json.loads(text)
    identity = described["identity"] | changes
    names = ("model", "weights", "adapter", "kv_dtype", "kv_scales", "rope", "epoch")
    texts = ["vua.identity.v1"]
    for name in (*names, "chunk_tokens"):
        texts += [name, str(identity[name])]
    framed = (len(one).to_bytes(8, "little") + one.encode() for one in texts)
    identity["namespace"] = hashlib.sha256(b"".join(framed)).hexdigest()
    return json.dumps({**described, "identity": identity})


def descriptions() -> list[dict[str, str]]:
    """Texts of a namespace.json."""
    model, layout, _, _ = CASES[0]
    identity = Identity(model=model, kv_dtype=layout.dtype, chunk_tokens=CHUNK, name=model)
    name = identity.namespace
    text = (GOLDEN / name / "namespace.json").read_text("utf-8")
    more = text.replace('  "kv_heads": 2,\n', '  "kv_heads": 2,\n  "new": 1,\n')
    other = replace(identity, model="x").describe()
    several = json.loads(text)
    several["further_groups"] = [
        {**several["layout"], "group": f"w{number}"} for number in range(1, 65)
    ]
    window = text.replace('"chunk_tokens": 4\n }\n}', '"chunk_tokens": 4,\n  "group": "q5"\n }\n}')
    rows = [
        ("unchanged", text, "right", ""),
        (
            "without white space",
            json.dumps(json.loads(text), separators=(",", ":")),
            "right",
            "any JSON",
        ),
        (
            "another name",
            text.replace('"name": "golden whole"', '"name": "x"'),
            "right",
            "`name` is for people",
        ),
        *(
            (f"counted {said[:12]!r}", f'{text[:-3]},\n "counted": {said}\n}}\n', "right", reason)
            for said, reason in (
                ('{"hidden_size": 64}', "`counted` is for people"),
                ('["hidden_size"]', "whatever it is"),
                ('{"hidden_size": 6', "also where the file is no JSON for it"),
                ('{"hidden_size" 64}', "also where the file is no JSON for it"),
            )
        ),
        (
            "another model",
            text.replace('"model": "golden whole"', '"model": "x"'),
            "damaged",
            "the identity has another digest",
        ),
        (
            "another directory",
            json.dumps({**json.loads(text), "identity": other}),
            "foreign",
            "a sound description of another namespace",
        ),
        (
            "an unknown rope",
            described_as(text, rope="spiral"),
            "damaged",
            "neox, interleaved or nothing",
        ),
        (
            "no tokens in a chunk",
            described_as(text, chunk_tokens=0),
            "damaged",
            "chunk_tokens of 1 to 65536",
        ),
        (
            "too many cells",
            text.replace('"layers": 2', '"layers": 2048').replace(
                '"kv_heads": 2', '"kv_heads": 1024'
            ),
            "damaged",
            "at most 2^20 layers times KV heads",
        ),
        (
            "65 groups",
            json.dumps(several, separators=(",", ":")),
            "damaged",
            "at most 64 groups",
        ),
        (
            "groups that are a text",
            text[:-3] + ',\n "further_groups": "w5"\n}',
            "damaged",
            "a list",
        ),
        (
            "an unknown member of the identity",
            text.replace('"rope"', '"new": 1,\n  "rope"'),
            "damaged",
            "all members are known",
        ),
        (
            "no member of the identity",
            text.replace('  "adapter": "",\n', ""),
            "damaged",
            "all members are there",
        ),
        ("cut short", text[:-20], "damaged", "not JSON"),
        ("a list", "[]", "damaged", "not an object"),
        ("null", "null", "damaged", "not an object"),
        ("no layers", text.replace('"layers": 2', '"layers": 0'), "damaged", "at least 1"),
        (
            "a text for layers",
            text.replace('"layers": 2', '"layers": "2"'),
            "damaged",
            "an integer",
        ),
        (
            "true for KV heads",
            text.replace('"kv_heads": 2', '"kv_heads": true'),
            "damaged",
            "an integer",
        ),
        (
            "k_dim of 2^40",
            text.replace('"k_dim": 4', f'"k_dim": {1 << 40}'),
            "damaged",
            "above the limit: nothing may be allocated for it",
        ),
        (
            "100,000 KV heads",
            text.replace('"kv_heads": 2', '"kv_heads": 100000'),
            "damaged",
            "names of shards have five digits",
        ),
        ("a byte order mark", "\ufeff" + text, "damaged", "UTF-8 without a mark"),
        (
            "format 2",
            text.replace("vua.namespace.v1", "vua.namespace.v2"),
            "damaged",
            "another format",
        ),
        (
            "identity 2",
            text.replace("vua.identity.v1", "vua.identity.v2"),
            "damaged",
            "it hashes to another name",
        ),
        (
            "an unknown member",
            text.replace('"format"', '"new": 1,\n "format"'),
            "right",
            "it is ignored",
        ),
        ("an unknown member of the layout", more, "damaged", "all members are known"),
        (
            "an unknown dtype",
            text.replace('"dtype": "BF16"', '"dtype": "F4"'),
            "damaged",
            "all dtypes are known",
        ),
        ("an unknown group", window, "damaged", "all groups are known"),
    ]
    return [
        {"name": one, "directory": name, "text": new, "expected": kind}
        | ({"reason": reason} if reason else {})
        for one, new, kind, reason in rows
    ]


def text() -> str:
    """The table as it lies in the repository: a line for each row."""
    made = table()
    parts = [f' "about": {json.dumps(made["about"])}']
    entries = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in made["entries"].items()]
    parts.append(' "entries": {\n' + ",\n".join(entries) + "\n }")
    for name in ("files", "descriptions"):
        lines = [f"  {json.dumps(one)}" for one in made[name]]
        parts.append(f' "{name}": [\n' + ",\n".join(lines) + "\n ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(text(), "utf-8")
