"""What the page asks: what the processes that look and verify have told, and what is read now."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

from vua import __version__
from vua.catalog.base import Catalog
from vua.catalog.opening import open_catalog
from vua.cli.explain import Question, explain_ids
from vua.cli.looks import View, watch
from vua.cli.prompt import parse_ids
from vua.cli.ui.child import Child, Talk
from vua.cli.verify import verify
from vua.errors import ConfigError, VUAError
from vua.security.settings import Security

__all__ = ["State"]

_LOOKS: Final = 600
"""That are remembered: twenty minutes and more."""
_PROBLEMS: Final = 100
"""Damaged files of a namespace that are named."""


@dataclass(slots=True)
class _Verified:
    """How far a verification is, and what the last one found."""

    running: bool = False
    progress: dict[str, object] | None = None
    problem: str = ""
    finished_s: float | None = None
    report: dict[str, Any] | None = None


@dataclass(slots=True)
class _Watched:
    """What the looks have told."""

    views: dict[str, View] = field(default_factory=dict)
    usage: dict[str, object] | None = None
    progress: dict[str, object] | None = None
    looks: deque[dict[str, object]] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    looked_s: float | None = None
    """When everything was looked at for the last time; None: not yet."""
    problem: str = ""
    version: int = 0
    """Counts what changes."""


class State:
    """For any number of threads. Starts two processes: make it before any thread."""

    def __init__(
        self, directory: str, security: Security, tokenize: Callable[[str], bytes] | None
    ) -> None:
        """Begin to look at ``directory``; ``tokenize`` makes token ids of a text."""
        self._directory, self._security, self._tokenize = directory, security, tokenize
        self._lock = threading.Lock()
        self._watched, self._verified = _Watched(), _Verified()
        self._children = [Child(partial(watch, directory), self._hear_watch)]
        self._verifier = Child(partial(_verify, directory, security), self._hear_verify)
        self._children.append(self._verifier)
        for child in self._children:
            child.listen()

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()

    def _catalog(self) -> Catalog:
        return open_catalog(self._directory)

    def _hear_watch(self, what: str, value: Any) -> None:
        with self._lock:
            watched = self._watched
            watched.version += 1
            if what == "views":
                some, names = value
                views = {**watched.views, **some}
                watched.views = {name: views[name] for name in names if name in views}
            elif what == "look":
                watched.looked_s, watched.progress, watched.problem = time.time(), None, ""
                if value is not None:
                    watched.looks.append({"at_s": watched.looked_s, **value})
            elif what == "ended":
                watched.problem = watched.problem or "the process that looks has ended"
            else:
                setattr(watched, what, value)

    def _hear_verify(self, what: str, value: Any) -> None:
        with self._lock:
            verified = self._verified
            if what == "progress":
                verified.progress = value
                return
            verified.running, verified.progress = False, None
            if what == "report":
                verified.report, verified.finished_s, verified.problem = value, time.time(), ""
            else:
                verified.problem = value or "the process that verifies has ended"

    def overview(self) -> dict[str, object]:
        """Return what is known of the whole directory."""
        with self._lock:
            watched = self._watched
            known = [view.summary for view in watched.views.values()]
            return {
                "directory": self._directory,
                "vua": __version__,
                "tokenizer": self._tokenize is not None,
                "bucket": self._catalog().look_s is not None,
                "version": watched.version,
                "usage": watched.usage,
                "progress": watched.progress,
                "looked_s": watched.looked_s,
                "now_s": time.time(),
                "problem": watched.problem,
                "namespaces": known,
                "looks": list(watched.looks),
                "verify": asdict(self._verified),
            }

    def _view(self, namespace: str) -> View:
        with self._lock:
            view = self._watched.views.get(namespace)
        if view is None:
            raise ConfigError("no such namespace, or it has not been looked at yet")
        return view

    def tree(self, namespace: str, focus: str, by: str) -> dict[str, object]:
        """Return the boxes of a namespace's prefix tree, and its largest and hottest prefixes."""
        runs = self._view(namespace).runs
        if runs is None:
            return {"boxes": [], "path": [], "largest": [], "hottest": []}
        return {"boxes": runs.boxes(focus, by), "path": runs.path(focus), **runs.listed()}

    def health(self) -> list[dict[str, object]]:
        """Return what `vua doctor` finds without writing anything; nothing of a bucket."""
        return [asdict(one) for one in self._catalog().findings_at_rest(self._security)]

    def explain(self, asked: dict[str, object]) -> dict[str, object]:
        """Return why a prompt hits or misses, given ``tokens`` or, with a tokenizer, ``text``."""
        said = {name: str(asked.get(name) or "") for name in ("tokens", "text", "salt")}
        if said["text"] and self._tokenize is None:
            raise ConfigError("a text needs a tokenizer: start with --tokenizer MODELDIR")
        if said["text"] and self._tokenize is not None:
            ids = self._tokenize(said["text"])
        else:
            ids = parse_ids(said["tokens"], "the prompt")
        with self._lock:
            views = self._watched.views.items()
            trees = {name: view.tree for name, view in views if view.tree is not None}
        question = Question(salt=said["salt"], quick=True, security=self._security)
        return explain_ids(self._directory, ids, question, trees).describe()

    def verify(self) -> None:
        """Begin to verify everything, unless that is going on already."""
        with self._lock:
            if not self._verified.running:
                self._verified.running, self._verified.problem = True, ""
                self._verifier.ask()


def _verify(directory: str, security: Security, talk: Talk) -> None:
    """Verify whenever that is asked for, and tell the report."""
    while talk.wait():
        try:
            report: Any = verify(directory, security=security, show=talk.show).describe()
        except (VUAError, OSError) as problem:
            talk.tell("problem", str(problem))
            continue
        for namespace in report["namespaces"]:
            namespace["damaged"] = len(namespace["problems"])
            del namespace["problems"][_PROBLEMS:]
        talk.tell("report", report)
