"""Mirrors `pending`: children written beside their parents get their mtimes after them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from helpers import SOON_S, DirectoryTest, until
from replay import LAYOUT, NBYTES, Cache
from vua.capacity.lru import MTIME_STEP_NS, mtime_ns_of
from vua.format.keys import KeyChain, token_ids
from vua.native import WRITTEN


class TestMtimes(DirectoryTest):
    """Chunks of one prompt, written at the same time."""

    def test_slow_parents(self) -> None:
        """Whichever file is there first, no child is newer than its parent: not the front goes."""
        cache, prompt = Cache(self.root), list(range(6))
        keys = KeyChain(token_ids(prompt), 1).first(len(prompt))
        names = [key.name for key in keys]
        home = self.root / cache.store.namespace
        written = [threading.Event() for _ in keys]
        began: list[str] = []

        def save(at: int) -> None:
            """Make the directory, wait for the child's file, then write."""
            with cache.capacity.reserve([keys[at]], NBYTES) as room:
                began.append(names[at])
                folder = home / names[at][:2] / names[at]
                folder.mkdir(parents=True)
                if at and at + 1 < len(names):
                    written[at + 1].wait(SOON_S)
                (folder / f"{LAYOUT.full.name}.safetensors").write_bytes(b"x")
                written[at].set()
                room.commit([WRITTEN])

        with ThreadPoolExecutor(6) as pool:
            for at in range(len(keys)):
                pool.submit(save, at)
                until(lambda at=at: len(began) > at)
        mtimes = [mtime_ns_of(cache.store.storage.fileno(), name) or 0 for name in names]
        steps = [mtime_ns // MTIME_STEP_NS for mtime_ns in mtimes]
        self.assertEqual([steps[0] - n for n in range(6)], steps)
