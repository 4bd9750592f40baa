"""What an engine's K and V depend on beside weights and KV dtype, as one text config to digest.

The text config as vLLM resolved it, so that other engines with the same one share; and beside it,
under names that begin with "vua.", whatever of vLLM's configuration makes this engine compute
something else. An engine with nothing of that has the text config alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from vua.connector.cache_spec import EngineIdentity, UncachedError
from vua.errors import ConfigError
from vua.format.config_digest import config_digest
from vua.format.rope import varies_with_length
from vua.format.shared_config import unshared
from vua.vllm.environment import environment_that_counts
from vua.vllm.settings import Settings, settings_of
from vua.vllm.support import DRAFTS
from vua.weights.model_files import code_digest, processor_digest, quantization_digest

__all__ = ["engine_identity"]

_TOWERS: Final = ("audio_config", "vision_config")
"""Parts of a model's config that a prompt without images and sounds has nothing to do with."""

Folder = Callable[[str, str | None], Path]
"""Where the files of a model of a revision lie. Raises UncachedError, OSError."""


def engine_identity(
    vllm_config: Any,  # noqa: ANN401
    kv_dtype: torch.dtype,
    folder: Folder,
) -> EngineIdentity:
    """Return what counts of an engine whose KV cache has elements of ``kv_dtype``.

    Raises UncachedError, ConfigError: something cannot be told; OSError.
    """
    model = vllm_config.model_config
    settings = settings_of(vllm_config, kv_dtype)
    config = dict(model.hf_text_config.to_dict())
    if settings.always:
        config["vua.vllm"] = settings.always
    if model.hf_config is not model.hf_text_config:
        config["vua.whole"] = _whole(model)
    config |= environment_that_counts(vllm_config)
    if varies_with_length(config):  # vLLM chooses the frequencies once, by this length
        config["vua.vllm_max_model_len"] = model.max_model_len
    if (foreign := _foreign_class(model)) is not None:
        config["vua.class"] = foreign
    if model.trust_remote_code and (code := _code(model, folder)):
        config["vua.code"] = code
    if settings.always.get("LoadConfig.load_format") == "dummy":
        config["vua.random_weights"] = _random_weights(vllm_config)
    if (draft := _draft(vllm_config)) is not None:
        config["vua.draft"] = draft
    if model.quantization is not None:
        config["vua.quantization"] = quantization_digest(folder(model.model, model.revision))
    if unshared(config):  # transformers may compute something else
        config["vua.engine"] = ["vllm", model.architecture]
    media, refused = _media(vllm_config, settings, folder)
    adapters = config_digest(settings.adapters) if settings.adapters else ""
    return EngineIdentity(config, adapters, media, refused)


def _random_weights(vllm_config: Any) -> list[object]:  # noqa: ANN401
    """Return what random weights depend on beside a seed: each rank draws its own part itself."""
    import vllm
    from vllm.platforms import current_platform

    tp_size = vllm_config.parallel_config.tensor_parallel_size
    return [vllm.__version__, current_platform.device_type, tp_size]


def _draft(vllm_config: Any) -> list[str] | None:  # noqa: ANN401
    """Return what the layers of a draft depend on beside its weights; None: there are none."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method not in DRAFTS:
        return None
    draft = speculative.draft_model_config
    config = config_digest(draft.hf_config.to_dict())
    return [speculative.method, config, str(draft.dtype), str(draft.quantization)]


def _whole(model: Any) -> str:  # noqa: ANN401
    """Digest what a config with parts says beside the text's part, which counts by itself."""
    text = model.hf_text_config.model_type
    config = model.hf_config.to_dict()
    return config_digest(
        {
            key: value
            for key, value in config.items()
            if key not in _TOWERS
            and not (isinstance(value, Mapping) and value.get("model_type") == text)
        }
    )


def _foreign_class(model: Any) -> str | None:  # noqa: ANN401
    """Return the class that runs where it is not what vLLM itself has for this architecture."""
    from vllm.model_executor.models import registry

    used = registry.ModelRegistry.models.get(model.architecture)
    own = registry._VLLM_MODELS.get(model.architecture)  # noqa: SLF001 - there is no public list
    loaded = getattr(used, "model_cls", None)
    if loaded is not None:
        found = f"{loaded.__module__}:{loaded.__qualname__}"
    elif used is not None:
        found = f"{used.module_name}:{used.class_name}"
    else:
        found = str(model.architecture)
    if own is None:
        return found
    module = own[0] if own[0].startswith("vllm.") else f"vllm.model_executor.models.{own[0]}"
    return None if found == f"{module}:{own[1]}" else found


def _code(model: Any, folder: Folder) -> list[str]:  # noqa: ANN401
    """Return digests of the Python code that the model's own files bring."""
    configs = [model.hf_config.to_dict(), model.hf_text_config.to_dict()]
    maps = [each["auto_map"] for each in configs if isinstance(each.get("auto_map"), Mapping)]
    if not maps:
        return []
    classes = [str(each) for named in maps for each in named.values()]
    elsewhere = {name.split("--")[0] for name in classes if "--" in name}
    folders = [folder(name, model.code_revision) for name in sorted(elsewhere)]
    if any("--" not in name for name in classes):
        folders.append(folder(model.hf_config_path or model.model, model.revision))
    return [code_digest(each) for each in folders]


def _media(vllm_config: Any, settings: Settings, folder: Folder) -> tuple[str, str]:  # noqa: ANN401
    """Return what images' K and V depend on beside their content, or why they are not cached."""
    model = vllm_config.model_config
    multimodal = model.multimodal_config
    if multimodal is None:
        return "", "the model takes no images"
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    if transfer is not None and transfer.ec_connector is not None:
        return "", "prompts with images are not cached: another process computes their embeddings"
    if multimodal.mm_processor_cache_type == "shm" and multimodal.mm_processor_cache_gb > 0:
        return "", (
            'prompts with images are not cached: with mm_processor_cache_type="shm" their content '
            'does not reach the scheduler; use "lru"'
        )
    try:
        files = processor_digest(folder(model.model, model.revision))
        scales = multimodal.mm_encoder_fp8_scale_path
        return config_digest(
            {
                "config": config_digest(model.hf_config.to_dict()),
                "files": files,
                "settings": settings.media,
                "scales": Path(scales).read_text() if scales else None,
            }
        ), ""
    except (UncachedError, ConfigError, OSError, ValueError) as problem:
        return "", f"prompts with images are not cached: {problem}"
