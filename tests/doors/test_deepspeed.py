"""DeepSpeed's JSON: batch sizes, accumulation, stages, offload, optimizers; numbers are those of a plain loop."""

from __future__ import annotations

import json
import re
from unittest import mock

import pytest
import torch

from shoal import UserError, initialize_engine
from shoal.comm import World
from shoal.doors import _settings
from shoal.doors.deepspeed import batch_sizes
from tests.doors.loops import Net, Normed, assert_alike, by_torch, through_the_door
from tests.pool import run_ranks

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}}


def config(**more) -> dict:
    return {"train_micro_batch_size_per_gpu": 8, "optimizer": ADAMW, "gradient_clipping": 0, **more}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.1)


CPU = {"device": "cpu"}
STAGES = {
    "0": {"stage": 0},
    "1": {"stage": 1, "reduce_bucket_size": 10},
    "2": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "3": {"stage": 3, "stage3_prefetch_bucket_size": 10},
    "2-offload": {"stage": 2, "offload_optimizer": {**CPU, "pin_memory": True}},
    "3-offload": {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
}


@pytest.mark.parametrize(("ranks", "hosts"), [(1, False), (2, False), (2, True)], ids=["alone", "host", "hosts"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_accumulates_to_the_numbers_of_a_plain_loop(stage, ranks, hosts):
    asked = config(zero_optimization=STAGES[stage], gradient_accumulation_steps=3, steps_per_print=100)
    seen = run_ranks(through_the_door, ranks, asked, 8, hosts)
    expected = by_torch(seen[0]["before"], adamw, 8, ranks, 3)
    for mine in seen:
        assert_alike(mine, expected)


def in_small_chunks(world, asked) -> dict:
    with mock.patch("shoal.assembly.memory.chunk_bytes", lambda *_: 50_000):  # else by what the link was measured to do
        return through_the_door(
            world,
            asked,
            5,
            factory=Normed,
            after=lambda model, _: [chunk.slots[0].name for chunk in model.engine.parts.chunks],
        )


@pytest.mark.parametrize("stage", ["0", "2"])
def test_running_statistics_and_chunks_that_are_cut_anew(stage):
    seen = run_ranks(in_small_chunks, 2, config(zero_optimization=STAGES[stage], gradient_accumulation_steps=2))
    expected = by_torch(seen[0]["before"], adamw, 5, 2, 2, factory=Normed)
    for mine in seen:
        assert_alike(mine, expected, rtol=2e-4)
    assert float(seen[0]["after"]["outward.1.num_batches_tracked"]) == 20
    assert seen[0]["more"][0] == ("outward.2.bias" if stage == "0" else "inward.bias"), (
        "recorded order, or expected order"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_clipping_is_by_norm_and_one_by_default(ranks):
    for given, limit in (({"gradient_clipping": 0.05}, 0.05), ({}, 1.0)):
        asked = {"train_batch_size": 8 * ranks, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, **given}
        seen = run_ranks(through_the_door, ranks, asked, 8)[0]
        sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.5)  # noqa: E731
        clip = lambda parameters, limit=limit: torch.nn.utils.clip_grad_norm_(parameters, limit)  # noqa: E731
        assert_alike(seen, by_torch(seen["before"], sgd, 8, ranks, clip=clip))
        assert max(seen["norms"]) > limit, "it matters"


@pytest.mark.parametrize("precision", ["bf16", "bfloat16", "fp16"])
def test_low_precisions_stay_near_fp32(precision):
    scale = {"initial_scale_power": 8} if precision == "fp16" else {}  # no step is skipped
    seen = run_ranks(through_the_door, 2, config(**{precision: {"enabled": True, **scale}}), 12)[0]
    expected = by_torch(seen["before"], adamw, 12, 2)
    assert seen["losses"] == pytest.approx(expected["losses"], rel=0.03) and seen["losses"] != expected["losses"]


@pytest.mark.parametrize(
    ("table", "plain"),
    [
        ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.3}},
         lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.3)),
        ({"type": "Adam", "params": {"lr": 1e-2, "weight_decay": 0.3, "adam_w_mode": False}},
         lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.3)),
        ({"type": "AdamW", "params": {"lr": 1e-2}}, lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0)),
        ({"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}, lambda ps: torch.optim.AdamW(ps, lr=1e-2)),
        ({"type": "Adagrad", "params": {"lr": 1e-2}}, lambda ps: torch.optim.Adagrad(ps, lr=1e-2)),
        ({"type": "RMSprop", "params": {"lr": 1e-3}}, lambda ps: torch.optim.RMSprop(ps, lr=1e-3)),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)),
    ],
)  # fmt: skip
def test_optimizers_are_deepspeeds(table, plain):
    seen = run_ranks(through_the_door, 2, config(optimizer=table, zero_optimization={"stage": 2}), 6)[0]
    assert_alike(seen, by_torch(seen["before"], plain, 6, 2), rtol=1e-4)


