"""A connector's metrics: their meaning, recording and aggregation.

Each half of the connector owns a :class:`Recorder`; any thread may record into it. Once per step
the engine takes the new values, adds up those of all ranks and of the scheduler's half
(:func:`add_up`) and sends them to the process that exposes them; so they consist only of dicts,
lists, strings and numbers.

Values of a request as a whole (tokens, lookups, loads) are recorded by the scheduler's half, once
for all ranks; values of files (bytes, chunks) by each rank. Requests to buckets are metrics, too,
since they cost money.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from vua.io.forks import new_lock
from vua.storage import KINDS, cost_dollars, requests

Series: TypeAlias = dict[str, dict[str, Any]]
"""``[metric][label value]``: a number for counters and gauges, a list of observations for
histograms; the label value of a metric without a label is ``""``."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: ``kind`` is ``counter`` (summed), ``gauge`` (latest) or ``histogram``."""

    kind: str
    documentation: str
    label: str = ""
    """Name of its own label, besides vLLM's (model, engine)."""
    values: tuple[str, ...] = ()
    """Label values that are shown as 0 before they first occur."""


METRICS: Final[dict[str, Metric]] = {
    "vua_lookups_total": Metric(
        "counter",
        "Prompts looked up: all chunks stored that this engine could load (hit), some (partial), "
        "none (miss), or too short for any, of a chunk, a whole block and a token (short). No "
        "answer in time (timeout), storage not asked after repeated timeouts (paused) or before "
        "the weights are identified (unidentified), or prompts that cannot be named (unnamed).",
        "outcome",
        ("hit", "partial", "miss", "short", "timeout", "paused", "unidentified", "unnamed"),
    ),
    "vua_lookup_seconds": Metric(
        "histogram", "Time from a request's arrival to its answer, with any wait it asked for."
    ),
    "vua_prompt_tokens_total": Metric("counter", "Tokens of prompts looked up."),
    "vua_queried_tokens_total": Metric(
        "counter",
        "Tokens of prompts looked up that vLLM's own prefix cache did not have: what "
        "vua_loaded_tokens_total is a share of, as in vLLM's external prefix cache hit rate.",
    ),
    "vua_loads_total": Metric(
        "counter",
        "Loads of requests: everything promised came (complete), a part (partial), nothing "
        "(failed). What did not come is recomputed.",
        "outcome",
        ("complete", "partial", "failed"),
    ),
    "vua_load_seconds": Metric(
        "histogram", "Time from ordering a request's load until all ranks have ended it."
    ),
    "vua_loaded_tokens_total": Metric("counter", "Tokens that loads brought to all ranks."),
    "vua_seconds_saved": Metric(
        "gauge",
        "Seconds that computing the loaded tokens would have taken, by what prompts of their "
        "length take in this engine, minus those of lookups and loads, since the start. Not there "
        "before three prefills are measured, here or in an engine of the same kind before.",
    ),
    "vua_load_decisions_total": Metric(
        "counter",
        "Requests with stored tokens. Loaded: predicted to be faster (faster), before both "
        "are measured (unmeasured), for load_policy or the client's wait_s (asked), or in part, to "
        "see whether the storage is faster again (probe). Not loaded: as computing is predicted to "
        "be faster (compute), or to compare what is stored, or as its writer is put aside "
        "(witness).",
        "decision",
        ("faster", "unmeasured", "asked", "probe", "compute", "witness"),
    ),
    "vua_witnesses_total": Metric(
        "counter",
        "Prompts whose stored chunks were compared with what this engine computes: within the "
        "tolerance (same), not (different; the writer is put aside), or without an answer, since a "
        "file was missing, damaged or not read in time (none).",
        "outcome",
        ("same", "different", "none"),
    ),
    "vua_witness_distance": Metric(
        "gauge", "Distance in the latest of these comparisons; up to 1 it is within the tolerance."
    ),
    "vua_wrong_share_bound": Metric(
        "gauge",
        "At most this share of the chunks that could be loaded is not what this engine computes, "
        "with a probability of 95 %, by the chunks that were drawn at random and compared; shown "
        "from the first of them on.",
    ),
    "vua_writers_aside": Metric(
        "gauge", "Writers of whom this engine loads nothing, since a chunk of theirs differed."
    ),
    "vua_loaded_bytes_total": Metric(
        "counter", "Verified bytes loaded, by the path they took to the engine.", "path"
    ),
    "vua_gds_fallbacks_total": Metric(
        "counter", "Files that GPUDirect Storage did not bring, and host memory then did."
    ),
    "vua_load_stops_total": Metric(
        "counter",
        "Loads of one rank that stopped early: a chunk was missing, corrupt or foreign, reading "
        "it failed (error) or took too long (timeout), storage is not asked after repeated "
        "failures (paused), this worker cannot load (unable), it has other weights or another "
        "adapter by now (reset), or the chunk's writer is not proved, or put aside (writer).",
        "reason",
        (
            *("missing", "corrupt", "foreign", "error", "timeout", "paused", "unable", "reset"),
            "writer",
        ),
    ),
    "vua_chunks_saved_total": Metric(
        "counter",
        "Chunks given to storage by one rank: written, stored already (present), not stored for "
        "want of room (refused), or of buffers, now or for a chunk before (dropped), for an error "
        "(error), for storage that hangs (timeout) or is not asked after repeated failures "
        "(paused), or since the weights have changed (reset).",
        "outcome",
        ("written", "present", "refused", "dropped", "error", "timeout", "paused", "reset"),
    ),
    "vua_prompt_chunk_tokens_total": Metric(
        "counter",
        "Tokens of the whole chunks of prompts that ended: in storage or on their way to it (yes), "
        "or not, since storage was slower than the engine for as long as the request ran, or "
        "failed (no). The share of prompts that is stored is yes / (yes + no).",
        "stored",
        ("yes", "no"),
    ),
    "vua_stored_bytes_total": Metric("counter", "Bytes of the chunks written."),
    "vua_stored_tokens_total": Metric("counter", "Tokens written; counted on the first rank."),
    "vua_save_seconds": Metric("histogram", "Time to write one chunk, without its wait for it."),
    "vua_pending_loads": Metric("gauge", "Loads ordered and not yet ended.", "rank"),
    "vua_pending_saves": Metric("gauge", "Chunks copied out and not yet written.", "rank"),
    "vua_hints_total": Metric(
        "counter",
        "Hints of requests: chunks retained, dropped or pinned, prefetches from slower tiers. Or "
        "refused: an unknown action (unknown), a payload that is not understood (malformed), a pin "
        "without leave (not_allowed), more chunks than half of the limit "
        "(over_budget), nothing that could heed it, as in a bucket or without a slower tier "
        "(not_kept).",
        "outcome",
        (
            *("retained", "dropped", "pinned", "prefetched"),
            *("unknown", "malformed", "not_allowed", "over_budget", "not_kept"),
        ),
    ),
    "vua_bucket_requests_total": Metric(
        "counter",
        "Requests sent to buckets, by kind; those that failed count as failed, too. Repetitions "
        "of one request are not counted.",
        "kind",
        (*KINDS, "failed"),
    ),
    "vua_bucket_bytes_total": Metric(
        "counter",
        "Bytes of objects read from buckets and written to them.",
        "direction",
        ("read", "written"),
    ),
    "vua_bucket_dollars_total": Metric(
        "counter",
        "What these requests cost at the list prices of AWS S3 Standard in us-east-1, in US "
        "dollars; without storage and traffic.",
    ),
}


