"""Which fields of vLLM's configuration cannot change K and V: one table, each with its reason.

Everything not listed in `EXCLUDED` counts, including fields that a new release adds: an unknown
field costs hits, never a wrong hit. A field of `NEUTRAL` counts too, unless it has one of the
values listed there, with which the engine computes the usual result; these are not read from the
classes, whose defaults may change. `tests/unit/vllm/test_vllm_fields.py` walks all fields of the
releases that VUA knows and fails for one that is in neither list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vua.format.excluded import (
    CONTENT,
    ELSEWHERE,
    FILES,
    KERNEL,
    LOGITS,
    READ,
    SEEN,
    SPLIT,
    TEXT,
    WHEN,
    WHERE,
)

ADAPTER_CLASSES: Final = frozenset({"LoRAConfig"})
"""Their fields count for requests with an adapter."""
MEDIA_CLASSES: Final = frozenset({"MultiModalConfig"})
"""Their fields count from a prompt's first image, sound or video on."""

_MADE: Final = "made of what counts: the model's configuration and the fields listed beside it"
_GUESS: Final = (
    "which tokens are guessed; only verified ones are stored, and a draft's layers count separately"
)
_DIGESTED: Final = "whether prompts may have embeddings, which are digested"
_REFUSED: Final = "an engine that uses it is served uncached, see `vua.vllm.support`"

