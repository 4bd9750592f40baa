"""`Llama.set_cache`'s cache, kept in a directory.

A returned state is that of exactly the tokens it names, of the same model; and the state of the
directory never fails a request. Thread-safe; any number of processes may use the directory.

Two models get one identity only if their K and V mean the same: the same GGUF
files to the byte, the same adapter, the same settings except those known not to matter, the same
version of llama-cpp-python (llama.cpp's results may change with it). An adapter that is set without
`Llama`'s knowledge goes unseen.

The bytes of a context's state are split into K and V and joined again. `llama_state_get_data`
writes the name of the architecture, then for each of its memory's streams a position and the
sequences of every cell, and the rows of K and V layer by layer. The format has no version, so
`parse` refuses everything that does not give the same bytes when it is joined again. One stream,
one sequence, one shape in all layers, dtypes without blocks.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import struct
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt
import torch
from llama_cpp import BaseLlamaCache, LlamaState

from vua.connector.load_policy import PrefillSpeed, Savings
from vua.connector.setup import devices
from vua.core import VUA, ClosestKV, VUAConfig
from vua.errors import ConfigError, StorageError, VUAError
from vua.format.identity import Identity
from vua.format.layout import ITEMSIZE
from vua.serdes import DTYPES
from vua.store.identified import LazyStore, ModelDescription
from vua.store.place import locate, look_at
from vua.weights import Weights, checkpoint_files

GGML_DTYPES: Final = {0: "F32", 1: "F16", 30: "BF16"}
"""ggml's types whose single values can be separated, by VUA's names."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class StateForm:
    """What all states of one context have in common."""

    arch: bytes
    """llama.cpp's name of the model's architecture."""
    layers: int
    k_type: int
    """A key of `GGML_DTYPES`, as is ``v_type``."""
    v_type: int
    k_dim: int
    """Values of one token in one layer, all heads."""
    v_dim: int
    v_transposed: bool
    """Whether V is ``[v_dim, cells]``: without flash attention."""

    @property
    def dtype(self) -> str:
        """The dtype of K, by VUA's name."""
        return GGML_DTYPES[self.k_type]

    def build(self, k: Sequence[Array], v: Sequence[Array]) -> bytes:
        """Return the state of a context that has computed these tokens as positions 0, 1, ...

        Args:
            k: for each layer ``[tokens, k_dim]``, any strides, of unsigned words as wide as a
                value: the bits of any dtype.
            v: the same, ``[tokens, v_dim]``.
        """
        tokens = len(k[0])
        parts = [struct.pack("<I", len(self.arch)), self.arch, struct.pack("<II", 1, tokens)]
        parts += [_cells(tokens).tobytes(), struct.pack("<II", self.v_transposed, self.layers)]
        head = _head(self.k_type, self.k_dim)
        head_v = _head(self.v_type, self.v_dim, transposed=self.v_transposed)
        for rows in k:
            parts += [head, rows.tobytes()]
        for rows in v:
            parts += [head_v, (rows.T if self.v_transposed else rows).tobytes()]
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class State:
    """A state, split. The arrays are views of the parsed bytes."""

    form: StateForm
    k: list[Array]
    """For each layer ``[tokens, k_dim]``, unsigned words with the bits of the values."""
    v: list[Array]
    """The same, ``[tokens, v_dim]``."""

    @property
    def tokens(self) -> int:
        """How many tokens the context had computed, from position 0 on."""
        return len(self.k[0])


