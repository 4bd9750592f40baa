"""Mirrors `vua.storage.description`: which namespace is nearest, and in which field it differs."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vua.format.identity import Identity
from vua.storage.description import ABSENT, Description, FieldDifference, differences, nearest

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIG: Mapping[str, object] = {"model_type": "llama", "hidden_size": 64, "rope_parameters": ROPE}


def of(edits: Mapping[str, object] | None = None, **others: Any) -> Identity:
    """The identity of an engine with an edited config."""
    fields: dict[str, Any] = {"weights": "w", "kv_dtype": "BF16", "name": "m"}
    return Identity.of_config({**CONFIG, **(edits or {})}, **(fields | others))


def described(identity: Identity | None) -> Description:
    name = identity.namespace if identity else "0" * 64
    return Description(Path("/kv") / name, identity)


class NearestTest(unittest.TestCase):
    def test_fields_and_values(self) -> None:
        """Fields of the config by path with both values; the weights first."""
        for theirs, expected in (
            (of(), []),
            (of(name="another name"), []),
            (of({"hidden_size": 128}), [("hidden_size", 64, 128)]),
            (of({"vua.vllm": {"a": 1}}), [("vua.vllm.a", ABSENT, 1)]),
            (
                of({"rope_parameters": {**ROPE, "rope_theta": 5e5}}),
                [("rope_parameters.rope_theta", 10000, 500000)],
            ),
            (of(kv_dtype="F16", weights="v"), [("weights", "w", "v"), ("kv_dtype", "BF16", "F16")]),
        ):
            with self.subTest(expected):
                found = differences(of(), theirs)
                self.assertEqual([FieldDifference(*one) for one in expected], found)
        (one,) = differences(of(), of({"attention_bias": True}))
        self.assertEqual("attention_bias is absent here and true there", str(one))

    def test_without_what_was_counted(self) -> None:
        """Another digest is all that is known of a namespace that does not list its fields."""
        theirs = replace(of({"hidden_size": 128}), counted={})
        self.assertEqual(["model"], [one.field for one in differences(of(), theirs)])

    def test_order(self) -> None:
        """Of the same weights first, then by the number of fields."""
        tuned, far = of(weights="tuned"), of({"a": 1, "b": 2, "c": 3})
        near, unknown = of({"a": 1}, epoch="2"), None
        found = nearest(of(), [described(one) for one in (tuned, unknown, far, of(), near)])

        self.assertEqual([of(), near, far, tuned], [one.found.identity for one in found])
        self.assertEqual(["epoch", "a"], [one.field for one in found[1].differences])
