"""`vua pin` and `vua ttl` on a cache in a bucket: with the same marks and files as a directory.

No rule of a bucket knows pins: `vua gc` keeps to them, and renews what is pinned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from vua.capacity.bucket import (
    pin_in_bucket,
    read_bucket_bounds,
    unpin_in_bucket,
    write_bucket_bounds,
)
from vua.capacity.limits import Limits
from vua.capacity.scan import TTL_FOLDER
from vua.cli.arguments import duration
from vua.cli.bucket_chunks import BucketSpace, listed_spaces, opened_bucket, resolve
from vua.cli.removal import print_pins
from vua.cli.text import SOUND, Write, plain, progress
from vua.errors import ConfigError
from vua.storage.bucket_mark import bucket_descriptions, claim_bucket
from vua.storage.names import kind_at

__all__ = ["pins_bucket", "ttl_bucket"]


def pins_bucket(url: str, names: Sequence[str], *, remove: bool, write: Write | None) -> int:
    """Pin chunks with their prefixes, unpin them, or (no names) list what is pinned."""
    place = opened_bucket(url)
    if names:
        claim_bucket(place, tool=True)
    elif remove:
        msg = "name the chunks to unpin; `vua pin URL` lists what is pinned"
        raise ConfigError(msg)
    report: list[dict[str, object]] = []
    with progress() as show:
        spaces = listed_spaces(place, show)
        for text in names:
            space, chunk = resolve(spaces, text)
            if not chunk:
                msg = f"{text} is a namespace; pin a chunk, which keeps its whole prefix"
                raise ConfigError(msg)
            held = list(space.ancestors(chunk))
            show("writing marks", amount=len(held), unit="chunks")
            (unpin_in_bucket if remove else pin_in_bucket)(space.place, chunk, held)
            report.append({"namespace": space.name, "chunk": chunk, "chunks": len(held)})
    if not names:
        report = [one for space in spaces for one in _pinned(space)]
    if write is not None:
        write({"directory": url, "unpinned" if remove else "pinned": report})
    else:
        print_pins(url, report, "released" if remove else "held")
    return SOUND


def _pinned(space: BucketSpace) -> list[dict[str, object]]:
    """The pins of a namespace, with the number of chunks that each one holds."""
    held = Counter(pin for one in space.chunks.values() for pin in one.pins)
    return [
        {"namespace": space.name, "chunk": chunk, "chunks": count}
        for chunk, count in sorted(held.items())
    ]


def ttl_bucket(url: str, seconds: float | None, *, off: bool, write: Write | None) -> int:
    """Show, set or (``off``) lift the life of what nobody uses.

    Engines renew what they use when half of it has passed; `vua gc` and the bucket's lifecycle rule
    (`vua doctor` prints one) delete the rest.
    """
    place = opened_bucket(url)
    bounds = read_bucket_bounds(place)
    if off or seconds is not None:
        claim_bucket(place, tool=True)
        bounds = replace(bounds, ttl_s=None if off else Limits(ttl_s=seconds).ttl_s)
        write_bucket_bounds(place, bounds)
    own = sum(
        1
        for one in bucket_descriptions(place)
        for each in place.bucket.walk((place / one.name / TTL_FOLDER).key)
        if kind_at(each.key.removeprefix(f"{(place / one.name).key}/")) == "ttl"
    )
    if write is not None:
        write({"directory": url, "ttl_s": bounds.ttl_s, "chunks_with_their_own": own})
    else:
        now = bounds.ttl_s
        text = (
            "no time to live" if now is None else f"unused chunks are deleted after {duration(now)}"
        )
        print(plain(f"{url}: {text}, by `vua gc` and the bucket's lifecycle rule"))
        if own:
            print(f"{own} chunks came with a time to live of their own, which is not kept here")
    return SOUND
