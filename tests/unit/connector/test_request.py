"""What clients may say about a request's cache, and what they may not."""

from __future__ import annotations

import unittest
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from vua.connector.config import MAX_WAIT_S, OptionReader, RequestOptions


class OptionsTest(unittest.TestCase):
    def setUp(self) -> None:
        self.reader = OptionReader(allow_pins=True)

    def read(self, **given: Any) -> RequestOptions:
        return self.reader.read({"vua": given})

    def test_nothing_said(self) -> None:
        """Requests without a word for VUA, also with words for others, are served as usual."""
        usual = RequestOptions(store=True, load=True, wait_s=0.0)
        with self.assertNoLogs("vllm.vua.requests"):
            for params in (None, {}, {"do_remote_prefill": True, "store": False}, {"vua": {}}):
                with self.subTest(params=params):
                    self.assertEqual(usual, self.reader.read(params))
            self.assertEqual(usual, self.read(store=None, wait_s=None))

    def test_sound_values(self) -> None:
        """Each option is read."""
        with self.assertNoLogs("vllm.vua.requests"):
            self.assertEqual(
                RequestOptions(
                    store=False,
                    load=False,
                    wait_s=2.0,
                    pin=True,
                    outcomes=("pinned",),
                ),
                self.read(store=False, load=False, wait_s=2, pin=True),
            )
            self.assertEqual(MAX_WAIT_S, self.read(wait_s=1e9).wait_s)

    def test_pins_need_leave(self) -> None:
        """Nobody pins unless the operator allows it; the rest of the request's words hold."""
        self.reader = OptionReader()
        with self.assertLogs("vllm.vua.requests") as log:
            for _ in range(3):
                found = self.read(pin=True, wait_s=6)
                self.assertEqual((False, 6.0), (found.pin, found.wait_s))
        self.assertEqual(1, len(log.output))
        self.assertIn('"allow"', log.output[0])
        self.assertFalse(self.read(pin=False).pin)

    def test_unsound_values(self) -> None:
        """A value that makes no sense is ignored with a word, and the others are used."""
        for name, value, expected in (
            ("store", 0, "true or false"),
            ("load", "no", "true or false"),
            ("pin", [True], "true or false"),
            ("retain_s", float("nan"), "a number of seconds"),
            ("retain_s", 10**400, "a number of seconds"),
            ("wait_s", float("inf"), "a number of seconds"),
            ("wait_s", {"a": 1}, "a number of seconds"),
        ):
            with self.subTest(name=name, value=value):
                self.setUp()
                with self.assertLogs("vllm.vua.requests", "WARNING") as logged:
                    read = self.read(**{"prefetch": True, name: value})

                self.assertIn(f"'{name}' must be {expected}", logged.output[0])
                self.assertEqual(RequestOptions(prefetch=True), read)

    def test_unknown_options(self) -> None:
        """A misspelt option is named with the nearest one; odd sections are ignored."""
        with self.assertLogs("vllm.vua.requests", "WARNING") as logged:
            self.assertEqual(RequestOptions(store=False), self.read(stor=False, store=False))
        self.assertIn("no 'stor'; the nearest is 'store'", logged.output[0])

        with self.assertLogs("vllm.vua.requests", "WARNING") as logged:
            self.assertEqual(RequestOptions(), self.reader.read({"vua": "store"}))
        self.assertIn("must be an object, found 'store'", logged.output[0])
        self.assertEqual(RequestOptions(), self.reader.read(["vua"]))

    def test_long_options(self) -> None:
        """What a client sends is not gone through: of 100,000 unknown keys the first is looked at.

        The section counts how often a key or a value is asked for, so that no clock is needed.
        """
        names = [f"retain_s_wait_s_pin_{at:08d}" for at in range(100_000)]
        given = CountedOptions(dict.fromkeys(names, 0) | {"store": False})
        with self.assertLogs("vllm.vua.requests", "WARNING") as logged:
            for _ in range(3):
                self.assertEqual(RequestOptions(store=False), self.reader.read({"vua": given}))

        self.assertEqual(1, len(logged.output))
        self.assertLess(given.looked_at, 100)

    def test_long_values(self) -> None:
        """Of a long value a log line shows a part, and no value is turned into text as a whole."""
        unshowable = Unshowable()
        for long in ("x" * 5_000_000, unshowable, [unshowable], {"a": unshowable}, 10**10_000):
            with self.subTest(kind=type(long)):
                self.setUp()
                with self.assertLogs("vllm.vua.requests", "WARNING") as logged:
                    self.assertEqual(RequestOptions(), self.read(store=long))
                    self.assertEqual(RequestOptions(), self.reader.read({"vua": [long]}))
                    self.assertEqual(RequestOptions(), self.reader.read({"vua": {"y" * 5000: 1}}))
                self.assertLess(max(map(len, logged.output)), 400)


