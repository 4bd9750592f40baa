"""12 to 17: what is damaged, moved or replaced is a miss, and the next put makes it whole."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from scorecard.subject import Key, Subject, noise
from scorecard.trial import CANARY, Look, Trial, scored

_PAGE: Final = 4096
Damage = Callable[[bytes], bytes]


def only_file(subject: Subject, key: Key) -> Path:
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


def restore(path: Path, content: bytes) -> None:
    """Let a file hold ``content``, as a new file."""
    aside = path.with_name(".aside")
    aside.write_bytes(content)
    aside.chmod(0o600)
    aside.replace(path)


def judge(trial: Trial, looks: Sequence[Look]) -> None:
    names: dict[Look, str] = {
        "wrong": "no wrong bytes", "raised": "no exception", "hit": "damage is noticed"
    }  # fmt: skip
    for look, what in names.items():
        found = list(looks).count(look)
        trial.must(what, found == 0, f"{found} of {len(looks)}")


@scored(
    12, "Bit flips", gate=True, quick=500, full=100_000,
    bar="every single flipped bit of payload, header or padding is a miss",
)  # fmt: skip
def bit_flips(trial: Trial) -> None:
    """Flip one random bit at a time; the file is restored from its sound bytes afterwards."""
    subject = trial.make(nbytes=16384)
    (key,) = trial.stored(subject, 1)
    path = only_file(subject, key)
    sound, looks = path.read_bytes(), []
    for _ in range(trial.scale):
        flip(path, trial.random.randrange(8 * len(sound)))
        looks.append(trial.look(subject, key))
        restore(path, sound)
    judge(trial, looks)
    trial.must("control: the sound file is a hit", trial.look(subject, key) == "hit")


def damages(size: int) -> list[tuple[str, Damage]]:
    """Return everything that test 13 does to a file of ``size`` bytes."""
    pages = range(0, size, _PAGE)
    lengths = {at + step for at in [*pages, size] for step in (-1, 0, 1) if at + step >= 0}
    lengths |= {size + more for more in (1, 2, 8, 4095, 4096, 4097, 1 << 16)}
    found = [(f"length {length}", _of_length(length)) for length in sorted(lengths)]
    found += [(f"zeros at {at}", _zeroing(at)) for at in pages]
    found += [
        (f"pages at {one} and {other} swapped", _swapping(one, other))
        for one, other in itertools.combinations(pages, 2)
    ]
    found.append(("all zeros", lambda sound: bytes(len(sound))))
    return found


def _of_length(length: int) -> Damage:
    return lambda sound: sound[:length] + bytes(max(0, length - len(sound)))


def _zeroing(at: int) -> Damage:
    return lambda sound: sound[:at] + bytes(len(sound[at : at + _PAGE])) + sound[at + _PAGE :]


def _swapping(one: int, other: int) -> Damage:
    def swap(sound: bytes) -> bytes:
        first, second = sound[one : one + _PAGE], sound[other : other + _PAGE]
        between = sound[one + _PAGE : other]
        return sound[:one] + second + between + first + sound[other + _PAGE :]

    return swap


@scored(
    13, "Lengths, holes, swaps of pages", gate=True, quick=64, full=100_000,
    bar="cut at any page +-1, longer, any page zero, any two pages swapped, all zero: a miss",
)  # fmt: skip
def lengths_and_pages(trial: Trial) -> None:
    """Replace the file by a changed copy, of the right length or not."""
    subject = trial.make(nbytes=1 << (15 if trial.quick else 19))
    (key,) = trial.stored(subject, 1)
    path = only_file(subject, key)
    sound, looks, accepted = path.read_bytes(), [], []
    cases = damages(len(sound))
    for name, change in trial.random.sample(cases, min(trial.scale, len(cases))):
        changed = change(sound)
        if changed != sound:
            restore(path, changed)
            looks.append(trial.look(subject, key))
            if looks[-1] != "miss":
                accepted.append(name)
    restore(path, sound)
    judge(trial, looks)
    if accepted:
        trial.note("not a miss: " + "; ".join(accepted[:5]))
    trial.must("control: the sound file is a hit", trial.look(subject, key) == "hit")


@scored(
    14, "Files in each other's place", gate=True, quick=100, full=10_000,
    bar="a valid entry under another key, model or salt is a miss",
)  # fmt: skip
def other_places(trial: Trial) -> None:
    """Swap the files of two entries, or copy one over the other."""
    subject = trial.make(nbytes=16384)
    models = ("model", "other model") if subject.has_models else ("model",)
    salts = ("", "salt") if subject.has_salts else ("",)
    keys = [Key(n, model, salt) for n in range(4) for model in models for salt in salts]
    for key in keys:
        subject.put(key, key.payload(subject.nbytes))
    paths = {key: only_file(subject, key) for key in keys}
    sound = {key: paths[key].read_bytes() for key in keys}
    looks: list[Look] = []
    for _ in range(trial.scale):
        one, other = trial.random.sample(keys, 2)
        swapped = trial.random.random() < 0.5
        restore(paths[one], sound[other])
        if swapped:
            restore(paths[other], sound[one])
        looks += [trial.look(subject, key) for key in (one, other)[: 1 + swapped]]
        for key in (one, other):
            restore(paths[key], sound[key])
    judge(trial, looks)
    looks = [trial.look(subject, key) for key in keys]
    trial.must("control: the sound files are hits", set(looks) == {"hit"})


def hurt(trial: Trial, path: Path, sound: bytes) -> str:
    """Damage a file in one of five ways, by chance; returns which."""
    how = trial.random.choice(("flip", "cut", "zeros", "longer", "noise"))
    size = len(sound)
    if how == "flip":
        restore(path, sound)
        flip(path, trial.random.randrange(8 * size))
        return how
    at = trial.random.randrange(size)
    restore(
        path,
        {
            "cut": sound[:at],
            "zeros": sound[:at] + bytes(size - at),
            "longer": sound + bytes(1 + at),
            "noise": noise(size, trial.seed, at),
        }[how],
    )
    return how


@scored(
    15, "Memory hygiene", gate=True, quick=100, full=10_000,
    bar="of memory that was full of canaries no canary reaches a caller as data",
)  # fmt: skip
def memory_hygiene(trial: Trial) -> None:
    """Load damaged entries into canaries; what is handed out as a hit has none of them."""
    subject = trial.make(nbytes=65536)
    keys = trial.stored(subject, 4)
    paths = {key: only_file(subject, key) for key in keys}
    sound = {key: paths[key].read_bytes() for key in keys}
    leaked = 0
    for _ in range(trial.scale):
        key = trial.random.choice(keys)
        hurt(trial, paths[key], sound[key])
        into = bytearray(CANARY * (subject.nbytes // len(CANARY)))
        if subject.get(key, memoryview(into)):
            leaked += CANARY in into
        restore(paths[key], sound[key])
    trial.must("no canary is handed out", leaked == 0, f"{leaked} of {trial.scale}")
    into = bytearray(CANARY * (subject.nbytes // len(CANARY)))
    trial.must(
        "control: a sound entry overwrites all of it",
        subject.get(keys[0], memoryview(into)) and CANARY not in into,
    )


@scored(
    16, "Damage heals", quick=25, full=1000,
    bar="a damaged entry is a hit 0 times; the next put makes it a hit again",
)  # fmt: skip
def heals(trial: Trial) -> None:
    subject = trial.make(nbytes=16384)
    (key,) = trial.stored(subject, 1)
    path = only_file(subject, key)
    sound, payload = path.read_bytes(), key.payload(subject.nbytes)
    looks: list[Look] = []
    unhealed: dict[str, int] = {}
    for _ in range(trial.scale):
        how = hurt(trial, path, sound)
        looks += [trial.look(subject, key), trial.look(subject, key)]
        subject.put(key, payload)
        if trial.look(subject, key) != "hit":
            unhealed[how] = unhealed.get(how, 0) + 1
            restore(path, sound)
    judge(trial, looks)
    count = sum(unhealed.values())
    trial.should("a put heals it", not unhealed, f"{count} of {trial.scale} not healed: {unhealed}")


@scored(
    17, "On-device path (GDS)", quick=0, full=0,
    bar="12 to 16 with verification on the GPU, at most 5 % of the load time",
)  # fmt: skip
def on_device(trial: Trial) -> None:
    trial.needs("a GPU with GDS, and a path to it", there=False)