def parse(data: bytes | bytearray) -> State:
    """Split a state.

    Args:
        data: written by `llama_state_get_data` for a context with at least one token.

    Raises:
        ConfigError: it holds something other than K and V of one sequence from position 0 on, or in
            a form that this module does not know. The message says what.
    """
    try:
        (length,) = struct.unpack_from("<I", data)
        streams, tokens = struct.unpack_from("<II", data, 4 + length)
        at = 4 + length + 8 + 12 * tokens
        if streams != 1 or not tokens:
            raise _unknown(f"{streams} streams, {tokens} cells")
        transposed, layers, k_type, k_nbytes = struct.unpack_from("<IIiQ", data, at)
        k_dim = k_nbytes // _word(k_type).itemsize
        k, end = _layers(data, at + 8, _head(k_type, k_dim), layers, (tokens, k_dim))
        v_type, *v_size = struct.unpack_from("<iII" if transposed else "<iQ", data, end)
    except (struct.error, OverflowError) as problem:
        raise _unknown(f"it ends after {len(data)} bytes") from problem
    v_dim = v_size[-1] if transposed else v_size[0] // _word(v_type).itemsize
    shape = (v_dim, tokens) if transposed else (tokens, v_dim)
    head = _head(v_type, v_dim, transposed=transposed == 1)
    v, end = _layers(data, end, head, layers, shape)
    if end != len(data) or transposed > 1:
        raise _unknown(f"{len(data) - end} bytes that are not K and V, such as sliding windows")
    order = _order(np.frombuffer(data, "<i4", 3 * tokens, at - 12 * tokens).reshape(-1, 3))
    arch = bytes(data[4 : 4 + length])
    form = StateForm(arch, layers, k_type, v_type, k_dim, v_dim, v_transposed=transposed == 1)
    v = [rows.T if transposed else rows for rows in v]
    return State(form, [rows[order] for rows in k], [rows[order] for rows in v])


def _head(kind: int, dim: int, *, transposed: bool = False) -> bytes:
    itemsize = _word(kind).itemsize
    if transposed:
        return struct.pack("<iII", kind, itemsize, dim)
    return struct.pack("<iQ", kind, dim * itemsize)


def _layers(
    data: bytes | bytearray, at: int, head: bytes, layers: int, shape: tuple[int, int]
) -> tuple[list[Array], int]:
    found, count = list[Array](), shape[0] * shape[1]
    word = _word(struct.unpack_from("<i", head)[0])
    for _ in range(layers):
        begin, at = at + len(head), at + len(head) + count * word.itemsize
        if data[begin - len(head) : begin] != head or at > len(data):
            raise _unknown("layers of different shapes")
        found.append(np.frombuffer(data, word, count, begin).reshape(shape))
    return found, at


def _cells(tokens: int) -> Array:
    """Return what llama.cpp says of each token: position, number of sequences, sequence 0."""
    cells = np.zeros((tokens, 3), "<i4")
    cells[:, 0], cells[:, 1] = np.arange(tokens), 1
    return cells


def _order(cells: Array) -> slice | Array:
    """Return where tokens 0, 1, ... lie; a slice is a view of all."""
    sorts = np.argsort(cells[:, 0], kind="stable")
    if not np.array_equal(cells[sorts], _cells(len(cells))):
        raise _unknown("cells that are not one sequence's tokens from position 0 on")
    return slice(None) if np.array_equal(cells, cells[sorts]) else sorts


def _word(kind: int) -> np.dtype[Any]:
    if kind not in GGML_DTYPES:
        raise _unknown(f"K or V of ggml's type {kind}; {sorted(GGML_DTYPES)} are known")
    return np.dtype(f"<u{ITEMSIZE[GGML_DTYPES[kind]]}")


def _unknown(what: str) -> ConfigError:
    return ConfigError(f"the state that llama.cpp writes cannot be taken apart: {what}")


_FREE_SETTINGS: Final = frozenset(
    # how much is computed at once, and by what; how it is stored while it is computed
    "n_batch n_ubatch n_rs_seq n_outputs_max n_outputs_max_per_seq "  # noqa: SIM905
    "n_threads n_threads_batch flash_attn_type offload_kqv op_offload no_perf defrag_thold "
    # a field of its own in the identity; what follows the last layer
    "type_k type_v pooling_type embeddings n_samplers".split()
)
"""Fields of llama.cpp's context parameters that K and V do not depend on. The rest counts."""
_CONTEXT: Final = ("n_ctx", "n_seq_max", "kv_unified")
"""The size of a context; it counts where `_is_chosen_by_length`."""