def Action(kind: str, version: str = "1.0", **payload: object) -> Any:  # noqa: N802
    """As vLLM's KvHintAction."""
    return SimpleNamespace(action_type=kind, action_version=version, payload=payload)


def Envelope(*actions: object) -> Any:  # noqa: N802
    """As vLLM's KvHintsEnvelope."""
    return SimpleNamespace(actions=list(actions))


class HintsTest(unittest.TestCase):
    """What an orchestrator says beside, in vLLM's `kv_hints`."""

    def read(self, *actions: object, **settings: Any) -> RequestOptions:
        return OptionReader(**settings).read(None, Envelope(*actions))

    def test_known_actions(self) -> None:
        """Each action is an option; the payloads are those of vLLM's and Dynamo's drafts."""
        for said, meant in (
            (Action("kv.retain", ttl_seconds=30), RequestOptions(retain_s=30.0)),
            (Action("kv.retain", "0.1"), RequestOptions(retain_s=600.0)),
            (
                Action(
                    "kv.retain",
                    scope="alice",
                    directives=[
                        {"start": 0, "end": 32, "priority": 80, "duration": 60.0},
                        {"covers_output": True, "priority": 40},
                    ],
                ),
                RequestOptions(retain_s=60.0),
            ),
            (
                Action(
                    "kv.evict",
                    execute_at="request_completion",
                    include_current_request=True,
                    block_hashes=["11"],
                ),
                RequestOptions(drop=True),
            ),
            (Action("kv.prefetch"), RequestOptions(prefetch=True)),
            (Action("kv.pin", ttl_seconds=5), RequestOptions(retain_s=5.0)),
        ):
            with self.subTest(said=vars(said)), self.assertNoLogs("vllm.vua.requests"):
                self.assertEqual(meant, self.read(said))
        pinned = self.read(Action("kv.pin"), allow_pins=True)
        self.assertEqual((True, ("pinned",)), (pinned.pin, pinned.outcomes))

    def test_refused(self) -> None:
        """What is not understood or not allowed is counted, and said once; the rest is heeded."""
        for said, outcome in (
            (Action("kv.fetch", keys=[1]), "unknown"),
            (Action("kv.retain", "2.0", ttl_seconds=5), "unknown"),
            (Action("kv.evict", include_current_request=False), "unknown"),
            (Action("kv.retain", ttl_seconds="long"), "malformed"),
            (Action("kv.retain", ttl_seconds=-1), "malformed"),
            (Action("kv.retain", ttl_seconds=float("nan")), "malformed"),
            (Action("kv.retain", ttl_seconds=10**400), "malformed"),
            (Action("kv.retain", directives=[1]), "malformed"),
            (Action("kv.retain", directives={}), "malformed"),
            (Action("kv.pin"), "not_allowed"),
            (object(), "unknown"),
        ):
            with self.subTest(outcome=outcome), self.assertLogs("vllm.vua.requests") as log:
                reader = OptionReader()
                for _ in range(3):
                    found = reader.read(None, Envelope(said, Action("kv.prefetch")))
                    self.assertEqual(RequestOptions(prefetch=True, outcomes=(outcome,)), found)
            self.assertEqual(1, len(log.output))

    def test_many_actions(self) -> None:
        """Of a long list the first are looked at."""
        found = self.read(*[Action("kv.retain", ttl_seconds=n) for n in range(1, 100_000)])
        self.assertEqual(RequestOptions(retain_s=16.0), found)


class CountedOptions(Mapping[str, object]):
    """Counts the keys and values that somebody looks at."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.options, self.looked_at = options, 0

    def __len__(self) -> int:
        return len(self.options)

    def __iter__(self) -> Iterator[str]:
        for name in self.options:
            self.looked_at += 1
            yield name

    def __getitem__(self, name: str) -> object:
        self.looked_at += 1
        return self.options[name]


class Unshowable:
    """A value that is too long to be shown."""

    def __repr__(self) -> str:
        raise AssertionError("the whole value was turned into text")
