"""Measures which configs transformers and vLLM compute alike, and writes what VUA goes by.

    PYTHONPATH=src python tests/make_shared_configs.py [--types llama,...] [--again]

A model of each variant of each model type that `vua.format.identity` lists is made and computed by
both engines (`e2e.meeting`); some 5 s each, an hour in all. Variants that change different keys are
tried together, and by themselves where they differ together. What was measured stays in
``tests/shared_configs.json``, which is added to; the table of what is the same goes to
``src/vua/format/shared_configs.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from helpers import ROOT

MEASURED: Final = ROOT / "tests" / "shared_configs.json"
TABLE: Final = ROOT / "src" / "vua" / "format" / "shared_configs.json"
SAME: Final = 1e-3
"""The largest distance of equal K and V relative to their length: float32 gives 1e-6."""
NAMES: Final = frozenset(
    "bos_token eos_token model_name tokenizer_class transformers.js_config unsloth_version".split()  # noqa: SIM905 - words
)
"""Keys whose values are a name or a note: where one is shown, any is."""

Measured = dict[str, Any]
"""Of one variant: type, name, edits, places ([place, value] of the configs as both engines resolve
them, of the base all and of other variants what the base has not), distance or problem."""


def is_same(one: Measured) -> bool:
    """Whether both engines computed the same K and V."""
    return bool(one.get("distance", 1.0) <= SAME)


def table(measured: Iterable[Measured]) -> dict[str, dict[str, list[Any]]]:
    """By model type and place: the values that were shown; "+" any number above 0, "*" any value.

    Under the type "*" stands what all types have.
    """
    by_type: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        by_type[one["type"]].append(one)
    found = {
        kind: _of_type(variants)
        for kind, variants in sorted(by_type.items())
        if any(one["name"] == "base" and is_same(one) for one in variants)
    }
    first, *others = found.values()
    everywhere = {
        place: values
        for place, values in first.items()
        if all(each.get(place) == values for each in others)
    }
    for places in found.values():
        for place in everywhere:
            del places[place]
    return {"*": everywhere, **found}


def _of_type(variants: list[Measured]) -> dict[str, list[Any]]:
    shown: dict[str, list[Any]] = defaultdict(list)
    base: list[Any] = []
    for one in variants:
        if is_same(one):
            base = one["places"] if one["name"] == "base" else base
            for place, value in one["places"]:
                if not any(is_equal(value, each) for each in shown[place]):
                    shown[place].append(value)
    fixed = set()
    for one in variants:
        if is_same(one) or "distance" not in one:
            continue
        unlike = [(place, value) for place, value in one["places"] if [place, value] not in base]
        fixed |= {place for place, _ in unlike} if len(one["edits"]) == 1 else set()
        if all(
            any(is_equal(value, each) for each in shown.get(place, [])) for place, value in unlike
        ):
            # each by itself is the same, and together they are not: none is believed
            fixed |= {place for place, _ in unlike}
            for place, value in unlike:
                shown[place] = [each for each in shown[place] if not is_equal(each, value)]
    return {
        place: _general(place, values, fixed=place in fixed)
        for place, values in sorted(shown.items())
        if values
    }


def _general(place: str, values: list[Any], *, fixed: bool) -> list[Any]:
    if place in NAMES:
        return ["*"]
    numbers = [value for value in values if _is_number(value)]
    if fixed or len(numbers) < 2 or max(numbers) <= 0:
        return values
    return ["+", *(each for each in values if not _is_number(each) or each <= 0)]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_equal(one: object, other: object) -> bool:
    """Whether JSON has the same value: 1 and 1.0, but not 1 and true."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def condensed(
    kind: str, name: str, edits: Mapping[str, Any], found: Mapping[str, Any], base: list[Any]
) -> Measured:
    """What is kept of a measurement."""
    from vua.format.shared_config import facts

    places: list[Any] = []
    for config in (found.get("transformers", {}), found.get("vllm", {})):
        for place, value in facts(config):
            if [place, value] not in places and [place, value] not in base:
                places.append([place, value])
    said: Measured = {"type": kind, "name": name, "edits": dict(edits), "places": places}
    if "distance" in found:
        said["distance"] = float(f"{found['distance']:.1e}")
    else:
        said["problem"] = str(found["problem"])[:120]
    return said


def measure(kind: str, known: list[Measured]) -> None:
    """Measure what is not known of a type, and add it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from e2e import meeting
    from e2e.harness import driver, models
    from vua.format.identity import IGNORED_CONFIG_KEYS

    names = {one["name"] for one in known if one["type"] == kind}
    of_base: list[Any] = next(
        (one["places"] for one in known if one["type"] == kind and one["name"] == "base"), []
    )

    def tried(name: str, edits: Mapping[str, Any]) -> Measured:
        if name in names:
            return next(one for one in known if one["type"] == kind and one["name"] == name)
        job = {"model_type": kind, "edits": edits, "folder": str(models() / f"{kind}-{len(known)}")}
        answer = driver().ask([{"meet": job}])
        found = answer["phases"][0] if "phases" in answer else {"problem": answer["problem"]}
        known.append(condensed(kind, name, edits, found, of_base))
        write(MEASURED, known)
        sys.stdout.write(f"{kind} {name}: {known[-1].get('distance', known[-1].get('problem'))}\n")
        return known[-1]

    base = tried("base", {})
    of_base = base["places"]
    said = {**meeting.SIZES, **meeting.BASES[kind]}
    defaults = CONFIG_MAPPING[kind](**said).to_dict()
    counting = {name: each for name, each in defaults.items() if name not in IGNORED_CONFIG_KEYS}
    tried_kinds = meeting.variants(counting, meeting.OF_TYPES.get(kind, {}))
    for parts in meeting.rounds(tried_kinds):
        together = {key: value for _, edits in parts for key, value in edits.items()}
        if not is_same(tried(" + ".join(name for name, _ in parts), together)) and len(parts) > 1:
            for name, edits in parts:
                tried(name, edits)


def write(path: Path, found: Any) -> None:
    """Write JSON with a line for each inner entry."""
    if isinstance(found, list):
        lines = ",\n".join(json.dumps(one, sort_keys=True) for one in found)
        path.write_text(f"[\n{lines}\n]\n")
        return
    parts = []
    for kind, places in found.items():
        lines = ",\n".join(
            f"  {json.dumps(place)}: {json.dumps(places[place])}" for place in places
        )
        parts.append(f" {json.dumps(kind)}: {{\n{lines}\n }}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> int:
    """Measure and write."""
    from vua.format.identity import INTERLEAVED, NEOX

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(sorted(NEOX | INTERLEAVED)))
    parser.add_argument("--again", action="store_true", help="measure what is known, too")
    parser.add_argument("--table-only", action="store_true")
    chosen = parser.parse_args()
    kinds = chosen.types.split(",")
    known: list[Measured] = json.loads(MEASURED.read_text()) if MEASURED.exists() else []
    if chosen.again:
        known = [one for one in known if one["type"] not in kinds]
    if not chosen.table_only:
        for kind in kinds:
            measure(kind, known)
    write(TABLE, table(known))
    return 0


if __name__ == "__main__":
    sys.exit(main())
