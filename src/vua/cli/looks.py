"""`vua top`: repeated looks at a cache, at what is there, new, used and gone.

It uses names and times alone: a chunk with a younger mtime than at the previous look was used (or
is new), a missing one was evicted (:mod:`vua.capacity.lru`). A process updates a prefix's mtime at
most once a minute, so `used` counts chunks in use, not requests. At a million chunks a look takes
seconds: the interval runs from its end to the start of the next one.

A bucket is listed: its times are those of the last write or renewal, and a request names 1,000
objects. So it is looked at once a minute by default, and `top` shows the cost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from vua.capacity.saved import Totals, saved_today
from vua.catalog.base import Catalog, Look
from vua.catalog.contents import SHORT
from vua.catalog.opening import open_catalog
from vua.cli.command import command, duration_s, option
from vua.cli.output import (
    SOUND,
    Output,
    Report,
    clear_screen,
    cost,
    dated,
    progress,
    requests_of,
    table,
)
from vua.errors import explaining
from vua.io.words import about, counted, size

_INTERVAL_S: Final = 2.0
_WINDOWS_S: Final = (60, 3600, 86_400)


def _show(
    of: Mapping[str, Any], counts: Mapping[str, int], saved: Totals | None, said: str
) -> None:
    text = f"{of['directory']}: {counted(of['chunks'], 'chunk', exact=of['exact'])}, "
    text += about(of["nbytes"], size, exact=of["exact"])
    text += "" if of["max_bytes"] is None else f" of at most {size(of['max_bytes'])}"
    text += "" if of["free_nbytes"] is None else f"; {size(of['free_nbytes'])} of the disk free"
    print(f"{text}{cost(counts)}; over {of['seconds']:.3f} s")
    if said:
        print(said)
    if saved:
        print(f"today: {saved}")
    head = ["namespace", "model", " chunks", " size", " new/s", " used/s", " gone/s"]
    head += [f" used in {text}" for text in ("1 min", "1 h", "1 day")] + ["salts"]
    table(head, [_row(one) for one in of["namespaces"]])


def _row(one: Mapping[str, Any]) -> list[object]:
    salts = [f"{salt}:{count}" for salt, count in one["salts"].items() if salt != "-"]
    number = partial(about, exact=one["exact"])
    head = [one["namespace"][:SHORT], one["model"], number(one["chunks"])]
    head.append(number(one["nbytes"], size))
    rates = [one["new_per_s"], one["used_per_s"], one["gone_per_s"]]
    return [*head, *rates, *map(number, one["used_within"].values()), " ".join(salts) or "-"]


@command("top")
@option(
    "--interval TIME",
    "between looks; default 2s, of a bucket 60s",
    name="interval_s",
    type=duration_s,
)
@option("--once", "look once, over one interval")
def top(
    directory: str, interval_s: float | None = None, *, once: bool = False, output: Output
) -> int:
    """Show repeatedly what is stored, used, new and gone; ``once``: over one interval.

    Raises ConfigError, StorageError.
    """
    catalog = open_catalog(directory)
    interval_s = interval_s or catalog.look_s or _INTERVAL_S
    with explaining(directory):
        before, began_s = _looks(catalog, {}), time.monotonic()
        while True:
            time.sleep(interval_s)
            now, now_s = _looks(catalog, before), time.monotonic()
            report = _compared(catalog, now, now_s - began_s)
            if not output.is_json and not once:
                clear_screen()
            output.show(report)
            if once:
                return SOUND
            before, began_s = now, now_s


def _looks(catalog: Catalog, past: Mapping[str, Look]) -> dict[str, Look]:
    with progress() as show, catalog.namespaces(show) as (found, _):
        ours = [space for space in found if space.is_ours]
        return {space.name: space.look(show, past.get(space.name)) for space in ours}


def _compared(catalog: Catalog, now: dict[str, Look], took_s: float) -> Report:
    newest = (one.chunks.totals().newest_ns or 0 for one in now.values())
    now_ns = max([time.time_ns(), *newest])  # mtimes are by the server's clock, which may be ahead
    rows = [_compare(one, now_ns, took_s) for _, one in sorted(now.items())]
    saved, counts = saved_today(catalog.where), dict(catalog.counts)
    values: dict[str, Any] = {
        "directory": catalog.where,
        "nbytes": sum(one["nbytes"] for one in rows),
        "max_bytes": catalog.limits(catalog.bounds())["max_bytes"],
        "free_nbytes": catalog.free_nbytes(),
        **requests_of(counts),
        "chunks": sum(one["chunks"] for one in rows),
        "exact": all(one["exact"] for one in rows),
        "seconds": round(took_s, 3),
        "namespaces": rows,
        "saved_today": saved and saved.describe(),
    }
    said = dated([one.whole for one in now.values() if one.whole])
    return Report(partial(_show, values, counts, saved, said), **values)


def _compare(now: Look, now_ns: int, took_s: float) -> dict[str, Any]:
    total, per_s, exact = now.chunks.totals(), now.scale / took_s, now.whole is None
    chunks, nbytes = total.chunks, total.nbytes
    if now.whole is not None:
        chunks, nbytes = now.whole.chunks, now.whole.nbytes
    return {
        "namespace": now.name,
        "model": now.model,
        "chunks": chunks,
        "nbytes": nbytes,
        "exact": exact,
        "counted_s": now.whole and now.whole.counted_s,
        "new_per_s": round(now.new * per_s, 3),
        "new_nbytes_per_s": round(now.new * per_s * total.nbytes / max(1, total.chunks)),
        "used_per_s": round(now.used * per_s, 3),
        "gone_per_s": round(now.gone * per_s, 3),
        "used_within": {
            str(window): round(now.chunks.used_since(now_ns - window * 10**9) * now.scale)
            for window in _WINDOWS_S
        },
        "salts": dict(sorted(now.salts.items(), key=lambda one: -one[1])[:10]),
    }