def test_optimizer_state_on_nvme(tmp_path):
    on = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    seen = run_ranks(through_the_door, 2, config(zero_optimization=on), 6)[0]
    assert_alike(seen, by_torch(seen["before"], adamw, 6, 2), rtol=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0", "rank-1"] and list(
        tmp_path.glob("rank-0/generation.*")
    )
    with pytest.raises(UserError, match="needs nvme_path, a directory"):
        initialize_engine(
            Net,
            0,
            config(zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme"}}),
            world=World.single(device="cpu"),
        )


def test_a_json_file_serves_as_well(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config(zero_optimization={"stage": 1})))
    (from_file,), (from_dict,) = (
        run_ranks(through_the_door, 1, asked, 3) for asked in (str(path), config(zero_optimization={"stage": 1}))
    )
    assert from_file["losses"] == from_dict["losses"]
    path.write_text("[1]")
    with pytest.raises(UserError, match="is a JSON list, not an object"):
        initialize_engine(Net, 0, path, world=World.single(device="cpu"))


@pytest.mark.fast
@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((48, 4, None), (48, 4, 6)),
        ((48, None, 3), (48, 8, 3)),
        ((None, 4, 6), (48, 4, 6)),
        ((48, None, None), (48, 24, 1)),
        ((None, 4, None), (8, 4, 1)),
        ((48, 4, 6), (48, 4, 6)),
    ],
)
def test_two_batch_sizes_give_the_third(given, sizes):
    assert batch_sizes(_named(given), 2) == sizes


def _named(given) -> dict:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {name: value for name, value in zip(names, given, strict=True) if value is not None}


@pytest.mark.fast
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (48, 4, 5),
            "train_batch_size = 48, train_micro_batch_size_per_gpu = 4, gradient_accumulation_steps = 5 on 2 rank(s) "
            "do not fit: train_batch_size is train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks. "
            "Give train_batch_size = 40, or leave it out",
        ),
        ((50, 4, None), "Give a multiple of 8 as train_batch_size, such as 48"),
        ((7, None, None), "Give a multiple of 2 as train_batch_size, such as 6"),
        ((7, None, 3), "Give a multiple of 6 as train_batch_size, such as 6"),
        ((3, 8, None), "Give a multiple of 16 as train_batch_size, such as 16"),
        ((None, None, 3), "gives neither train_batch_size nor train_micro_batch_size_per_gpu"),
        ((0, None, None), "train_batch_size = 0: give a whole number of at least 1"),
        ((True, None, None), "train_batch_size = True: give a whole number"),
    ],
)
def test_batch_sizes_that_contradict_each_other_are_one_error(given, message):
    with pytest.raises(UserError) as error:
        batch_sizes(_named(given), 2)
    assert message in str(error.value)
    if (remedy := re.search(r"such as (\d+)|train_batch_size = (\d+), or leave", str(error.value))) is not None:
        train = int(remedy[1] or remedy[2])
        assert batch_sizes(_named((train, *given[1:])), 2)[0] == train


