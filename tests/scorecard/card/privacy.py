"""24, 27: what other users may read of ours, and whether they are believed."""

from __future__ import annotations

import contextlib
import os
import stat
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from forgery import checksums_of
from scorecard.card.costs import timings
from scorecard.card.damage import hurt, only_file, restore
from scorecard.stores import VuaSubject
from scorecard.subject import Key, noise
from scorecard.trial import Trial, scored
from vua.format.entry import EntryCodec
from vua.format.parse import encode_header, parse_entry
from vua.security.keyring import write_key
from vua.security.settings import Security

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
    """Put forged, foreign and replayed files where a reader with a key will look."""
    trial.needs_vua("keys")
    trial.needs("the package cryptography", find_spec("cryptography") is not None)
    ours, theirs = (_keyed(trial, name, "cache") for name in ("ours", "theirs"))
    plain = VuaSubject(trial.directory / "cache", ours.nbytes)
    victim, other = trial.stored(ours, 2)
    theirs.put(victim, victim.payload(ours.nbytes))
    plain.put(victim, victim.payload(ours.nbytes))
    path = only_file(ours, victim)
    sound, theirs_bytes = path.read_bytes(), only_file(theirs, victim).read_bytes()
    forged = {
        "without a key": _renamed(plain, ours, victim),
        "with another key": theirs_bytes,
        "with another key, renamed": theirs_bytes.replace(
            theirs.chunk(victim).name.encode(), ours.chunk(victim).name.encode()
        ),
        "of another prompt": only_file(ours, other).read_bytes(),
        "ours with other bytes": _resealed(ours, sound),
    }
    accepted: dict[str, int] = {}
    for turn in range(trial.scale):
        how = trial.random.choice([*forged, *["of another uid"] * (os.geteuid() == 0)])
        restore(path, forged.get(how, sound))
        if how == "of another uid":
            os.chown(path, _STRANGER, -1)
        if trial.look(ours, victim) != "miss":
            accepted[how] = accepted.get(how, 0) + 1
        del turn
    found = f"{sum(accepted.values())} of {trial.scale}: {accepted}"
    trial.must("nothing forged or foreign is accepted", not accepted, found)
    if os.geteuid() != 0:
        trial.note("not root: nothing was tried as another user")
    restore(path, sound)
    trial.must("control: what was written with the key is", trial.look(ours, victim) == "hit")
    _price(trial)


_STRANGER: Final = 4242


def _keyed(trial: Trial, name: str, root: str, nbytes: int = 16384) -> VuaSubject:
    """Open the cache with a key of that name."""
    key, directory = trial.directory / f"{name}.key", trial.directory / root
    if not key.exists():
        write_key(key)
    directory.mkdir(mode=0o700, exist_ok=True)
    return VuaSubject(directory, nbytes, security=Security(key_file=str(key)))


def _renamed(plain: VuaSubject, ours: VuaSubject, victim: Key) -> bytes:
    """Return a plain file that says it is the chunk for which ``ours`` has a secret name."""
    codec = plain.store().codec(plain.layout.full)
    payload = victim.payload(plain.nbytes)
    sums = checksums_of(codec, payload)
    return encode_header(codec, ours.chunk(victim), sums) + payload


def _resealed(ours: VuaSubject, sound: bytes) -> bytes:
    """Return a file of ours with other bytes, and every checksum set right: all but the seal."""
    found = parse_entry(sound)
    codec = EntryCodec(found.namespace, ours.layout, ours.layout.full, found.kind)
    payload = noise(ours.nbytes, 5)
    sums = checksums_of(codec, payload)
    tags = sound[codec.table_offset + 8 * codec.blocks : codec.header_nbytes]
    return encode_header(codec, found.key, sums, seal_info=found.seal_info, tags=tags) + payload


def _price(trial: Trial) -> None:
    """Compare loads of 1 MiB with a key and without, by turns."""
    subjects = _keyed(trial, "ours", "sealed", 1 << 20), trial.make(1 << 20, root="plain")
    key, into = Key(1), memoryview(bytearray(1 << 20))
    for subject in subjects:
        subject.put(key, key.payload(1 << 20))
    rounds = max(20, min(trial.scale, 500))
    sealed, plain = timings(rounds, *(partial(one.get, key, into) for one in subjects))
    extra_ms = 1000 * (min(sealed) - min(plain))  # the fastest: others use this machine, too
    trial.should("at most 0.3 ms per MiB more", extra_ms <= 0.3, f"{extra_ms:.2f} ms")
