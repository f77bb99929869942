"""The fate of each key of DeepSpeed's JSON (release 0.19)."""

from __future__ import annotations

from shoal.doors.config import HONOURED, NO_EFFECT, REFUSED, Key

_CHUNKS = "chunks take the place of DeepSpeed's buckets and flat buffers"
_MOVES = "chunks come and go by the recorded order of their uses"
_NVME = "pages are read, updated and written at once, in as many buffers as it takes"
_REPORTS = "a report, which changes nothing that is computed"
_OTHER = "another way to train, which this door does not have"
_LOSSY = "it is lossy: choose it by name, shoal.Engine with plan.exchange"
_NO_AUTOCAST = "precision has one meaning: low-precision weights over fp32 masters, see fp16 and bf16"
_LOW_MASTERS = 'it is lossy: choose it by name, shoal.Engine with precision = {name = "bf16", master = "kahan"}'
_DEPRECATED = "DeepSpeed has replaced it, by zero_optimization.offload_optimizer and offload_param"

KEYS = {
    "train_batch_size": Key(HONOURED, "samples of all ranks a step"),
    "train_micro_batch_size_per_gpu": Key(HONOURED, "samples a forward"),
    "gradient_accumulation_steps": Key(HONOURED, "forwards and backwards a step; its gradient is their mean"),
    "optimizer.type": Key(HONOURED, "Adam, AdamW, Adagrad, SGD, RMSprop and the others of torch.optim"),
    "optimizer.params": Key(HONOURED, '"Adam" is AdamW unless adam_w_mode = false, as in DeepSpeed'),
    "optimizer.legacy_fusion": Key(NO_EFFECT, _CHUNKS),
    "scheduler.type": Key(
        HONOURED, "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, by DeepSpeed's formulas"
    ),
    "scheduler.params": Key(HONOURED, "those of the schedule"),
    "gradient_clipping": Key(HONOURED, "largest norm; 1.0 by default, as in DeepSpeed since 0.19; 0 does not clip"),
    "fp16.enabled": Key(HONOURED, 'precision "fp16"'),
    "fp16.loss_scale": Key(HONOURED, "0 is a dynamic one"),
    "fp16.initial_scale_power": Key(HONOURED, "as in DeepSpeed"),
    "fp16.loss_scale_window": Key(HONOURED, "as in DeepSpeed"),
    "fp16.hysteresis": Key(HONOURED, "as in DeepSpeed"),
    "fp16.min_loss_scale": Key(HONOURED, "as in DeepSpeed"),
    "fp16.auto_cast": Key(NO_EFFECT, "the model's inputs are always cast"),
    "fp16.consecutive_hysteresis": Key(REFUSED, "the loss scale follows DeepSpeed's default rule"),
    "fp16.fp16_master_weights_and_grads": Key(REFUSED, _LOW_MASTERS),
    "bf16.enabled": Key(HONOURED, 'precision "bf16": fp32 masters, gradients reduced in fp32'),
    "bf16.immediate_grad_update": Key(NO_EFFECT, _CHUNKS),
    "bf16.check_grad_overflow": Key(
        NO_EFFECT, "a gradient that is not finite always stops the training, with its parameter's name"
    ),
    "bf16.bf16_master_weights_and_grads": Key(REFUSED, _LOW_MASTERS),
    "bf16.bf16_optimizer_states": Key(REFUSED, _LOW_MASTERS),
    "bfloat16.enabled": Key(HONOURED, "an older name of bf16"),
    "zero_optimization.stage": Key(HONOURED, "plan.zero"),
    "zero_optimization.offload_optimizer.device": Key(
        HONOURED, '"cpu": plan.memory without a limit of the device; "nvme": and its disk'
    ),
    "zero_optimization.offload_optimizer.ratio": Key(
        NO_EFFECT, "all of the optimizer's state has its home on the host"
    ),
    "zero_optimization.offload_optimizer.pin_memory": Key(NO_EFFECT, "beside a GPU it always is"),
    "zero_optimization.offload_optimizer.buffer_count": Key(NO_EFFECT, _NVME),
    "zero_optimization.offload_optimizer.nvme_path": Key(HONOURED, "plan.memory.disk.path"),
    "zero_optimization.offload_optimizer.pipeline_read": Key(NO_EFFECT, _NVME),
    "zero_optimization.offload_optimizer.pipeline_write": Key(NO_EFFECT, _NVME),
    "zero_optimization.offload_optimizer.fast_init": Key(NO_EFFECT, _NVME),
    "zero_optimization.offload_optimizer.super_offload": Key(NO_EFFECT, _MOVES),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Key(NO_EFFECT, "Adam on the host takes torch's threads"),
    "zero_optimization.offload_param.device": Key(
        HONOURED, '"cpu": plan.memory.device = "auto"; "nvme" is refused by name'
    ),
    "zero_optimization.offload_param.pin_memory": Key(NO_EFFECT, "beside a GPU it always is"),
    "zero_optimization.offload_param.buffer_count": Key(NO_EFFECT, _NVME),
    "zero_optimization.offload_param.buffer_size": Key(NO_EFFECT, _NVME),
    "zero_optimization.offload_param.max_in_cpu": Key(NO_EFFECT, _NVME),
    "zero_optimization.offload_param.nvme_path": Key(NO_EFFECT, _NVME),
    **{
        f"zero_optimization.{name}": Key(NO_EFFECT, _CHUNKS)
        for name in (
            "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "legacy_stage1", "overlap_comm",
            "parameter_alignment", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "sub_group_size",
            "use_multi_rank_bucket_allreduce",
        )
    },
    **{
        f"zero_optimization.{name}": Key(NO_EFFECT, _MOVES)
        for name in (
            "leaf_module", "memory_efficient_linear", "override_module_apply", "stage3_allgather_sequential",
            "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
            "stage3_use_all_reduce_for_fetch_params",
        )
    },
    "zero_optimization.compute_grad_norm": Key(NO_EFFECT, "the norm is always known"),
    "zero_optimization.enable_sanity_checks": Key(NO_EFFECT, _REPORTS),
    "zero_optimization.log_trace_cache_warnings": Key(NO_EFFECT, _REPORTS),
    "zero_optimization.ignore_unused_parameters": Key(NO_EFFECT, "parameters that a step did not use are left alone"),
    "zero_optimization.elastic_checkpoint": Key(NO_EFFECT, "every checkpoint loads under any plan"),
    "zero_optimization.load_from_fp32_weights": Key(NO_EFFECT, "every checkpoint holds fp32 masters"),
    "zero_optimization.pipeline_loading_checkpoint": Key(NO_EFFECT, "each rank reads its own part"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Key(
        NO_EFFECT, "`model.state_dict()` is always whole"
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Key(
        NO_EFFECT, "`model.state_dict()` is always whole"
    ),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Key(NO_EFFECT, _NVME),
    "zero_optimization.cpu_offload": Key(REFUSED, _DEPRECATED),
    "zero_optimization.cpu_offload_param": Key(REFUSED, _DEPRECATED),
    "zero_optimization.cpu_offload_use_pin_memory": Key(NO_EFFECT, "beside a GPU it always is"),
    "zero_optimization.mics_shard_size": Key(REFUSED, "give shoal.Engine Plan(zero=3, shard=...)", off=(-1,)),
    "zero_optimization.mics_hierarchical_params_gather": Key(REFUSED, "give shoal.Engine Plan(zero=3, shard=...)"),
    "zero_optimization.zero_hpz_partition_size": Key(REFUSED, "give shoal.Engine Plan(zero=3, shard=...)", off=(1,)),
    "zero_optimization.zero_quantized_weights": Key(REFUSED, _LOSSY),
    "zero_optimization.zero_quantized_nontrainable_weights": Key(REFUSED, _LOSSY),
    "zero_optimization.zero_quantized_gradients": Key(REFUSED, _LOSSY),
    "zero_optimization.zenflow": Key(
        REFUSED, "its updates are stale: choose that by name, shoal.Engine with plan.exchange"
    ),
    "communication_data_type": Key(REFUSED, _LOSSY, off=("fp32",)),
    "seq_parallel_communication_data_type": Key(NO_EFFECT, "there is no sequence parallel"),
    "data_types.grad_accum_dtype": Key(REFUSED, "gradients are accumulated and reduced in fp32", off=("fp32",)),
    "gradient_allreduce_op": Key(REFUSED, "gradients are averaged", off=("mean",)),
    "managed_gradient_accumulation": Key(REFUSED, "step() updates after gradient_accumulation_steps", off=(True,)),
    "prescale_gradients": Key(NO_EFFECT, "sums are fp32 and divided once, exactly"),
    "gradient_predivide_factor": Key(NO_EFFECT, "sums are fp32 and divided once, exactly"),
    "sparse_gradients": Key(NO_EFFECT, "gradients of embeddings with sparse=True always travel as rows"),
    "disable_allgather": Key(NO_EFFECT, _CHUNKS),
    "zero_allow_untested_optimizer": Key(NO_EFFECT, "optimizers are tried out when the engine is made"),
    "zero_force_ds_cpu_optimizer": Key(NO_EFFECT, "Adam on the host has a kernel of its own"),
    "dataloader_drop_last": Key(NO_EFFECT, "the loader is the caller's"),
    "disable_python_gc": Key(NO_EFFECT, "Python's collector is left alone"),
    "vocabulary_size": Key(NO_EFFECT, _REPORTS),
    "steps_per_print": Key(NO_EFFECT, _REPORTS),
    "wall_clock_breakdown": Key(NO_EFFECT, _REPORTS),
    "memory_breakdown": Key(NO_EFFECT, _REPORTS),
    "dump_state": Key(NO_EFFECT, _REPORTS),
    "log_level": Key(NO_EFFECT, _REPORTS),
    "aio": Key(NO_EFFECT, _NVME),
    "checkpoint": Key(NO_EFFECT, "every checkpoint loads under any plan, and all ranks write"),
    "activation_checkpointing": Key(NO_EFFECT, "it sets up functions of DeepSpeed's that the model would call"),
    "tensorboard": Key(REFUSED, "use `shoal train`, whose runs have it"),
    "wandb": Key(REFUSED, "use `shoal train`, whose runs have it"),
    "csv_monitor": Key(REFUSED, "use `shoal train`, whose runs have metrics.jsonl"),
    "comet": Key(REFUSED, "use `shoal train`, whose runs have metrics.jsonl"),
    "comms_logger": Key(REFUSED, "`model.engine.ledger` counts calls and bytes"),
    "flops_profiler": Key(REFUSED, "use `shoal train`, whose reports have it"),
    "amp": Key(REFUSED, _NO_AUTOCAST),
    "torch_autocast": Key(REFUSED, _NO_AUTOCAST),
    **{
        name: Key(REFUSED, _OTHER)
        for name in (
            "autotuning", "compile", "compression_training", "curriculum_learning", "data_efficiency", "eigenvalue",
            "elasticity", "hybrid_engine", "nebula", "pipeline", "progressive_layer_drop", "quantize_training",
            "sparse_attention", "tensor_parallel",
        )
    },
}  # fmt: skip
