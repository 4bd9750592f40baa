"""The part of the scorecard that a storage of your own should pass, as a unittest mixin.

::

    class TestMine(StorageConformance, unittest.TestCase):
        def open_storage(self, directory):
            return MyStorage(directory)

It must keep each file below the directory that it is given, in ``<hh>/<chunk>/``, as
:class:`vua.storage.local.LocalStorage` does: the tests damage files where they lie. All tests run
in their quick form, in this process; ``python -m vua.testing`` runs the rest.
"""

from __future__ import annotations

import tempfile
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from vua.storage.base import Storage
from vua.testing import card
from vua.testing.runner import Plan, run_test
from vua.testing.stores import StoreSubject
from vua.testing.subject import Subject
from vua.testing.trial import TESTS

__all__ = ["CONFORMANCE", "StorageConformance"]

CONFORMANCE: Final = (8, 12, 13, 14, 15, 16, 18, 20, 21, 28)
"""The tests that are about what a storage does and change nothing in the process that runs them."""

_ = card  # registers the tests

if TYPE_CHECKING:
    _Case = unittest.TestCase
else:
    _Case = object


class StorageConformance(_Case):
    """Mix into a TestCase and say how the storage is opened."""

    conformance: Sequence[int] = CONFORMANCE
    """Which tests to run."""

    def open_storage(self, directory: Path) -> Storage:
        """Return the storage for one namespace's directory, which exists."""
        raise NotImplementedError(directory)

    def test_conformance(self) -> None:
        """The storage passes the scorecard's tests."""

        def make(
            root: Path, nbytes: int, *, max_bytes: int | None = None, durable: bool = False
        ) -> Subject:
            return StoreSubject(
                "storage", self.open_storage, root, nbytes, max_bytes=max_bytes, durable=durable
            )

        with tempfile.TemporaryDirectory(prefix="vua-test-") as directory:
            plan = Plan(make=make, own=False, directory=Path(directory))
            for number in self.conformance:
                test = TESTS[number]
                with self.subTest(number=number, title=test.title):
                    outcome = run_test(test, plan)
                    passed = ("pass",) if test.gate else ("pass", "partly")
                    self.assertIn(outcome.verdict, passed, outcome.found)