EXCLUDED: Final[Mapping[str, Mapping[str, str]]] = {
    "AttentionConfig": {
        KERNEL: "backend backend_per_kind flash_attn_version mla_prefill_backend "
        "flash_attn_max_num_splits_for_cuda_graph flex_attn_block_m flex_attn_block_n "
        "flex_attn_kv_block_size flex_attn_q_block_size minimax_m3_msa_decode_backend "
        "sparse_mla_force_mqa sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv "
        "tq_max_kv_splits_for_cuda_graph use_prefill_decode_attention use_trtllm_attention",
        SPLIT: "indexer_tp_shard_min_rows minimax_m3_indexer_cp",
    },
    "AuxOutputConfig": {SEEN: "enable_return_routed_experts max_bytes"},
    "BaseDummyOptions": {TEXT: "count"},
    "CacheConfig": {
        ELSEWHERE: "cache_dtype mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode",
        _REFUSED: "kv_cache_dtype_skip_layers",
        _MADE: "is_attention_free sliding_window use_kda_recoverssm",
        WHEN: "enable_prefix_caching prefix_match_unit prefix_cache_retention_interval "
        "enable_mamba_shared_prefix_checkpoint cache_hit_alignment_tokens",
        WHERE: "_block_size_resolved block_size user_specified_block_size hash_block_size "
        "effective_attention_block_size mamba_block_size user_specified_mamba_block_size "
        "mamba_page_size_padded skip_page_size_padded kv_cache_layout prefix_caching_hash_algo "
        "gpu_memory_utilization kv_cache_memory_bytes kv_cache_size_tokens "
        "kv_cache_max_concurrency num_cpu_blocks num_gpu_blocks num_gpu_blocks_override "
        "kv_offloading_backend kv_offloading_size simple_cpu_offload_num_blocks",
    },
    "CompilationConfig": {
        KERNEL: "mode custom_ops splitting_ops compile_sizes compile_ranges_endpoints "
        "compile_mm_encoder inductor_compile_config ir_enable_torch_wrap fast_moe_cold_start "
        "use_inductor_graph_partition enabled_custom_ops disabled_custom_ops cudagraph_mode "
        "cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_mm_encoder "
        "cudagraph_num_of_warmups cudagraph_specialize_lora max_cudagraph_capture_size "
        "encoder_cudagraph_max_frames_per_batch encoder_cudagraph_max_vision_items_per_batch "
        "encoder_cudagraph_token_budgets cudagraph_decoder_replay "
        "decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold",
        WHERE: "cache_dir local_cache_dir compile_cache_save_format debug_dump_path",
        SEEN: "compilation_time encoder_compilation_time traced_files",
        _MADE: "static_all_moe_layers static_forward_context",
    },
    "DeviceConfig": {KERNEL: "device device_type"},
    "DynamicShapesConfig": {KERNEL: "assume_32_bit_indexing evaluate_guards type"},
    "ECTransferConfig": {
        # an engine that receives images' embeddings caches no prompt with an image
        _REFUSED: "ec_connector ec_connector_extra_config ec_connector_module_path ec_role",
        WHERE: "ec_buffer_device ec_buffer_size ec_ip ec_port engine_id ec_parallel_size ec_rank "
        "mm_encoder_output_widths",
    },
    "EPLBConfig": {
        SPLIT: "communicator num_redundant_experts policy step_interval use_async window_size "
        "enable_migration_batching",
        SEEN: "log_balancedness log_balancedness_interval",
    },
    "EncoderCacheManagerConfig": {WHERE: "encoder_cache_manager_cls manager_config"},
    "EngramConfig": {
        WHERE: "cpu_offload dp_shared_memory use_thp",
        SPLIT: "embedding_across_dp",
    },
    "FaultToleranceConfig": {WHEN: "engine_recovery_timeout_sec"},
    "HiSparseConfig": {WHERE: "device_buffer_size eager_host_mirror"},
    "IrOpPriorityConfig": {KERNEL: "fused_add_rms_norm rms_norm gelu_and_mul_sparse"},
    "KVEventsConfig": {
        SEEN: "buffer_steps enable_kv_cache_events endpoint hwm max_queue_size publisher "
        "replay_endpoint topic"
    },
    "KVTransferConfig": {
        ELSEWHERE: "kv_connector_extra_config",
        WHERE: "enable_permute_local_kv engine_id kv_buffer_device kv_connector kv_role kv_port "
        "kv_connector_module_path kv_buffer_size kv_ip kv_parallel_size kv_rank",
        WHEN: "kv_load_failure_policy",
    },
    "KernelConfig": {
        KERNEL: "enable_flashinfer_autotune enable_bf16x3_router_gemm monokernel "
        "enable_rocm_segmented_attn_autotune sparse_indexer_topk_backend",
        WHEN: "enable_cutedsl_warmup enable_jit_warmup",
    },
    "LoRAConfig": {
        "a request names its adapter, and that is in its key": "default_mm_loras",
        "an adapter of a higher rank is refused, one of a lower rank padded with zeros": (
            "max_lora_rank"
        ),
        WHERE: "max_cpu_loras max_loras",
        SPLIT: "fully_sharded_loras",
        KERNEL: "specialize_active_lora",
        LOGITS: "max_lora_cls_labels",
    },
    "LoadConfig": {
        READ: "device download_dir pt_load_map_location safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads",
        SEEN: "use_tqdm_on_load",
    },
    "LoggingConfig": {SEEN: "configure_logging formatter log_level pylogging_config_file"},
    "MambaConfig": {KERNEL: "backend ssu_algorithm"},
    "ModelConfig": {
        ELSEWHERE: "hf_config hf_text_config max_model_len seed",
        # without a window the model's configuration has none either
        _MADE: "hf_overrides config_format runner disable_sliding_window "
        "spec_target_max_model_len word_embeddings_untied_by_checkpoint "
        "allow_deprecated_quantization",
        FILES: "model hf_config_path revision code_revision trust_remote_code hf_token",
        TEXT: "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init served_model_name "
        "renderer_num_workers io_processor_plugin allowed_local_media_path allowed_media_domains",
        LOGITS: "generation_config override_generation_config logits_processors logprobs_mode "
        "max_logprobs use_fp64_gumbel return_sampling_mask enable_trace_replay",
        SEEN: "enable_return_routed_experts",
        KERNEL: "enforce_eager disable_cascade_attn",
        _DIGESTED: "enable_prompt_embeds",
        _REFUSED: "enable_sleep_mode sleep_mode_backend "
        "sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
        WHERE: "enable_cumem_allocator enable_nccl_comm_suspend",
    },
    "MultiModalConfig": {
        CONTENT: "enable_mm_embeds allow_missing_mm_embeddings mm_device_do_normalize",
        TEXT: "interleave_mm_strings limit_per_prompt language_model_only",
        WHERE: "mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_tensor_ipc "
        "mm_shm_cache_max_object_size_mb mm_ipc_gpu_memory_gb skip_mm_profiling "
        "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        SPLIT: "mm_encoder_tp_mode",
        KERNEL: "mm_encoder_attn_backend",
    },
    "ObservabilityConfig": {
        SEEN: "collect_detailed_traces cudagraph_metrics enable_layerwise_nvtx_tracing "
        "enable_logging_iteration_details enable_mfu_metrics enable_mm_processor_stats "
        "jit_monitor_mode jit_monitor_verbose kv_cache_metrics kv_cache_metrics_sample "
        "otlp_traces_endpoint show_hidden_metrics_for_version custom_histogram_buckets "
        "per_request_spec_decode_metrics"
    },
    "OffloadConfig": {WHERE: "offload_backend"},
    "ParallelConfig": {
        _REFUSED: "decode_context_parallel_size prefill_context_parallel_size",
        SPLIT: "tensor_parallel_size pipeline_parallel_size data_parallel_size "
        "data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index "
        "rank world_size node_rank nnodes enable_expert_parallel enable_eplb is_moe_model "
        "expert_placement_strategy enable_hc_sp enable_batch_sharded_sampling "
        "cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend "
        "dcp_q_replicate _allow_auto_resolve_cp_interleave_size",
        READ: "max_parallel_loading_workers enable_ep_weight_filter",
        KERNEL: "all2all_backend disable_custom_all_reduce",
        WHEN: "dp_sync_interval enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold enable_fault_tolerance enable_elastic_ep "
        "elastic_ep_max_dp_size distributed_timeout_seconds cpu_distributed_timeout_seconds",
        WHERE: "_api_process_count _api_process_rank _coord_store_port "
        "_data_parallel_master_port_list assigned_physical_gpu_ids data_parallel_backend "
        "data_parallel_external_lb data_parallel_hybrid_lb data_parallel_master_ip "
        "data_parallel_master_port data_parallel_rpc_port disable_nccl_for_dp_synchronization "
        "distributed_executor_backend enable_shm_tensor_arena master_addr master_port numa_bind "
        "numa_bind_cpus numa_bind_nodes placement_group ray_runtime_env ray_workers_use_nsight",
    },
    "PassConfig": {
        KERNEL: "eliminate_noops enable_qk_norm_rope_fusion fi_allreduce_fusion_max_size_mb "
        "fuse_act_padding fuse_act_quant fuse_allreduce_rms fuse_attn_quant fuse_gemm_comms "
        "fuse_mla_dual_rms_norm fuse_norm_quant fuse_rope_kvcache fuse_rope_kvcache_cat_mla "
        "fuse_qk_norm_rope_kvcache rope_kvcache_fusion_max_token_num",
        SPLIT: "enable_sp sp_min_token_num",
    },
    "PoolerConfig": {
        LOGITS: "dimensions enable_chunked_processing logit_mean logit_sigma max_embed_len "
        "pooling_type returned_token_ids seq_pooling_type step_tag_id task tok_pooling_type "
        "use_activation enable_flash_late_interaction"
    },
    "PrefetchOffloadConfig": {
        WHERE: "offload_group_size offload_num_in_group offload_params offload_prefetch_step"
    },
    "ProfilerConfig": {
        SEEN: "active_iterations delay_iterations ignore_frontend max_iterations profiler "
        "torch_profiler_dir torch_profiler_dump_cuda_time_total torch_profiler_record_shapes "
        "torch_profiler_use_gzip torch_profiler_with_flops torch_profiler_with_memory "
        "torch_profiler_with_stack torch_profiler_activities wait_iterations warmup_iterations "
        "capture_torch_profiler detailed_trace_annotation proton_backend proton_context "
        "proton_data proton_hook proton_mode proton_output_format proton_profiler_dir "
        "proton_graph_attribution"
    },
    "ReasoningConfig": {
        LOGITS: "_enabled _reasoning_end_token_ids _reasoning_start_token_ids reasoning_end_str "
        "reasoning_parser reasoning_start_str _natural_reasoning_end_token_ids"
    },
    "SchedulerConfig": {
        ELSEWHERE: "disable_hybrid_kv_cache_manager",
        _MADE: "runner_type is_multimodal_model",
        WHEN: "async_scheduling disable_chunked_mm_input enable_chunked_prefill "
        "encoder_cache_size long_prefill_token_threshold long_prefill_token_threshold_adaptive "
        "max_num_active_seqs max_num_batched_tokens "
        "max_num_encoder_input_tokens max_num_queued_reqs "
        "max_num_queued_tokens max_num_scheduled_tokens max_num_seqs policy "
        "prefill_schedule_interval scheduler_cls scheduler_reserve_full_isl stream_interval "
        "watermark",
    },
    "SpeculativeConfig": {
        _GUESS: "attention_backend code_revision disable_eagle_block_drop "
        "disable_lookahead_block_hashes disable_padded_drafter_batch draft_lm_head_quantization "
        "draft_load_config draft_model_config draft_parallel_config draft_sample_method "
        "draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification enforce_eager "
        "fly_entropy_threshold fly_entropy_top_k fly_window_size index_share_for_mtp_iteration "
        "kv_cache_dtype max_model_len method model moe_backend num_speculative_tokens "
        "num_speculative_tokens_per_batch_size parallel_drafting prompt_lookup_max "
        "prompt_lookup_min quantization rejection_sample_method revision "
        "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor "
        "suffix_decoding_max_tree_depth suffix_decoding_min_token_prob "
        "synthetic_acceptance_length synthetic_acceptance_rates tensor_parallel_size "
        "use_heterogeneous_vocab use_local_argmax_reduction xpress_topc",
        "the engine's own configuration once more": "target_model_config target_parallel_config",
    },
    "StructuredOutputsConfig": {
        LOGITS: "backend disable_additional_properties disable_any_whitespace enable_in_reasoning "
        "reasoning_parser reasoning_parser_plugin"
    },
    "UVAOffloadConfig": {WHERE: "cpu_offload_gb cpu_offload_params"},
    "VllmConfig": {
        _MADE: "quant_config",
        KERNEL: "optimization_level",
        WHEN: "performance_mode shutdown_timeout",
        WHERE: "instance_id",
    },
    "WatchdogConfig": {SEEN: "check_interval dump_dir timeout"},
    "WatermarkConfig": {
        LOGITS: "algorithm allow_target_only_watermarking alpha context_width "
        "deduplicate_contexts deduplicate_contexts_max_history key prf"
    },
    "WeightTransferConfig": {
        "how a trainer sends weights; what it sends leaves the namespace": "backend"
    },
}
"""Class, reason, fields."""

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
