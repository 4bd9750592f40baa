"""What a loaded `Llama` is, in VUA's terms: whose states it may use, and in which form it has them.

Promises that two get one identity only if their K and V mean the same: the same GGUF files to the
byte, the same adapter, the same settings but for those known not to matter, the same version of
llama-cpp-python (which llama.cpp computes may change with it). An adapter that is set behind
`Llama`'s back goes unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import llama_cpp

from vua.errors import ConfigError
from vua.format.config_digest import config_digest
from vua.format.identity import Identity
from vua.llama_cpp.state import StateForm, parse
from vua.store.identified import Described
from vua.weights import checkpoint_files, identify_weights

__all__ = ["described_model", "identity_of", "refusal", "try_form"]

_FREE_SETTINGS: Final = frozenset(
    # how much is computed at once, and by what; how it is stored while it is computed
    "n_batch n_ubatch n_seq_max n_rs_seq n_outputs_max n_outputs_max_per_seq "  # noqa: SIM905
    "n_threads n_threads_batch flash_attn_type offload_kqv op_offload no_perf defrag_thold "
    "kv_unified "
    # a field of its own in the identity; what comes out behind the last layer
    "type_k type_v pooling_type embeddings n_samplers".split()
)
"""Fields of llama.cpp's context parameters that K and V do not depend on. All others count."""


def identity_of(llm: Any, *, chunk_tokens: int = 64, epoch: str = "") -> Identity:  # noqa: ANN401
    """Return whose states a `Llama` has.

    Reads its files, as `vua.weights.identify_weights` does; computes a token, for which it forgets
    what it had computed before.

    Raises:
        ConfigError: its states cannot be stored, or the files change.
        OSError: a file cannot be read.
    """
    described = described_model(llm, try_form(llm), chunk_tokens=chunk_tokens, epoch=epoch)
    return described.identity(identify_weights(described.files))


def described_model(
    llm: Any,  # noqa: ANN401
    form: StateForm,
    *,
    chunk_tokens: int,
    epoch: str,
) -> Described:
    """Return what `identity_of` returns but for the weights; raises the same."""
    settings = {
        name: value
        for name, *_ in llm.context_params._fields_
        if isinstance(value := getattr(llm.context_params, name), bool | int | float)
        and name not in _FREE_SETTINGS
    }
    if not any(".rope.scaling." in name for name in llm.metadata):
        del settings["n_ctx"]  # otherwise rotary frequencies may be chosen by it
    files = checkpoint_files(llm.model_path)
    if llm.lora_path:
        files.append(Path(llm.lora_path))
    said = {
        "vua_stored_by": f"llama-cpp-python {llama_cpp.__version__}",
        "settings": settings,
        "kv_overrides": sorted(
            (name, repr(value)) for name, value in (llm.kv_overrides or {}).items()
        ),
        "lora": [Path(llm.lora_path).name, repr(llm.lora_scale)] if llm.lora_path else [],
        "arch": form.arch.decode(errors="replace"),
    }
    others = Identity(
        model=config_digest(said),
        kv_dtype=form.dtype,
        epoch=epoch,
        chunk_tokens=chunk_tokens,
        name=Path(llm.model_path).stem,
    )
    return Described(files, others)


def refusal(llm: Any) -> str:  # noqa: ANN401
    """Return why nothing of this `Llama` may be stored or loaded as it is now; "" where it may."""
    if llm.chat_handler is not None:
        return "a chat handler may put images into a prompt, which its tokens do not show"
    if llm._logits_all:  # noqa: SLF001 - the argument is not public
        return "logits_all and draft models want the scores of all tokens, which are not stored"
    return ""


def try_form(llm: Any) -> StateForm:  # noqa: ANN401
    """Compute one token and return the form that states have.

    Raises ConfigError where they cannot be stored.
    """
    kind = f"states of {Path(llm.model_path).name} cannot be stored"
    reason = refusal(llm)
    if not reason and any(_asked(ask, llm) for ask in _STATEFUL):
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


_STATEFUL: Final = ("llama_model_is_recurrent", "llama_model_is_hybrid")


def _asked(question: str, llm: Any) -> bool:  # noqa: ANN401
    """Ask llama.cpp about a model; False where it does not know the question."""
    ask: Callable[[Any], bool] | None = getattr(llama_cpp, question, None)
    return ask is not None and bool(ask(llm.model))
