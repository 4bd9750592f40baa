"""In which field two identities differ, and which namespace is nearest to an identity. For people.

`namespace.json` names what the digest of a model's config counted, for people, never believed:
nothing is loaded or stored by what is found here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
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

    @property
    def certain(self) -> bool:
        """Whether it shows in an identity by a model's files, too: engines complete a config."""
        return self.field in FIELDS and self.field != "model"


class Near(NamedTuple):
    """A namespace, and how far it is from an identity."""

    found: Description
    differences: list[FieldDifference]
    """Those of the identity's own fields first."""


def differences(
    ours: Identity, theirs: Identity, *, complete: bool = True, unknown: Collection[str] = ()
) -> list[FieldDifference]:
    """Return the fields in which two identities differ, the weights first; none if they are equal.

    In place of the digest ``model`` the fields that it counted, by path, as far as both are known.
    Engines complete a config: unless ours is ``complete``, fields that one side lacks are left out;
    and so are those that are ``unknown`` of ours.
    """
    names = [name for name in FIELDS if name not in ("name", "model")]
    names.sort(key=lambda name: name != "weights")
    found = [FieldDifference(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    if ours.model != theirs.model:
        here, there = ours.counted, theirs.counted
        paths = sorted(here.keys() | there.keys() if complete else here.keys() & there.keys())
        paths = paths if here and there else []
        counted = [FieldDifference(p, here.get(p, ABSENT), there.get(p, ABSENT)) for p in paths]
        counted = [one for one in counted if one.ours != one.theirs]
        found += counted or [FieldDifference("model", ours.model, theirs.model)]
    return [one for one in found if one.ours != one.theirs and one.field not in unknown]


def nearest(
    ours: Identity,
    found: Iterable[Description],
    *,
    complete: bool = True,
    unknown: Collection[str] = (),
) -> list[Near]:
    """Return the described namespaces, the nearest first; arguments as for :func:`differences`.

    Equal weights count most, then the number of fields that differ for certain.
    """

    def distance(one: Near) -> tuple[bool, int, int, str]:
        others = any(each.field in ("weights", "adapter") for each in one.differences)
        certain = sum(complete or each.certain for each in one.differences)
        return others, certain, len(one.differences), one.found.name

    near = [
        Near(one, differences(ours, one.identity, complete=complete, unknown=unknown))
        for one in found
        if one.identity is not None
    ]
    return sorted(near, key=distance)


def _shown(value: object) -> str:
    text = json.dumps(value) if value is not ABSENT else ABSENT
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
