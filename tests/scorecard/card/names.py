"""19, 20, 21, 26: what has another identity, salt or name is another entry."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from scorecard.stores import layout_of, memory_of
from scorecard.subject import Key, noise
from scorecard.trial import Trial, scored
from vua.format.identity import Identity, config_digest
from vua.format.keys import ChunkKey, KeyChain
from vua.format.layout import KVLayout, Shard
from vua.serdes import tensor_to_bytes
from vua.store.namespace import Namespace
from vua.store.writer import EntryWriter
from vua.weights import weights_fingerprint

_CONFIG: Final[dict[str, Any]] = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "vocab_size": 512,
}  # fmt: skip
_NBYTES: Final = 16384
_COLLIDING: Final = 300
"""Keys that are given 256 names."""


def _weights(directory: Path, value: int) -> str:
    """Return the fingerprint of a checkpoint at the one path that all share."""
    import torch

    path = directory / "model"
    path.mkdir(exist_ok=True)
    content = tensor_to_bytes(torch.full((64, 64), value, dtype=torch.int32))
    (path / "model.safetensors").write_bytes(bytes(content))
    return weights_fingerprint(path)


def _variants(directory: Path) -> dict[str, tuple[Identity, KVLayout, list[tuple[str, bytes]]]]:
    """Return what is stored: one model, and sixteen that differ from it in one thing each."""
    base: dict[str, Any] = {
        "model": config_digest(_CONFIG), "weights": "commit 1", "kv_dtype": "uint8",
        "rope": "neox", "chunk_tokens": 4, "name": "base",
    }  # fmt: skip
    layout = layout_of(_NBYTES)
    found = {"base": (Identity(**base), layout, list[tuple[str, bytes]]())}
    for name, change in {
        "revision": {"weights": "commit 2"},
        "weights at the same path": {"weights": _weights(directory, 1)},
        "weights at the same path, again": {"weights": _weights(directory, 2)},
        "adapter": {"adapter": "lora 1"},
        "adapter, loaded anew": {"adapter": "lora 2"},
        "RoPE": {"model": config_digest(_CONFIG | {"rope_theta": 500000.0})},
        "RoPE's order": {"rope": "interleaved"},
        "hf_overrides": {"model": config_digest(_CONFIG | {"sliding_window": 128})},
        "KV dtype": {"kv_dtype": "fp8_e4m3"},
        "fp8 scales": {"kv_dtype": "fp8_e4m3", "kv_scales": "0123"},
        "epoch": {"epoch": "2"},
    }.items():
        found[name] = (Identity(**base | change), layout, [])
    found["split factor"] = (
        Identity(**base | {"chunk_tokens": 8}),
        KVLayout(2, 2, layout.k_dim // 2, layout.v_dim // 2, "U8", 8),
        [],
    )
    for tag in ("salt", "image", "prompt_embeds", "adapter"):
        found[f"{tag} of a request"] = (Identity(**base), layout, [(tag, b"same value")])
    return found


@scored(
    19, "Identity matrix", gate=True, quick=17, full=17,
    bar="a change of any one thing that K and V depend on: 0 cross hits, all self hits",
)  # fmt: skip
def identity_matrix(trial: Trial) -> None:
    """Store one prompt for each variant, in any order, and ask for it as each of them."""
    trial.needs_vua("identities")
    variants = _variants(trial.directory)
    names = list(variants)[: trial.scale]
    trial.random.shuffle(names)
    root = trial.directory / "cache"
    root.mkdir()
    wrong, missed = [], []
    payloads = {name: noise(_NBYTES, number) for number, name in enumerate(names)}
    into = bytearray(_NBYTES)
    for known, name in enumerate(names):
        identity, layout, _ = variants[name]
        with_key = _first_key(*variants[name])
        store = Namespace.create(root, identity, [layout]).stores[0]
        if store.load([with_key], memory_of(layout, memoryview(into))).chunks:
            wrong.append(f"{name} finds what was stored for {names[:known]}")
        EntryWriter(store, memory_of(layout, memoryview(payloads[name]))).save([with_key])
        store.close()
    for name in names:
        identity, layout, _ = variants[name]
        store = Namespace.create(root, identity, [layout]).stores[0]
        key = _first_key(*variants[name])
        missed += [name] * (store.load([key], memory_of(layout, memoryview(into))).chunks != 1)
        wrong += [f"{name}: other bytes"] * (into != payloads[name])
        store.close()
    trial.must("no cross hit", not wrong, f"{len(wrong)} of {len(names)}: {wrong[:2]}")
    trial.must("every self hit", not missed, f"{len(missed)} of {len(names)} missed: {missed[:2]}")
    trial.must("what is split over ranks is the same", _split_over_ranks(root, variants["base"]))


def _first_key(
    identity: Identity, layout: KVLayout, extras: Sequence[tuple[str, bytes]]
) -> ChunkKey:
    ids = np.arange(8, dtype="<u4").tobytes()
    del layout
    return KeyChain(ids, identity.chunk_tokens, {0: list(extras)} if extras else None)[0]


def _split_over_ranks(root: Path, base: tuple[Identity, KVLayout, list[tuple[str, bytes]]]) -> bool:
    """What two ranks store, of heads (TP) or of layers (PP), one process reads as a whole."""
    identity, layout, _ = base
    whole = noise(_NBYTES, 99)
    extent = layout.extent_nbytes[0]
    rows = np.frombuffer(whole, dtype=np.uint8).reshape(2, 2, 2, extent)  # array, head, layer
    for number, axis in enumerate((1, 2)):
        ids = np.arange(8, dtype="<u4") + 1000 * (number + 1)
        key = KeyChain(ids.tobytes(), identity.chunk_tokens)[0]
        store = Namespace.create(root, identity, [layout]).stores[0]
        for rank in range(2):
            part = rows.take([rank], axis=axis)
            heads, layers = part.shape[1], part.shape[2]
            shard = Shard(0, 2, rank, rank + 1) if axis == 1 else Shard(rank, rank + 1, 0, 2)
            small = KVLayout(layers, heads, layout.k_dim, layout.v_dim, "U8", layout.chunk_tokens)
            memory = memory_of(small, memoryview(part.tobytes()))
            EntryWriter(store, memory, shard=shard).save([key])
        into = bytearray(_NBYTES)
        loaded = store.load([key], memory_of(layout, memoryview(into)))
        store.close()
        if loaded.chunks != 1 or into != whole:
            return False
    return True


@scored(
    20, "Names that collide", gate=True, quick=600, full=100_000,
    bar="with names cut to 8 bits: 0 wrong",
)  # fmt: skip
def collisions(trial: Trial) -> None:
    """Put and get keys of which about 4 in 1000 have the name of any other one.

    In a new directory for every few hundred keys: where all names are taken there are few hits.
    """
    looks, files = [], 0
    for first in range(0, trial.scale // 2, _COLLIDING):
        subject = trial.make(nbytes=4096, root=f"cache-{first}")
        subject.name_bits = 8
        stop = min(first + _COLLIDING, trial.scale // 2)
        for number in range(first, stop):
            key = Key(number)
            subject.put(key, key.payload(subject.nbytes))
            looks.append(trial.look(subject, key))
            looks.append(trial.look(subject, Key(trial.random.randrange(first, first + 600))))
        files += sum(len(names) for _, _, names in os.walk(subject.root))
        subject.close()
        shutil.rmtree(subject.root)
    wrong = looks.count("wrong")
    trial.must("no wrong bytes", wrong == 0, f"{wrong} of {len(looks)}")
    trial.must("no exception", "raised" not in looks)
    trial.needs("names that can be cut", files < 0.9 * (trial.scale // 2))
    trial.must("control: there are hits", looks.count("hit") > len(looks) // 20)


@scored(
    21, "Tenants", gate=True, quick=200, full=2000,
    bar="another salt: no hit, and as long a miss as of what nobody ever stored (KS p > 0.01)",
)  # fmt: skip
def tenants(trial: Trial) -> None:
    """Store every other number for tenant A, then ask for all as tenant B, each once.

    The times are independent draws only because no name is asked for twice: how long one name
    takes (whether its parent directory is there) stays the same at every look.
    """
    subject = trial.make(nbytes=16384)
    trial.needs("an adapter for salts", subject.has_salts)
    into = memoryview(bytearray(subject.nbytes))
    own, shared, chances = [], 0, list[float]()
    while len(chances) < 3:  # p < 0.01 happens by chance in one of a hundred: thrice in a million
        numbers = range(2 * trial.scale * len(chances), 2 * trial.scale * (len(chances) + 1))
        for key in (Key(number, salt="A") for number in numbers[::2]):
            subject.put(key, key.payload(subject.nbytes))
            own.append(trial.look(subject, key))
        times_s: tuple[list[float], list[float]] = ([], [])  # of what A stored, of what nobody did
        for number in trial.random.sample(numbers, len(numbers)):
            key = Key(number, salt="B")
            began_s = time.perf_counter()
            hit = subject.get(key, into)
            times_s[number % 2].append(time.perf_counter() - began_s)
            shared += hit
        chances.append(same_distribution(*times_s))
        if chances[-1] > 0.01:
            break
    trial.must("control: one's own entries are hits", set(own) == {"hit"})
    trial.must("no entry is shared", shared == 0, f"{shared} hits")
    words = ", ".join(f"{chance:.3f}" for chance in chances)
    trial.must("a foreign entry looks like none", chances[-1] > 0.01, f"p = {words}")


def same_distribution(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test (its asymptotic form).

    Numerical Recipes, 3rd edition, section 14.3.3, gives the series and the effective size.
    """
    first, second = np.sort(one), np.sort(other)
    both = np.concatenate([first, second])
    parts = [np.searchsorted(x, both, side="right") / len(x) for x in (first, second)]
    distance = float(np.abs(parts[0] - parts[1]).max())
    size = np.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (size + 0.12 + 0.11 / size) * distance
    if scaled < 0.2:
        return 1.0
    terms = [(-1) ** (k - 1) * np.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)]
    return float(min(1.0, max(0.0, 2 * sum(terms))))


