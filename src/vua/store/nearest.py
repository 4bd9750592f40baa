"""In which field two identities differ, and which namespace is nearest to an identity. For people.

`namespace.json` names what the digest of a model's config counted, for people, never believed:
nothing is loaded or stored by what is found here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final, NamedTuple

from vua.format.identity import FIELDS, Identity
from vua.storage.description import Description

ABSENT: Final = "absent"
"""Shown for a field that one of two configs lacks."""
_SHOWN: Final = 40


class FieldDifference(NamedTuple):
    """A field in which another identity differs from ours."""

    field: str
    """A member of an identity, or the path of a config's field that ``model`` is a digest of."""
    ours: object
    theirs: object

    def __str__(self) -> str:
        """In words.

        >>> str(FieldDifference("rope_parameters.rope_theta", 10000, 500000))
        'rope_parameters.rope_theta is 10000 here and 500000 there'
        """
        return f"{self.field} is {_shown(self.ours)} here and {_shown(self.theirs)} there"


class Near(NamedTuple):
    """A namespace, and how far it is from an identity."""

    found: Description
    differences: list[FieldDifference]
    """Those of the identity's own fields first."""

    @property
    def is_of_others(self) -> bool:
        """Whether its weights are other ones."""
        return any(one.field == "weights" for one in self.differences)


def differences(
    ours: Identity, theirs: Identity, *, complete: bool = True
) -> list[FieldDifference]:
    """Return the fields in which two identities differ, the weights first; none if they are equal.

    In place of the digest ``model`` the fields that it counted, by path, as far as both are known.
    Engines complete a config: unless ours is ``complete``, fields that one side lacks are left out,
    and so is what a model's files do not tell.
    """
    unknown = {"name", "model"}
    if not complete:
        unknown |= {"epoch", "chunk_tokens"}
        unknown |= {name for name in ("weights", "kv_dtype") if not getattr(ours, name)}
    names = [name for name in FIELDS if name not in unknown]
    names.sort(key=lambda name: name != "weights")
    found = [FieldDifference(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    if ours.model != theirs.model:
        here, there = ours.counted, theirs.counted
        paths = sorted(here.keys() | there.keys() if complete else here.keys() & there.keys())
        paths = paths if here and there else []
        counted = [FieldDifference(p, here.get(p, ABSENT), there.get(p, ABSENT)) for p in paths]
        counted = [one for one in counted if one.ours != one.theirs]
        found += counted or [FieldDifference("model", ours.model, theirs.model)]
    return [one for one in found if one.ours != one.theirs]


def nearest(ours: Identity, found: Iterable[Description], *, complete: bool = True) -> list[Near]:
    """Return the described namespaces, the nearest first, compared as by :func:`differences`.

    Equal weights count most, then the number of fields that differ, then an equal name.
    """
    near = [
        Near(one, differences(ours, one.identity, complete=complete))
        for one in found
        if one.identity is not None
    ]

    def distance(one: Near) -> tuple[bool, int, bool, str]:
        theirs = one.found.identity
        other_name = theirs is None or theirs.name != ours.name
        return one.is_of_others, len(one.differences), other_name, one.found.name

    return sorted(near, key=distance)


def _shown(value: object) -> str:
    text = json.dumps(value) if value is not ABSENT else ABSENT
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
