"""Which fields of vLLM's configuration count, and at which values they add nothing.

Everything not listed in `EXCLUDED` (``excluded.json``, each with its reason) counts, including
fields that a new release adds: an unknown field costs hits, never a wrong hit. A field of `NEUTRAL`
counts too, unless it has one of the values listed there, with which the engine computes the usual
result; these are not read from the classes, whose defaults may change.
`tests/unit/vllm/test_vllm_fields.py` walks all fields of the releases that VUA knows and fails for
one that is in neither list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from vua.format.excluded import tables_of

ADAPTER_CLASSES: Final = frozenset({"LoRAConfig"})
"""Their fields count for requests with an adapter."""
MEDIA_CLASSES: Final = frozenset({"MultiModalConfig"})
"""Their fields count from a prompt's first image, sound or video on."""

EXCLUDED: Final[Mapping[str, Mapping[str, Sequence[str]]]] = tables_of("vua.vllm")["fields"]
"""Class, word for the reason, fields."""

NEUTRAL: Final[Mapping[str, Mapping[str, tuple[object, ...]]]] = {
    "AttentionConfig": {
        "disable_flashinfer_q_quantization": (False,),
        "indexer_kv_dtype": ("auto",),
        "indexer_sparse_logits": (False,),
        "trtllm_ragged_backend": ("trtllm-gen",),
        "use_fp4_indexer_cache": (False, None),
        "use_non_causal": (False,),
        "use_prefill_query_quantization": (False,),
    },
    "CacheConfig": {
        "kv_sharing_fast_prefill": (False,),
        "replayssm_buffer_len": (16,),
        "swa_bounded_replay": (True,),
        "use_replayssm": (False,),
    },
    "CompilationConfig": {
        "backend": ("", "eager", "inductor"),
        "inductor_passes": ({},),
    },
    "DiffusionConfig": {"canvas_length": (), "max_denoising_steps": ()},
    "KernelConfig": {
        "linear_backend": ("auto",),  # some quantise activations
        "linear_backend_per_quant": (None, {}),
        "moe_backend": ("auto",),
    },
    "LoRAConfig": {
        "enable_mixed_moe_lora_format": (False,),
        "enable_moe_shared_loras": (False,),
        "enable_tower_connector_lora": (False,),
        "lora_dtype": ("auto",),  # and the model's, see `vua.vllm.engine_identity`
        "target_modules": (None,),
    },
    "LoadConfig": {
        "ignore_patterns": (["original/**/*"], "original/**/*", []),
        "load_format": ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer"),
        "model_loader_extra_config": ({},),
        "safetensors_load_strategy": (None, "lazy", "eager", "prefetch"),
    },
    "MambaConfig": {
        "enable_stochastic_rounding": (False,),
        "stochastic_rounding_philox_rounds": (0,),
    },
    "ModelConfig": {
        "convert": ("auto", "none"),
        "dtype": (),  # except that of the KV cache, see `vua.vllm.engine_identity`
        "is_submodel_config": (False,),
        "model_class_overrides": ({},),
        "model_impl": ("auto", "vllm"),
        "model_weights": ("",),
        "quantization": (None,),
    },
    "MultiModalConfig": {
        "media_io_kwargs": ({},),
        "mm_encoder_attn_dtype": (None,),
        "mm_encoder_fp8_scale_path": (None,),
        "mm_encoder_only": (False,),
        "mm_processor_kwargs": (None, {}),
        "video_pruning_method": ("evs",),
        "video_pruning_rate": (None, 0),
    },
    "ParallelConfig": {
        "sd_worker_cls": ("auto", "vllm."),
        "worker_cls": ("auto", "vllm."),
        "worker_extension_cls": ("",),
    },
    "QuantSpec": {"activation": (None,), "weight": (None,)},
    "QuantizationConfigArgs": {
        "ignore": ([],),
        "linear": (None,),
        "moe": (None,),
        "targets": (None,),
    },
    "VllmConfig": {"additional_config": ({},)},
}
"""Class, field, values with which it adds nothing; a word that ends with a dot matches all that
begin with it."""

HOLDERS: Final[Mapping[str, str]] = {
    "AttentionConfig": "hisparse_config",
    "CompilationConfig": "dynamic_shapes_config pass_config",
    "KernelConfig": "ir_op_priority",
    "ModelConfig": "multimodal_config pooler_config quantization_config",
    "OffloadConfig": "prefetch uva",
    "ParallelConfig": "eplb_config fault_tolerance_config",
    "VllmConfig": "attention_config aux_output_config cache_config compilation_config "
    "device_config diffusion_config ec_manager_config ec_transfer_config engram_config "
    "kernel_config kv_events_config kv_transfer_config load_config logging_config lora_config "
    "mamba_config model_config observability_config offload_config parallel_config "
    "profiler_config reasoning_config scheduler_config speculative_config "
    "structured_outputs_config watchdog_config watermark_config weight_transfer_config",
}
"""Class, fields that hold another class's fields, or None and then add nothing."""
