"""What makes two KV caches the same.

An `Identity` names everything outside the token ids that K and V depend on; its `namespace` is
the directory in which they are stored, so that caches of different identities never meet. It is
the same in every process, on every host and for every engine. Does not promise that an engine
computes what its config says. Adapters fill it in; the store only compares namespaces.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import json
import operator
import os
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from vua.errors import ConfigError

__all__ = ["Identity", "config_digest", "weights_fingerprint"]

_VERSION = "vua.identity.v1"
_CHUNK_TOKENS = range(1, 65537)
_ROPE_ORDERS = ("", "neox", "interleaved")

# Top-level config keys that cannot change K or V. Everything else counts: an unknown key costs
# hits, never a wrong one. `architectures` counts, because it chooses the code that runs.
_IGNORED_CONFIG_KEYS = frozenset(
    # The KV dtype is a field of its own; loaders set these to what they were asked for.
    "dtype torch_dtype transformers_version name_or_path _name_or_path "  # noqa: SIM905 - words
    "_commit_hash _auto_class _is_quantized "
    # What a call returns, and which kernel computes attention.
    "use_cache return_dict output_attentions output_hidden_states attn_implementation "
    "_output_attentions _attn_implementation _attn_implementation_internal "
    "_attn_implementation_autoset _experts_implementation _experts_implementation_internal "
    # The head behind the last layer; vLLM unties it where the checkpoint holds one.
    "tie_word_embeddings id2label label2id num_labels problem_type "
    # How tokens are chosen; the tokens themselves are in the key.
    "bos_token_id eos_token_id pad_token_id generation_config do_sample temperature top_k top_p "
    "min_length max_length num_beams num_return_sequences repetition_penalty".split()
)

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_WEIGHTS_VERSION = "vua.weights.v1"
_PAGE = 4096
_EDGE_PAGES = 128  # GGUF describes its tensors at the head; torch's zip keeps CRCs at the tail
_SPREAD_PAGES = 4096
_MAX_HEADER = 100_000_000  # the safetensors library refuses longer ones too
_READERS = 8  # a large model on a network takes 100,000 round trips
_MEMO_NAME = ".vua-weights.json"
_MEMO_ENTRIES = 64
_SETTLED_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Everything but the tokens that a KV cache depends on.

    Holds nothing of how an engine runs (name, version, TP size, rank, block size, paged layout).

    >>> llama = Identity(model="a label", kv_dtype="bfloat16", rope="neox")
    >>> llama.namespace == Identity(model="a label", kv_dtype="float16", rope="neox").namespace
    False

    Args:
        model: `config_digest` of the text config, or a label that the caller answers for.
        weights: `weights_fingerprint` or a hub commit.
        adapter: fingerprint of the LoRA applied to every request; "" for none.
        kv_dtype: dtype of the stored values, such as "bfloat16" or "fp8_e4m3".
        kv_scales: digest of the scales of a quantised cache; "" for none.
        rope: rotated dimensions as "neox" halves, "interleaved" pairs, or "" where unknown.
        epoch: bumped by an operator to leave behind everything stored before.
        chunk_tokens: tokens per chunk, 1 to 65536.
        name: for humans; not part of the namespace.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    model: str
    weights: str = ""
    adapter: str = ""
    kv_dtype: str = ""
    kv_scales: str = ""
    rope: str = ""
    epoch: str = ""
    chunk_tokens: int = 64
    name: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = int if field.name == "chunk_tokens" else str
            if type(value) is not kind:
                raise ConfigError(f"identity.{field.name} must be {kind.__name__}, not {value!r}")
        if self.rope not in _ROPE_ORDERS:
            raise ConfigError(f"identity.rope must be one of {_ROPE_ORDERS}, not {self.rope!r}")
        if self.chunk_tokens not in _CHUNK_TOKENS:
            raise ConfigError(f"identity.chunk_tokens={self.chunk_tokens} is not in 1..65536")

    def encode(self) -> bytes:
        """Return the canonical bytes of the identity; different identities never share them."""
        parts = [_VERSION]
        for field in fields(self):
            if field.name != "name":
                parts += [field.name, str(getattr(self, field.name))]
        return b"".join(_framed(part.encode(errors="surrogatepass")) for part in parts)

    @property
    def namespace(self) -> str:
        """64 hex digits that name the directory of this identity's chunks."""
        return hashlib.sha256(self.encode()).hexdigest()

    def describe(self) -> dict[str, str | int]:
        """Return the identity in clear, as `namespace.json` holds it."""
        described: dict[str, str | int] = {"version": _VERSION, "namespace": self.namespace}
        return described | {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_description(cls, description: Mapping[str, object]) -> Identity:
        """Return the identity that `describe` described.

        >>> same = Identity(model="a label")
        >>> Identity.from_description(same.describe()) == same
        True

        Raises:
            ConfigError: a key is unknown or missing, or the fields do not give the namespace.
        """
        names = [field.name for field in fields(cls)]
        known = ["version", "namespace", *names]
        for key in description:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
                raise ConfigError(f"an identity has no key {key!r}; the nearest one is {near!r}")
        if missing := [key for key in known if key not in description]:
            raise ConfigError(f"the description of an identity lacks {', '.join(missing)}")
        identity = cls(**{name: description[name] for name in names})  # type: ignore[arg-type]
        claims = {"version": _VERSION, "namespace": identity.namespace}
        if any(description[key] != expected for key, expected in claims.items()):
            raise ConfigError(
                f"the fields of a described identity give {claims}, which it does not claim to be; "
                "it is damaged, or another version of VUA wrote it"
            )
        return identity


def config_digest(config: Mapping[str, object]) -> str:
    """Return 64 hex digits that stand for a Hugging Face text config.

    Pass `to_dict()` of the config object that the engine runs with: unlike `config.json` it holds
    defaults and overrides. Every key counts except a few that cannot change K or V.

    >>> config_digest({"rope_theta": 10000}) == config_digest({"rope_theta": 10000.0})
    True

    Raises:
        ConfigError: a value is nothing that JSON knows, so it has no digest that lasts.
    """
    counting = {key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}
    if counting.get("sliding_window") == 0:  # some write 0 for no window, and vLLM makes it None
        counting["sliding_window"] = None
    text = json.dumps(_canonical(counting, "config"), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(b"vua.config.v2\n" + text.encode()).hexdigest()


def weights_fingerprint(path: str | os.PathLike[str], *, cache: bool = True) -> str:
    """Return 64 hex digits that stand for the weights at `path`.

    Covers name, size and content of every weight file of a model or adapter directory (for an
    adapter its config too), or of one file. Of a safetensors file it reads the header and the
    4 KiB pages that hold each tensor's first, middle and last byte; of any other file both ends
    and 4096 pages, which is all of it up to 16 MiB. So a retrained or requantised tensor gives
    another fingerprint, also when sizes and times stay. Where the weights lie does not matter.

    Does not notice an edit of one tensor's bytes outside the sampled pages, weights exchanged
    between the engine's load and this call, nor those below subdirectories. Safe for concurrent
    threads and processes; a crash leaves no half-written memo.

    Args:
        path: a local directory, or one weight file.
        cache: remember the result beside the weights, else in the user's cache directory, and
            take it from there while size, mtime, ctime and inode of every file stay the same.

    Raises:
        ConfigError: there are no weights at `path`.
        OSError: a weight file cannot be read.
    """
    root = Path(path).absolute()
    files = _weight_files(root)
    state = _state(root, files)
    if cache and (remembered := _recall(root, state)):
        return remembered
    digest = hashlib.sha256(_framed(_WEIGHTS_VERSION.encode()))
    with ThreadPoolExecutor(_READERS, thread_name_prefix="vua-fingerprint") as pool:
        for file, content in zip(files, pool.map(_content_digest, files), strict=True):
            digest.update(_framed(os.fsencode(file.name)) + _framed(content))
    fingerprint = digest.hexdigest()
    # Clocks of file systems tick coarsely: only later must another write show in the state.
    settled_s = time.time() - max(file.stat().st_mtime for file in files)
    if cache and settled_s > _SETTLED_S and state == _state(root, files):
        _remember(root, state, fingerprint)
    return fingerprint


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part


def _canonical(value: object, where: str) -> object:
    """Return `value` in the one form that all equal values share."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return [_canonical(item, f"{where}[{n}]") for n, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = {str(key): _canonical(item, f"{where}.{key}") for key, item in value.items()}
        if len(items) == len(value) and all(isinstance(key, str | int) for key in value):
            return items
        raise ConfigError(f"{where} has keys that JSON cannot tell apart: {list(value)!r}")
    raise ConfigError(
        f"{where} is a {type(value).__name__}, which has no lasting digest; pass the config's "
        "to_dict(), or give the identity a label of your own"
    )


def _weight_files(root: Path) -> list[Path]:
    """Return the files that hold weights, by name; as engines do, pass over hidden ones."""
    listed = sorted(root.iterdir()) if root.is_dir() else [root]
    seen = [file for file in listed if not file.name.startswith(".") and file.is_file()]
    weights = [file for file in seen if file.suffix in _WEIGHT_SUFFIXES]
    if not weights:
        raise ConfigError(
            f"no weights ({', '.join(_WEIGHT_SUFFIXES)}) at {root}, so caches cannot be told "
            "apart; pass the local directory or file that the engine loads"
        )
    return weights + [file for file in seen if file.name == "adapter_config.json"]


def _state(root: Path, files: list[Path]) -> str:
    """Return a digest of what changes when a file is written to or exchanged."""
    found = [(file.name, file.stat()) for file in files]
    state = [(n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in found]
    return hashlib.sha256(json.dumps([os.path.realpath(root), state]).encode()).hexdigest()


def _content_digest(file: Path) -> bytes:
    """Return a digest of a file's size and its sampled pages."""
    # Never waits for a writer, should a pipe have taken the file's place.
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # else each page reads 128 KiB ahead
        size = os.fstat(fd).st_size
        pages = _tensor_pages(fd, size) if file.suffix == ".safetensors" else None
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        for page in sorted(pages or _spread_pages(size)):
            digest.update(_read(fd, min(_PAGE, size - page * _PAGE), page * _PAGE))
        return digest.digest()
    finally:
        os.close(fd)


def _tensor_pages(fd: int, size: int) -> set[int] | None:
    """Return the pages to sample of a safetensors file; None where it is none."""
    try:
        data = 8 + int.from_bytes(_read(fd, min(size, 8), 0), "little")
        if data > min(size, _MAX_HEADER):
            return None
        header = json.loads(_read(fd, data - 8, 8))
        pages = set(range(-(-data // _PAGE)))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = (data + operator.index(at) for at in tensor["data_offsets"])
            if not data <= begin <= end <= size:
                return None
            pages |= {at // _PAGE for at in (begin, (begin + end) // 2, end - 1) if begin < end}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return pages


def _spread_pages(size: int) -> set[int]:
    count = -(-size // _PAGE)
    spread = {n * (count - 1) // (_SPREAD_PAGES - 1) for n in range(_SPREAD_PAGES if count else 0)}
    edges = (*range(_EDGE_PAGES), *range(count - _EDGE_PAGES, count))
    return spread | {page for page in edges if 0 <= page < count}


def _read(fd: int, nbytes: int, at: int) -> bytes:
    parts = bytearray()
    while len(parts) < nbytes:
        part = os.pread(fd, nbytes - len(parts), at + len(parts))
        if not part:
            raise OSError(errno.EIO, "a weight file became shorter while it was read")
        parts += part
    return bytes(parts)


def _memo_paths(root: Path) -> list[Path]:
    """Return where the fingerprint of `root` may be remembered, best place first."""
    beside = (root if root.is_dir() else root.parent) / _MEMO_NAME
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    digest = hashlib.sha256(os.fsencode(os.path.realpath(root))).hexdigest()
    places = [beside, Path(home, "vua", f"weights-{digest[:32]}.json")]
    return [place for place in places if place.is_absolute()]


def _memo_entries(memo: Path) -> dict[str, str]:
    """Return the remembered fingerprints by state; none where the memo is absent or damaged."""
    try:
        entries = json.loads(memo.read_bytes())[_WEIGHTS_VERSION].items()
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
    return {key: value for key, value in entries if re.fullmatch("[0-9a-f]{64}", str(value))}


def _recall(root: Path, state: str) -> str | None:
    """Return the remembered fingerprint of exactly these files, None where there is none."""
    found = (_memo_entries(memo).get(state) for memo in _memo_paths(root))
    return next(filter(None, found), None)


def _remember(root: Path, state: str, fingerprint: str) -> None:
    for memo in _memo_paths(root):
        latest = dict([*_memo_entries(memo).items(), (state, fingerprint)][-_MEMO_ENTRIES:])
        with contextlib.suppress(OSError):  # a memo only saves time: try the next place, if any
            _publish(memo, json.dumps({_WEIGHTS_VERSION: latest}))
            return


def _publish(memo: Path, content: str) -> None:
    memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, name = tempfile.mkstemp(prefix=f"{memo.name}.", dir=memo.parent)  # mode 0600
    try:
        with os.fdopen(fd, "w") as stream:
            stream.write(content)
        Path(name).replace(memo)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