@pytest.mark.fast
@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"zero_optimization": {"stag": 1}}, 'has no key "zero_optimization.stag". Did you mean "stage"?'),
        ({"gradient_cliping": 1}, 'has no key "gradient_cliping". Did you mean "gradient_clipping"?'),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage = 4: give 0, 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
            'offload_param.device = "nvme": weights are at home on the host',
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "gpu"}}},
            "offload_optimizer.device = 'gpu': give \"cpu\"",
        ),
        ({"zero_optimization": {"stage": 2, "offload_param": CPU}}, "offload_param needs stage 3, this is 2"),
        ({"zero_optimization": {"offload_optimizer": CPU}}, "offload_optimizer needs stage 1, 2 or 3"),
        (
            {"zero_optimization": {"stage": 2, "zero_quantized_gradients": True}},
            "zero_quantized_gradients = True is refused: it is lossy",
        ),
        ({"zero_optimization": True}, "zero_optimization = True: this key of DeepSpeed's configuration is a table"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled contradict"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, 'optimizer.type = "Lamb" is refused: torch has none'),
        ({"optimizer": {"type": "Muon", "params": {}}}, "give shoal.Engine a factory of an optimizer that is both"),
        ({"optimizer": {"type": "OneBitAdam"}}, 'give shoal.Engine Plan(exchange="qadam")'),
        ({"optimizer": {"type": "AdmaW"}}, 'optimizer.type = "AdmaW" is not one of'),
        ({"optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, 'Adam has no parameter "learning_rate"'),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "max_grad_norm: give gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "bias_correction = False is refused"),
        ({"optimizer": {}}, "the configuration names no optimizer"),
        (
            {
                "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto"}},
                "gradient_clipping": "auto",
                "bf16": {"enabled": "auto"},
            },
            "for gradient_clipping (its max_grad_norm); optimizer.params.lr (its learning_rate); "
            "optimizer.params.betas (its [adam_beta1, adam_beta2]); "
            "bf16.enabled (its bf16)",
        ),
        (
            {"train_micro_batch_size_per_gpu": "auto"},
            "train_micro_batch_size_per_gpu (its per_device_train_batch_size)",
        ),
        ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage = "auto": only the Trainer'),
        ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "is refused by torch: "),
        ({"optimizer": [1]}, "optimizer = [1]: this key of DeepSpeed's configuration is a table"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 10**400}}}, "is refused by torch: OverflowError"),
        ({"tensorboard": {"enabled": True}}, "tensorboard = {'enabled': True} is refused: use `shoal train`"),
        ({"communication_data_type": "fp16"}, "communication_data_type = 'fp16' is refused: it is lossy"),
    ],
)
def test_wrong_configurations_are_refused_by_name(more, message):
    with pytest.raises(UserError) as error:
        initialize_engine(Net, 0, config(**more), world=World.single(device="cpu"))
    assert message in str(error.value)


@pytest.mark.fast
def test_values_auto_that_the_file_itself_defines_are_filled_in():
    given = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 2, "total_num_steps": 8},
        },
    }
    written = {
        **given,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {**given["scheduler"]["params"], "warmup_min_lr": 0, "warmup_max_lr": 3e-3},
        },
    }
    found = []
    for each in (given, written):
        settings = _settings(config(**each), World.single("cpu"))
        assert (settings.engine["global_batch"], settings.engine["microbatch"], settings.plan["zero"]) == (8, 2, 3)
        schedule = settings.schedule(settings.optimizer([torch.nn.Parameter(torch.ones(1))]))
        found.append([schedule.get_last_lr()[0] for _ in range(8) if schedule.step() is None])
    assert found[0] == found[1] and max(found[0]) == 3e-3


@pytest.mark.fast
def test_refused_keys_may_be_switched_off():
    off = {
        "tensorboard": {"enabled": False},
        "communication_data_type": "fp32",
        "zero_optimization": {"zero_hpz_partition_size": 1, "mics_shard_size": -1, "zero_quantized_weights": False},
        "flops_profiler": {},
        "amp": None,
    }
    initialize_engine(Net, 0, config(**off), world=World.single(device="cpu"))[0].close()