_HOSTILE: Final = (
    "..", ".", "/", "../../../../tmp/escape", "/etc/passwd", "a/b", "a-b", "a_b", "a//b", "a/./b",
    "a\0b", "a@b", "@", "a\\b", "a b", " a", "a ", "A", "a", "a:b", "a%2fb", "a\nb", "a\tb", "~",
    "$HOME", "`id`", "$(id)", "a" * 5120, "é", "e\u0301", "\u202eabc", "\ud800", "\udcff",
    "\U0001f600", "con", "nul", "a.", "a..", ".tmp-a", "-rf", "*", "?", "[a]", "a;b", "a|b", "\x7f",
    "quarantine", "trash-a", ".upkeep", "namespace.json",
)  # fmt: skip


@scored(
    26, "Traversal", gate=True, quick=60, full=5000,
    bar="hostile strings as model and salt: no path outside the root, no two share a name",
)  # fmt: skip
def traversal(trial: Trial) -> None:
    """Put under hostile names, and look whether anything appears elsewhere or is shared."""
    subject = trial.make(nbytes=4096, root="deep/er/cache")
    texts = [*_HOSTILE]
    while len(texts) < trial.scale:
        texts.append("".join(trial.random.sample(_HOSTILE, trial.random.randint(2, 4)))[:6000])
    texts = list(dict.fromkeys(texts))[: trial.scale]
    trial.needs("an adapter for models or salts", subject.has_models or subject.has_salts)
    keys = [Key(1, model=text) for text in texts] if subject.has_models else []
    keys += [Key(1, salt=text) for text in texts] if subject.has_salts else []
    before = _outside(trial.directory, subject.root)
    put, refused, clashes = [], 0, []
    for key in keys:
        try:
            if trial.look(subject, key) not in ("miss", "raised"):
                clashes.append(key)
            put += [key] * subject.put(key, key.payload(subject.nbytes))
        except Exception:  # noqa: BLE001 - a name that is refused is no danger
            refused += 1
    looks = [trial.look(subject, key) for key in put]
    escaped = _outside(trial.directory, subject.root) - before
    trial.must("nothing outside the root", not escaped, sorted(escaped)[:2])
    wrong = looks.count("wrong") + len(clashes)
    found = f"{wrong} of {len(keys)}, such as {[key.model[:20] for key in clashes[:3]]}"
    trial.must("no two share a name", wrong == 0, found)
    trial.should("all can be stored", refused == 0 and set(looks) == {"hit"}, f"{refused} refused")


def _outside(directory: Path, root: Path) -> set[str]:
    """Return what lies beside ``root``, up to where the hostile names could lead."""
    there = {str(path) for path in directory.rglob("*") if root not in (path, *path.parents)}
    near = (Path(tempfile.gettempdir()), Path("/tmp"), Path("/"))
    return there | {str(path) for place in near for path in place.glob("*escape*")}
