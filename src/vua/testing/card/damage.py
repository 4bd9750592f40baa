"""12 to 16: what is damaged, moved or replaced is a miss, and the next put makes it whole."""

from __future__ import annotations

import os
from pathlib import Path

from vua.testing.subject import Key, Subject
from vua.testing.trial import Trial, scored

__all__ = ["bit_flips"]


def only_file(subject: Subject, key: Key) -> Path:
    """Return the one file of an entry."""
    files = subject.files(key)
    if len(files) != 1:
        raise RuntimeError(f"entry {key.number} has {len(files)} files, the test wants one")
    return files[0]


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file in place."""
    at, mask = bit >> 3, 1 << (bit & 7)
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ mask]), at)
    finally:
        os.close(fd)


@scored(
    12, "Bit flips", gate=True, quick=500, full=100_000,
    bar="every single flipped bit of payload, header or padding is detected",
)  # fmt: skip
def bit_flips(trial: Trial) -> None:
    """Flip one random bit at a time; the file is restored from its sound bytes afterwards."""
    subject = trial.make(nbytes=16384)
    (key,) = trial.stored(subject, 1)
    sound = only_file(subject, key).read_bytes()
    looks = []
    for _ in range(trial.scale):
        path = only_file(subject, key)
        flip(path, trial.random.randrange(8 * len(sound)))
        looks.append(trial.look(subject, key))
        restore(path, sound)
    wrong, raised = looks.count("wrong"), looks.count("raised")
    trial.must("no wrong bytes", wrong == 0, f"{wrong} of {trial.scale} flips accepted")
    trial.must("no exception", raised == 0, f"{raised} raised")
    hits = looks.count("hit")
    trial.must("every flip is detected", hits == 0, f"{hits} of {trial.scale} not noticed")
    trial.must("control: the sound file is a hit", trial.look(subject, key) == "hit")


def restore(path: Path, content: bytes) -> None:
    """Put a file's sound bytes back, as a new file."""
    aside = path.with_name(".restored")
    aside.write_bytes(content)
    aside.chmod(0o600)
    aside.replace(path)