def described_model(
    llm: Any, form: StateForm, *, chunk_tokens: int, epoch: str
) -> ModelDescription:
    """Return the identity of a `Llama`'s states, without the weights."""
    settings = {
        name: value
        for name, *_ in llm.context_params._fields_
        if isinstance(value := getattr(llm.context_params, name), bool | int | float)
        and name not in _FREE_SETTINGS
    }
    if not _is_chosen_by_length(llm):
        for name in _CONTEXT:
            settings.pop(name, None)
    given = Path(llm.model_path)
    # images' weights beside the file are read by chat handlers, with which nothing is stored
    files = [
        file
        for file in checkpoint_files(given)
        if file.name == given.name or not file.name.startswith("mmproj")
    ]
    if llm.lora_path:
        files.append(Path(llm.lora_path))
    fields = {
        "vua_stored_by": f"llama-cpp-python {llama_cpp.__version__}",
        "settings": settings,
        "kv_overrides": sorted(
            (name, repr(value)) for name, value in (llm.kv_overrides or {}).items()
        ),
        "lora": [Path(llm.lora_path).name, repr(llm.lora_scale)] if llm.lora_path else [],
        "arch": form.arch.decode(errors="replace"),
    }
    others = Identity.of_config(
        fields,
        kv_dtype=form.dtype,
        epoch=epoch,
        chunk_tokens=chunk_tokens,
        name=Path(llm.model_path).stem,
    )
    began_s = _load_began_s(llm)

    def check(found: Weights | None, stop: threading.Event) -> Weights:
        if found is None or found.changed_since(began_s, stop=stop):
            msg = f"a file of {given.name} changed since it was loaded; make the Llama anew"
            raise ConfigError(msg)
        return found

    return ModelDescription(files, others, check)


def _is_chosen_by_length(llm: Any) -> bool:
    """Whether the context's size may choose between a model's factors for rotary frequencies.

    llama.cpp takes those for long contexts above the length that the model was trained for, or
    above the one that its file or an override names.
    """
    named = [*llm.metadata, *(llm.kv_overrides or {})]
    scaled = bool(llm.context_params.rope_freq_scale or llm.context_params.yarn_orig_ctx)
    return (
        any(".rope.scaling." in name for name in named)
        or llm.n_ctx() > llama_cpp.llama_model_n_ctx_train(llm.model)
        or scaled  # then llama.cpp sets the trained length anew
    )


def _load_began_s(llm: Any) -> float:
    """Return when llama.cpp began to load a model, in seconds since 1970.

    `Llama` with ``verbose=True`` sets llama.cpp's clock anew at each completion.
    """
    timed = llama_cpp.llama_perf_context(llm.ctx)
    return time.time() - (time.monotonic() - timed.t_start_ms / 1000)


def refusal(llm: Any) -> str:
    """Return why nothing of this `Llama` may be stored or loaded now; "" if it may."""
    if llm.chat_handler is not None:
        return "a chat handler may put images into a prompt, which its tokens do not show"
    if llm._logits_all:  # noqa: SLF001 - the argument is not public
        return "logits_all and draft models want the scores of all tokens, which are not stored"
    return ""


def try_form(llm: Any) -> StateForm:
    """Compute one token and return the form of states.

    Raises ConfigError if they cannot be stored.
    """
    kind = f"states of {Path(llm.model_path).name} cannot be stored"
    reason = refusal(llm)
    if not reason and (
        llama_cpp.llama_model_is_recurrent(llm.model) or llama_cpp.llama_model_is_hybrid(llm.model)
    ):
        reason = "it is a recurrent or hybrid model, whose state is not one of single tokens"
    if reason:
        raise ConfigError(f"{kind}: {reason}")
    try:
        llm.reset()
        llm.eval([max(llm.token_bos(), 0)])
        written = bytes(llm.save_state().llama_state)
        llm.reset()
        state = parse(written)
    except (RuntimeError, ConfigError) as problem:
        raise ConfigError(f"{kind}: {problem}") from problem
    form = state.form
    if form.build(state.k, state.v) != written:
        raise ConfigError(f"{kind}: llama.cpp writes them in a form that is not known here")
    if form.k_type != form.v_type:
        raise ConfigError(f"{kind}: K and V have different types, {form.k_type} and {form.v_type}")
    return form