def add_up(mine: Series, other: Series) -> None:
    """Add the values of ``other``, which stays unchanged, to ``mine``.

    Used both over the ranks of one step and over steps: gauges are labelled by rank, so the latest
    value is right in both cases.
    """
    for name, theirs in other.items():
        kind, series = METRICS[name].kind, mine.setdefault(name, {})
        for label, value in theirs.items():
            if kind == "gauge" or label not in series:
                series[label] = list(value) if kind == "histogram" else value
            else:
                series[label] += value


def summary(data: Series) -> dict[str, int | float]:
    """Return some numbers for an engine's periodic log line."""

    def total(name: str) -> float:
        return sum(data.get(name, {}).values())

    loads_s = data.get("vua_load_seconds", {}).get("", [])
    return {
        "VUA lookups": total("vua_lookups_total"),
        "loaded tokens": total("vua_loaded_tokens_total"),
        "loaded MiB": round(total("vua_loaded_bytes_total") / 2**20, 1),
        "mean load ms": round(1000 * sum(loads_s) / max(1, len(loads_s)), 1),
        "stopped loads": total("vua_load_stops_total"),
        "computed instead": data.get("vua_load_decisions_total", {}).get("compute", 0),
        "stored MiB": round(total("vua_stored_bytes_total") / 2**20, 1),
    }


