"""Mirrors `vua.format.layout`: how a state is laid out as a group of a namespace."""

from __future__ import annotations

from dataclasses import replace

from helpers import DirectoryTest
from vua.errors import LayoutError
from vua.format.identity import Identity
from vua.format.layout import KVLayout, Shard, state_layout, state_nbytes
from vua.storage.description import descriptions
from vua.store.namespace import Namespace

SIZE = 8
NBYTES = 100
FULL = KVLayout(1, 1, 4, 4, "U8", SIZE)
STATE = state_layout(layers=2, parts=1, nbytes=NBYTES, chunk_tokens=SIZE)


class StateLayoutTest(DirectoryTest):
    """In the directory a state is a group like others."""

    def test_layout(self) -> None:
        """A state's bytes are in the group's name; its rows hold them, and hardly more."""
        self.assertEqual(("s100", 13, 0), (STATE.group, STATE.k_dim, STATE.v_dim))
        self.assertEqual(NBYTES, state_nbytes(STATE))
        self.assertIsNone(state_nbytes(FULL))
        self.assertIsNone(state_nbytes(replace(FULL, group="w100")))
        self.assertEqual("s100.l0-2.h0-1", STATE.full.name)
        self.assertEqual(STATE.full, Shard.parse("s100.l0-2.h0-1"))
        for group in ("s", "s0", "s01", "sw1", "s1w"):
            with self.assertRaisesRegex(LayoutError, "group"):
                replace(STATE, group=group)
        with self.assertRaisesRegex(LayoutError, "a state of 100 bytes"):
            state_nbytes(replace(STATE, v_dim=1))
        with self.assertRaisesRegex(LayoutError, "a state of 200 bytes"):
            state_nbytes(replace(STATE, group="s200"))

    def test_described(self) -> None:
        """The namespace's description tells who comes later what the files hold."""
        identity = Identity(model="m", chunk_tokens=SIZE)
        Namespace.create(self.root, identity, [FULL, STATE])
        (found,) = descriptions(self.root)
        self.assertEqual((FULL, STATE), found.layouts)
