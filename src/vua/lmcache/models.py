"""Which model LMCache's objects are of: what stands for its weights and configuration.

LMCache's keys say a model's name and hashes of tokens: nothing of weights, adapters or settings. So
the digest of the files at that name counts, or a label that the operator answers for. Promises that
objects of two checkpoints never meet, if each engine serves the files that lie at its name and was
started after they were put there. A model whose files change is not served any more: engines that
have loaded them before, and those that load them now, have one name.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from vua.connector.cache_spec import UncachedError
from vua.connector.model_files import local_directory
from vua.errors import ConfigError, VUAError
from vua.weights import Identification, Weights, checkpoint_files, identify_weights
from vua.weights.content import State
from vua.weights.files import link_changed_s

__all__ = ["Models"]

log = logging.getLogger(__name__)

_DECORATION: Final = "##lmcache-"
"""What LMCache appends to a name to tell layouts apart; it stays in the identity."""
_FIRST_WAIT_S: Final = 1.0
"""How long the first who asks for a model waits for its digest."""
_TICK_S: Final = 0.02
"""File systems' clocks tick coarsely: a change may seem to be so much earlier than it was."""
_BESIDE: Final = ("*.json", "*.py")
"""Files that say what the weights mean."""
_NO_CONFIG: Final = frozenset(("tokenizer.json", "tokenizer_config.json", "vocab.json"))
"""How text becomes tokens, which are in the key."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What lies at a model's name."""

    weights: tuple[Path, ...]
    beside: tuple[Path, ...]
    states: tuple[State, ...]
    only: bool = field(compare=False)
    """It is the only snapshot of that name in the hub's cache, so no other one can be loaded."""

    @classmethod
    def at(cls, name: str) -> _Found:
        """Look at it. Raises UncachedError, ConfigError, OSError."""
        folder = local_directory(name.partition(_DECORATION)[0], None, None)
        weights = tuple(checkpoint_files(folder))
        beside = tuple(
            path
            for pattern in _BESIDE
            for path in sorted(folder.glob(pattern))
            if path.name not in _NO_CONFIG and path.is_file()
        )
        states = tuple(State.of(path) for path in (*weights, *beside))
        snapshots = folder.parent
        only = snapshots.name == "snapshots" and len(list(snapshots.iterdir())) == 1
        return cls(weights, beside, states, only)

    def digest(self, since_s: float, stop: threading.Event) -> Weights:
        """Digest all of it. Raises ConfigError, OSError, CancelledError.

        Raises UncachedError if it may have been something else at `since_s`.
        """
        said = hashlib.sha256(b"vua.lmcache.model.v1")
        for path in self.beside:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            said.update(f"{path.name} {content};".encode())
        config = Weights(said.hexdigest(), (), 0, 0, 0.0, 0.0)
        weights = identify_weights(self.weights, stop=stop)
        changed = [path for path in self.beside if _changed_s(path) > since_s]
        if not self.only:
            same = weights.changed_s <= since_s and not changed
        else:  # an engine that was started after the server may have fetched it
            same = not weights.changed_since(since_s, stop=stop) and all(map(_is_named, changed))
        if not same:
            msg = "its files were changed after this server's start"
            raise UncachedError(msg)
        return weights.joined(config)


def _changed_s(path: Path) -> float:
    return max(State.of(path).changed_s, link_changed_s(path))


def _is_named(path: Path) -> bool:
    """Whether it is a blob of the hub's cache with its name's content: git's digest, or SHA-256."""
    content = path.read_bytes()
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    return path.resolve().name in (git.hexdigest(), hashlib.sha256(content).hexdigest())


class Models:
    """The models of one LMCache server. Safe for threads."""

    def __init__(self, labels: str | Mapping[str, str] | None) -> None:
        """Take labels: one for all models, or one for each name.

        Raises ConfigError: one is no text, or empty.
        """
        given = {"": labels} if isinstance(labels, str) else dict(labels or {})
        if not all(isinstance(each, str) and each for each in (*given.values(),)):
            raise ConfigError(
                f'adapter_params has "label": {labels!r}; expected a text that is not empty, or an '
                "object with such a text for each model's name"
            )
        self._labels, self._began_s = given, time.time()
        self._lock = threading.Lock()
        self._found: dict[str, _Found] = {}
        self._known: dict[str, tuple[float, Identification]] = {}
        self._refused: set[str] = set()

    def close(self) -> None:
        """Let searches stop; waits for none."""
        for _, search in self._known.values():
            search.close()

    def digest(self, name: str) -> str | None:
        """Return what stands for a model; None: it is not known yet, or nobody can know it.

        Looks at the files' times at each call. Tells the log once why a model is not served.
        """
        label = self._labels.get(name, self._labels.get(""))
        if label is not None:
            return f"label {label}"
        if name in self._refused:
            return None
        try:
            began_s, search = self._search(name)
            search.wait(max(0.0, began_s + _FIRST_WAIT_S - time.monotonic()))
            if not search.answer.done():
                return None
            weights = search.answer.result()
        except CancelledError:
            return None
        except (VUAError, OSError) as problem:
            self._refuse(name, problem)
            return None
        return f"files {weights.fingerprint}"

    def _search(self, name: str) -> tuple[float, Identification]:
        """Return the search for a model, begun if need be; raises UncachedError for a change."""
        now = _Found.at(name)
        with self._lock:
            if name not in self._known:
                self._found[name] = now
                find = partial(now.digest, self._began_s - _TICK_S)
                self._known[name] = (time.monotonic(), Identification(find))
            elif now != self._found[name]:
                msg = "its files were changed after it was served first"
                raise UncachedError(msg)
            return self._known[name]

    def _refuse(self, name: str, problem: Exception) -> None:
        with self._lock:
            told = name in self._refused
            self._refused.add(name)
        if not told:
            log.error(
                "VUA: nothing of LMCache's model %s is stored or loaded: %s. If its files are on "
                'this host, restart this server after the engines; if not, set "label": {"%s": '
                '"..."} in adapter_params, a text that changes whenever its weights or its '
                "configuration do",
                *(name, problem, name),
            )