log = logging.getLogger(__name__)

_NO_TOKEN = -1
_SPEED: Final = ("n_batch", "n_ubatch", "n_threads_batch", "flash_attn_type", "offload_kqv")


class VUALlamaCache(BaseLlamaCache):
    """Keeps what one `Llama` has computed in a directory, and returns the longest prefix.

    It serves only the `Llama` that it was made for: another one that asks gets nothing.

    >>> llm = Llama("model.gguf", n_ctx=4096)  # doctest: +SKIP
    >>> llm.set_cache(VUALlamaCache(llm, "/mnt/kv"))  # doctest: +SKIP
    """

    def __init__(
        self,
        llm: Any,
        path: str | os.PathLike[str] | Sequence[str],
        *,
        chunk_tokens: int = 64,
        capacity_bytes: int | str | None = None,
        epoch: str = "",
        durable: bool = False,
    ) -> None:
        """Use the directory ``path``, which is created (mode 0700) if missing.

        Computes one token, to learn the form of llama.cpp's state; ``llm`` forgets what it had
        computed before. A background thread identifies the model once, from every byte of its
        files, and the result is remembered. Until then nothing is loaded or saved, see `ready`.

        Args:
            llm: a `llama_cpp.Llama`; the cache does not keep it alive.
            path: the directory, a URL in a bucket (``s3://bucket/prefix``), or a list: a directory
                and slower tiers. Other models and engines may use it, too.
            chunk_tokens: tokens per chunk, the granularity of reuse.
            capacity_bytes: as `VUAConfig.max_bytes`: of the whole directory. By default 80 % of the
                file system, less if it is fuller.
            epoch: change it to ignore everything stored so far.
            durable: fsync each file. Without it a power cut may cost recent chunks.

        Raises:
            ConfigError: a setting is unusable, ``path`` is a file, or this model's states cannot be
                stored; the message says why. Never for a directory that cannot be made now: a line
                in the log says so, and it is tried again at each use.
        """
        super().__init__(capacity_bytes)
        self._config = VUAConfig(
            split_factor=chunk_tokens, epoch=epoch, durable=durable, max_bytes=capacity_bytes
        )
        self._form = try_form(llm)
        self._described = described_model(llm, self._form, chunk_tokens=chunk_tokens, epoch=epoch)
        self._llm, self._path = weakref.ref(llm), path
        self._said, self._seen = set[str](), list[int]()
        self._prefill, self._asked = PrefillSpeed(chunk_tokens), (0, 0, 0.0)
        try:
            locate(path)
        except OSError as problem:
            self._warn("nothing is loaded or saved while the directory is unusable: %s", problem)
        opens = partial(_opened, self._config, path, self._prefill, _speed_of(llm))
        self._stored = LazyStore(self._described, opens, log)

    def close(self) -> None:
        """Wait for running work and release the threads. Then nothing is loaded or saved.

        Stores first what an abandoned stream left in the `Llama`.
        """
        if (llm := self._llm()) is not None:
            self._save_abandoned(llm)
        self._stored.close()

    def ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the model is identified; return whether it is. None: no limit.

        Raises:
            ConfigError, StorageError, OSError: it cannot be, so nothing is ever loaded or saved.
        """
        return self._stored.ready(timeout_s)

    @property
    def identity(self) -> Identity:
        """Identity of these states; waits and raises as `ready` without a limit."""
        return self._stored.identity

    @property
    def cache_size(self) -> int:
        """Bytes in the directory, of all models; estimated if it is large. Raises OSError.

        For a bucket it raises StorageError: counting costs requests.
        """
        usage = look_at(self._path).usage
        if usage is None:
            msg = f"{self._path}: counting costs requests; `vua du` does it"
            raise StorageError(errno.ENOTSUP, msg)
        return usage.nbytes

    # -- what Llama calls ---------------------------------------------------------------------

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether a prefix of these tokens is stored, by name. Never raises for the directory."""
        vua = self._usable()
        return vua is not None and len(key) > 0 and vua.lookup(list(key))[0] > 0

    def __getitem__(self, key: Sequence[int]) -> LlamaState:
        """Return the state of the longest stored prefix, in whole chunks.

        Raises KeyError if nothing is stored that the `Llama` has not already computed. Never
        anything else: damage or a missing chunk shortens the prefix.
        """
        tokens, llm, vua = list(key), self._llm(), self._usable()
        if llm is None or vua is None or not tokens:
            raise KeyError("nothing is stored")
        self._save_abandoned(llm)
        self._asked = len(tokens), *_prefilled(llm)
        live = llm.longest_token_prefix(llm.input_ids[: llm.n_tokens].tolist(), tokens)
        (stored,), size = vua.lookup(tokens), self._config.split_factor
        if stored <= live:
            name = self.identity.namespace
            vua.savings.looked_up(name, stored // size, len(tokens) // size, size)
            raise KeyError("nothing is stored that has not been computed")
        found = vua.get_closest(tokens)
        if found.num_tokens <= live or not self._fits(found):
            raise KeyError("nothing is stored that has not been computed")
        rows = [[_words(pair[array]) for pair in found.data] for array in (0, 1)]
        state = self._form.build(*rows)
        ids = np.full(len(llm.input_ids), _NO_TOKEN, np.intc)
        ids[: found.num_tokens] = tokens[: found.num_tokens]
        return LlamaState(
            input_ids=ids,
            scores=np.zeros((1, llm.n_vocab()), np.single),  # unknown; Llama spreads them out
            n_tokens=found.num_tokens,
            llama_state=state,
            llama_state_size=len(state),
            seed=llm._seed,  # noqa: SLF001 - a loaded prefix does not change it
        )

    def __setitem__(self, key: Sequence[int], value: LlamaState) -> None:
        """Store the whole chunks of a state, except those already stored.

        Before the model is identified they are kept in memory, 512 MiB at most, and stored then.
        Never raises for the state of the directory: a failure is logged once.

        Args:
            key: the tokens of prompt and answer; the state may hold fewer.
            value: returned by `Llama.save_state`.
        """
        held = value.input_ids[: value.n_tokens].tolist()
        if not held or not self._may():
            return
        self._seen = held
        self._note_prefill()
        try:
            state = parse(bytearray(value.llama_state))  # torch wants memory that may be written
            if state.form != self._form:
                raise ConfigError(f"the state is of {state.form}, expected {self._form}")
            length = min(state.tokens, len(held), len(key))
            length -= length % self._config.split_factor
            if list(key[:length]) != held[:length]:
                raise ConfigError("the state is not of the tokens it is to be stored for")
            if _asking() is None:
                self._check_is_live(state, length)
            if length:
                dtype = DTYPES[self._form.dtype]
                data = [
                    [torch.from_numpy(rows[:length]).view(dtype)[None, None] for rows in pair]
                    for pair in zip(state.k, state.v, strict=True)
                ]
                nbytes = len(value.llama_state)  # of which the tensors are views
                self._stored.keep(nbytes, lambda: lambda vua: vua.put(held[:length], data))
        except (VUAError, OSError) as problem:
            self._warn("a state is not stored: %s", problem)

    # -- inside -------------------------------------------------------------------------------

    def _usable(self) -> VUA | None:
        return self._stored.usable() if self._may() else None

    def _may(self) -> bool:
        llm = self._llm()
        reason = "" if llm is None else refusal(llm)
        if _asking() not in {None, llm}:
            reason = "this cache was made for another Llama; make one for each"
        if reason:
            self._warn("nothing is loaded or saved: %s", reason)
        return llm is not None and not reason

    def _note_prefill(self) -> None:
        """Note what llama.cpp says of the prompt that was asked for last: its end was computed."""
        (asked, tokens, seconds), llm = self._asked, self._llm()
        if llm is not None:
            self._asked = 0, *_prefilled(llm)
            computed = self._asked[1] - tokens
            if computed <= asked and self._asked[2] > seconds:
                attended = computed * (asked - computed / 2)
                self._prefill.measured(computed, attended, self._asked[2] - seconds)

    def _check_is_live(self, state: State, length: int) -> None:
        """Raise ConfigError if a state that a program stores is not what the `Llama` holds now."""
        llm = self._llm()
        if llm is None:
            raise ConfigError("its Llama is gone")
        live = parse(bytearray(llm.save_state().llama_state))
        for given, held in zip([*state.k, *state.v], [*live.k, *live.v], strict=True):
            if not np.array_equal(given[:length], held[:length]):
                raise ConfigError("the state is not what the cache's Llama holds now")

    def _save_abandoned(self, llm: Any) -> None:
        """Store what a `Llama` has computed for a stream that its caller did not read to the end.

        `Llama` itself hands over its state only after the last token.
        """
        if _is_closed(llm):
            return
        computed = llm.input_ids[: llm.n_tokens].tolist()
        seen, self._seen = self._seen, computed
        if len(computed) >= self._config.split_factor and computed != seen[: len(computed)]:
            try:
                self[computed] = llm.save_state()
            except RuntimeError as problem:  # llama.cpp's
                self._warn("what an abandoned stream computed is not stored: %s", problem)

    def _warn(self, text: str, problem: object) -> None:
        kind = re.sub(r"\d+", "", text % problem)
        log.log(logging.DEBUG if kind in self._said else logging.WARNING, text, problem)
        self._said.add(kind)

    def _fits(self, found: ClosestKV) -> bool:
        form, tokens = self._form, found.num_tokens
        expected = [(1, 1, tokens, form.k_dim), (1, 1, tokens, form.v_dim)] * form.layers
        stored = [tuple(one.shape) for pair in found.data for one in pair]
        types = {one.dtype for pair in found.data for one in pair}
        if stored == expected and types == {DTYPES[form.dtype]}:
            return True
        self._warn("what is stored of %s does not fit it, a miss", self._described.others.name)
        return False


def _opened(
    config: VUAConfig, path: Any, prefill: PrefillSpeed, speed: str, identity: Identity
) -> VUA:
    vua = VUA(config, path, identity=identity)
    vua.savings = Savings(prefill)
    vua.savings.keep_at(path, f"{identity.namespace} {speed}", config.security)
    return vua


def _speed_of(llm: Any) -> str:
    settings = [int(getattr(llm.context_params, name, 0)) for name in _SPEED]
    return f"{devices()} {llm.model_params.n_gpu_layers} {settings}"


def _prefilled(llm: Any) -> tuple[int, float]:
    """Return how many tokens of prompts llama.cpp has computed, and the seconds that took."""
    if _is_closed(llm):
        return 0, 0.0
    timed = llama_cpp.llama_perf_context(llm.ctx)
    return timed.n_p_eval, timed.t_p_eval_ms / 1000


def _is_closed(llm: Any) -> bool:
    return llm._ctx.ctx is None  # noqa: SLF001 - there is no public way to ask


def _asking() -> Any:
    """Return the `Llama` that uses its cache; None if a program does so by itself.

    `Llama` does not say who it is: its method is found on the stack.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - inspect's own way
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first == ("self",) and isinstance(found := frame.f_locals.get("self"), llama_cpp.Llama):
            return found
        frame = frame.f_back
    return None


def _words(rows: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return ``[1, 1, tokens, dim]`` as ``[tokens, dim]`` of unsigned words, the same bytes."""
    word = {2: torch.uint16, 4: torch.uint32}[rows.itemsize]
    found: np.ndarray[Any, Any] = rows[0, 0].view(word).numpy()
    return found
