"""24, 27: what other users may read of ours, and whether they are believed."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from vua.testing.card.damage import hurt, only_file
from vua.testing.trial import Trial, scored

__all__: list[str] = []

_NOBODY: Final = 65534


@scored(
    24, "Modes", gate=True, quick=3, full=3,
    bar="under umask 000, 022 and 077: files 0600, directories 0700; another uid reads 0 bytes",
)  # fmt: skip
def modes(trial: Trial) -> None:
    """Look at everything below the root after puts, damage and a collection."""
    trial.directory.chmod(0o755)
    for umask in (0o000, 0o022, 0o077)[: trial.scale]:
        before = os.umask(umask)
        try:
            subject = trial.make(nbytes=4096, root=f"cache-{umask:o}")
            subject.root.chmod(0o755)
            keys = trial.stored(subject, 4)
            hurt(trial, only_file(subject, keys[0]), only_file(subject, keys[0]).read_bytes())
            trial.look(subject, keys[0])
            subject.sweep()
        finally:
            os.umask(before)
        bad = []
        for path in subject.root.rglob("*"):
            mode = path.lstat().st_mode
            wanted = 0o700 if stat.S_ISDIR(mode) else 0o600
            if stat.S_IMODE(mode) != wanted and path.name != ".aside":
                bad.append(f"{stat.S_IMODE(mode):o} {path.relative_to(subject.root)}")
        trial.must(f"umask {umask:03o}: modes", not bad, bad[:2])
        if os.geteuid() == 0:
            read = _read_as_nobody(subject.root)
            trial.must(f"umask {umask:03o}: another uid reads nothing", read == 0, f"{read} bytes")
    if os.geteuid() != 0:
        trial.note("not root: nothing was tried as another user")


def _read_as_nobody(root: Path) -> int:
    """Return how many bytes below ``root`` another user can read."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        count = 0
        with contextlib.suppress(BaseException):
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            for path in root.rglob("*"):
                with contextlib.suppress(OSError):
                    count += len(path.read_bytes())
        os.write(theirs, str(count).encode())
        os._exit(0)
    os.close(theirs)
    text = os.read(ours, 64)
    os.waitpid(child, 0)
    os.close(ours)
    return int(text)


@scored(
    27, "Poison under a key", quick=50, full=10_000,
    bar="entries by another uid or without the key: 0 accepted; at most 0.3 ms per MiB",
)  # fmt: skip
def poison(trial: Trial) -> None:
    """VUA has no keyed mode yet."""
    trial.needs("a keyed mode", there=False)
