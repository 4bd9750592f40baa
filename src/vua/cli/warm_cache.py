"""A cache as `vua warm` sees it: what it holds, and what it calls the chunks of prompts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from vua.catalog.opening import is_missing, open_catalog
from vua.cli.events import Seen, look
from vua.cli.output import progress
from vua.cli.prompt import prompt_keys
from vua.format.keys import token_ids
from vua.security.settings import Security
from vua.store.namespace import Namespace
from vua.store.opening import open_namespace

__all__ = ["Held", "WarmedCache"]

_PATIENCE_S: Final = 20.0
"""A server stores behind its answers: how long it is waited for when nothing new appears."""
_BRIEFLY_S: Final = 5.0
"""Likewise where the names of what is stored show that its keys are others than those given."""
_LOOK_S: Final = 0.2
_FIRST_CHUNKS: Final = 64
"""Of so many the headers are read, at most, to see which keys they are sealed with."""

Held: TypeAlias = dict[str, set[str]]
"""The chunks that a lookup can find, by namespace."""


class WarmedCache:
    """A cache as this command sees it: what it holds, and what it calls a prompt's chunks."""

    def __init__(self, where: str | None, security: Security) -> None:
        """Look at a directory or a bucket, if one is given; of ``security`` the keys count."""
        self._where = where
        self._security = replace(security, trusted_uids="any")  # names are all that is read
        self._seen: dict[str, Seen] = {}
        self._opened: dict[str, Namespace] = {}
        self.held: Held = {}
        """What the last look found."""

    def look(self) -> Held:
        """Return what it holds now; nothing where there is none yet."""
        where = self._where
        if where is None or is_missing(where):
            self._seen = {}
        else:
            self._seen = look(open_catalog(where), self._seen)
        self.held = {name: set(one.stored) for name, one in self._seen.items()}
        return self.held

    def chunk_tokens(self, name: str) -> int:
        """Return the tokens per chunk of a namespace."""
        return self._seen[name].layouts[0].chunk_tokens

    def chunks(self, prompt: Sequence[int], name: str) -> set[str]:
        """Return the chunks of a prompt's tokens, as a namespace names them; none where it is gone.

        Raises NoKeyError.
        """
        ids, namespace = token_ids(prompt), self._namespace(name)
        if namespace is None:
            return set()
        keys, _ = prompt_keys(namespace, ids, "")
        return {key.name for key in keys.first(len(keys))}

    def wait_for(self, prompts: Sequence[Sequence[int]], before: Held | None = None) -> str:
        """Wait until it holds the prompts' tokens, or nothing new has appeared for a while.

        ``before`` is what it held before a server was asked, whose keys may be others than those
        given. Returns what shows that they are, as :meth:`misnamed` does.
        """
        held: Held | None = None
        misnamed, until_s = "", 0.0
        while True:
            if self.look() != held:
                held = self.held
                wanted = [{name: self.chunks(one, name) for name in held} for one in prompts]
                if all(any(each[name] <= held[name] for name in each) for each in wanted):
                    return ""
                ours = any(each[name] & held[name] for each in wanted for name in each)
                misnamed = "" if ours or before is None else self.misnamed(before)
                until_s = time.monotonic() + (_BRIEFLY_S if misnamed else _PATIENCE_S)
            if time.monotonic() > until_s:
                return misnamed
            time.sleep(_LOOK_S)

    def misnamed(self, before: Held) -> str:
        """Say whose keys name what is stored, and whose would have to; nothing where these agree.

        Told by headers of first chunks, of the new ones if there are some. Those of requests with a
        salt have a parent, and tell nothing. Raises NoKeyError, StorageError, OSError.
        """
        first = [
            (name, chunk)
            for name, one in self._seen.items()
            for chunk, previous in one.stored.items()
            if not previous
        ]
        new = [(name, chunk) for name, chunk in first if chunk not in before.get(name, ())]
        for some in (new, first):
            seals = self._seals(some[:_FIRST_CHUNKS])
            if seals:
                found, expected = seals[0]
                agree = any(one == other for one, other in seals)
                return "" if agree else f"found: chunks that are {found}; expected: {expected}"
        return ""

    def _seals(self, chunks: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
        """Return how first chunks without extras are sealed, and how they would be by our keys."""
        if self._where is None or not chunks:
            return []
        seals = []
        catalog = open_catalog(self._where)
        with progress() as show, catalog.namespaces(show) as (found, _):
            there = {one.name: one for one in found}
            for name, chunk in chunks:
                namespace = self._namespace(name)
                info = there[name].header(chunk) if name in there else None
                if namespace is not None and info is not None and not info.parent:
                    _, seal = prompt_keys(namespace, b"", "")
                    expected = _sealed(seal.kind, seal.key_id) if seal else _sealed()
                    seals.append((_sealed(info.kind, info.seal_info.key_id), expected))
        return seals

    def _namespace(self, name: str) -> Namespace | None:
        if self._where is not None and name not in self._opened:
            place = open_catalog(self._where).place / name
            namespace = open_namespace(place, security=self._security)
            if namespace is not None:
                self._opened[name] = namespace
        return self._opened.get(name)


def _sealed(kind: str = "", key_id: str = "") -> str:
    return f"sealed ({kind}) with key {key_id}" if kind else "not sealed"
