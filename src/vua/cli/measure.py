"""`vua advise`: what twice or half the space would bring.

It runs a directory's log of requests through simulated stores (:mod:`vua.capacity.simulation`),
which its first quarter only fills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import click

from vua.capacity.limits import Limits
from vua.capacity.scan import silent
from vua.capacity.simulation import (
    distinct_chunks,
    sample_share,
    simulated_rooms,
    sound_requests,
)
from vua.catalog.base import size
from vua.catalog.opening import open_catalog
from vua.cli.command import command
from vua.cli.output import Report, progress, table, when

_LEAST_REQUESTS: Final = 200
_SAME: Final = 0.005
"""Share of the hits below which two results count as equal."""


@dataclass(frozen=True, slots=True)
class Advice(Report):
    """What more or less space would bring."""

    report: dict[str, Any]

    def describe(self) -> object:
        return self.report

    def show(self) -> None:
        _print(self.report)


@command(
    "advise",
    "estimate the hits of a larger or smaller cache from past requests",
    as_owner_of=True,
)
@click.option(
    "--max-bytes", metavar="SIZE", help="the engines' limit, if the directory has more room"
)
def advise(directory: str, *, max_bytes: str | None = None) -> Advice:
    """Report what stores of several sizes would have found; ``max_bytes`` as in engines' settings.

    If the log has too few requests, the report says so. Raises ConfigError (a bucket),
    StorageError.
    """
    given = Limits(max_bytes=max_bytes)
    catalog = open_catalog(directory)
    log, use = catalog.use_log(), catalog.quick_use(given) or catalog.use(silent)
    most, least = use.limits["max_bytes"] or 0, use.limits["min_free_bytes"] or 0
    free_nbytes = use.free_nbytes or 0
    room_nbytes = int(max(0, min(most, use.nbytes + free_nbytes - least)))
    chunk_nbytes = use.nbytes / use.chunks if use.chunks else None
    requests = sound_requests(log.read())
    report: dict[str, Any] = {
        "version": 1, "directory": directory,
        "requests": len(requests), "chunks": sum(len(one.whole) for one in requests),
        "distinct_chunks": distinct_chunks(requests),
        "first_s": requests[0].time_s if requests else None,
        "last_s": requests[-1].time_s if requests else None,
        "room_nbytes": room_nbytes, "chunk_nbytes": chunk_nbytes and round(chunk_nbytes),
        "sample_share": 1.0, "rooms": [],
    }  # fmt: skip
    if len(requests) < _LEAST_REQUESTS:
        report["advice"] = [f"Too little to advise from: it takes {_LEAST_REQUESTS} requests."]
    elif not chunk_nbytes:
        report["advice"] = ["Nothing is stored, so it is not known how large a chunk is."]
    elif room_nbytes < chunk_nbytes:
        report["advice"] = ["The space is too small for one chunk: see `vua du`."]
    else:
        report["sample_share"] = part = sample_share(report["chunks"])
        with progress() as show:
            report["rooms"] = simulated_rooms(requests, room_nbytes, chunk_nbytes, part, show)
        report["advice"] = _advice({one["share"]: one["hit_ratio"] for one in report["rooms"]})
    return Advice(report)


def _advice(hits: Mapping[float | None, float]) -> list[str]:
    half, now, twice = (hits.get(share, hits[None]) for share in (0.5, 1.0, 2.0))
    if 2.0 in hits:
        found = [f"Twice the space would find {_than(twice, now)}."]
    else:
        found = ["All that was asked for fits: more space cannot bring more hits here."]
    if 0.5 in hits or 1.0 not in hits:  # else it is less than a chunk
        found.append(f"Half the space would find {_than(half, now)}.")
    return found


def _than(hits: float, now: float) -> str:
    if abs(hits - now) <= _SAME * now:
        return "about as much"
    if not now:
        return f"{100 * hits:.1f} % of what is asked for, the present space nothing"
    return f"{100 * abs(hits - now) / now:.0f} % {'more' if hits > now else 'less'}"


def _print(report: dict[str, Any]) -> None:
    text = f"{report['directory']}: {report['requests']:,} requests for {report['chunks']:,} chunks"
    if report["requests"]:
        text += f" ({report['distinct_chunks']:,} different), "
        text += f"{when(report['first_s'])} to {when(report['last_s'])}"
    print(text)
    if report["rooms"]:
        print(
            f"room for {size(report['room_nbytes'])} in chunks of {size(report['chunk_nbytes'])}; "
            "the first quarter of the requests fills it, hits are counted in the rest"
        )
        if report["sample_share"] < 1:
            part = f"{100 * report['sample_share']:.1f} %"
            print(f"simulated: a sample, {part} of the chunks, in stores of {part} of these sizes")
        rows = []
        for one in report["rooms"]:
            written, hits = one["written_per_hit_nbytes"], (one["hit_ratio"], one["lru_hit_ratio"])
            name = "unbounded" if one["share"] is None else f"{one['share']:g} x"
            ratios = [f"{100 * ratio:.1f} %" for ratio in hits]
            rows.append(
                [name, size(one["nbytes"]), *ratios, "-" if written is None else size(written)]
            )
        table(["room", " size", " hits", " hits by LRU", " written per chunk hit"], rows)
    print(" ".join(report["advice"]))