class Recorder:
    """Collects values between two steps. Thread-safe; :meth:`take` is O(1)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._data: Series = {}

    def add(self, name: str, by: float = 1, label: str = "") -> None:
        with self._lock:
            series = self._data.setdefault(name, {})
            series[label] = series.get(label, 0) + by

    def set(self, name: str, value: float, label: str = "") -> None:
        with self._lock:
            self._data.setdefault(name, {})[label] = value

    def observe(self, name: str, value: float, label: str = "") -> None:
        with self._lock:
            self._data.setdefault(name, {}).setdefault(label, []).append(value)

    def take(self) -> Series | None:
        if not self._data:  # without the lock: values being recorded now wait for the next step
            return None
        with self._lock:
            data, self._data = self._data, {}
        return data


_recorded: Final[Counter[str]] = Counter()
"""The part of the process's counts that was recorded already, by any half of the connector."""
_recording: Final = new_lock()


def record_requests(stats: Recorder) -> None:
    """Record the requests of all buckets since the last call, once per process."""
    if not requests:
        return
    with _recording:
        new = requests.copy() - _recorded
        _recorded.update(new)
    for kind in (*KINDS, "failed"):
        if new[kind]:
            stats.add("vua_bucket_requests_total", new[kind], kind)
    for direction in ("read", "written"):
        if nbytes := new[f"{direction}_nbytes"]:
            stats.add("vua_bucket_bytes_total", nbytes, direction)
    if dollars := cost_dollars(new):
        stats.add("vua_bucket_dollars_total", dollars)


_SECONDS: Final = (
    *(1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
)
"""Buckets from a lookup in a warm page cache to a load from a slow disk."""


class Families:
    """All of :data:`METRICS`, registered with Prometheus. One per process: replaces earlier ones.

    Needs ``prometheus_client``, as engines do.
    """

    def __init__(
        self,
        labelnames: Sequence[str],
        engines: Sequence[Sequence[object]],
        types: Mapping[type, Any] = MappingProxyType({}),
    ) -> None:
        """Register them.

        Args:
            labelnames: labels that each has besides its own.
            engines: values of these, of all engines that are known now. They start at 0, but for
                gauges, which are not there before they have a value.
            types: replaces Prometheus's own types.
        """
        from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # noqa: PLC0415

        kinds: dict[str, tuple[type, dict[str, Any]]] = {
            "counter": (Counter, {}),
            "gauge": (Gauge, {"multiprocess_mode": "mostrecent"}),  # processes share one value
            "histogram": (Histogram, {"buckets": _SECONDS}),
        }
        names = {name.removesuffix("_total") for name in METRICS}
        for collector in list(REGISTRY._collector_to_names):  # noqa: SLF001 - no public way
            if getattr(collector, "_name", "").removesuffix("_total") in names:
                REGISTRY.unregister(collector)
        self._families: dict[str, Any] = {}
        for name, metric in METRICS.items():
            own, shown = [metric.label] if metric.label else [], metric.documentation
            kind, settings = kinds[metric.kind]
            self._families[name] = types.get(kind, kind)(
                name, shown, [*labelnames, *own], **settings
            )
            for label in metric.values or (("",) if metric.kind != "gauge" else ()):
                for engine in engines:
                    self._child(name, label, engine)

    def add(self, data: Series, engine: Sequence[object]) -> None:
        """Add an engine's values, by the values of its labels."""
        for name, series in data.items():
            kind = METRICS[name].kind
            for label, value in series.items():
                child = self._child(name, label, engine)
                if kind == "counter":
                    child.inc(value)
                elif kind == "gauge":
                    child.set(value)
                else:
                    for each in value:
                        child.observe(each)

    def _child(self, name: str, label: str, engine: Sequence[object]) -> Any:
        own = [label] if METRICS[name].label else []
        return self._families[name].labels(*engine, *own)
