"""PatrickStar's configuration, as it stands, and its loop: numbers are those of a plain loop."""

from __future__ import annotations

import pytest
import torch

from shoal import UserError, initialize_engine
from shoal.comm import World
from shoal.precision import Scaling
from tests.doors.loops import INPUTS, Net, assert_alike, by_torch, microbatch, through_the_door
from tests.pool import run_ranks
from tests.precision.test_scaling import by_deepspeed

VERBATIM = {
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0, "use_hybrid_adam": True},
    },
    "fp16": {
        "enabled": True,
        "loss_scale": 0,
        "initial_scale_power": 2**3,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "default_chunk_size": 64 * 1024 * 1024,
    "release_after_init": True,
    "use_cpu_embedding": False,
}


def without(*keys: str, **more) -> dict:
    return {key: value for key, value in VERBATIM.items() if key not in keys} | more


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-6)


@pytest.mark.parametrize(("ranks", "hosts"), [(1, False), (2, False), (2, True)], ids=["alone", "host", "hosts"])
def test_the_configuration_as_it_stands_trains(ranks, hosts):
    seen = run_ranks(through_the_door, ranks, VERBATIM, 60, hosts)
    for mine in seen:
        assert mine["losses"][-1] < 0.8 * mine["losses"][0]
        assert mine["losses"] == seen[0]["losses"] and set(mine["scales"]) == {256.0} and not any(mine["skipped"])
    plain = by_torch(seen[0]["before"], adam, 60, ranks)
    assert seen[0]["losses"] == pytest.approx(plain["losses"], rel=0.02), "fp16 is near fp32"


@pytest.mark.parametrize(("ranks", "hosts"), [(1, False), (2, False), (2, True)], ids=["alone", "host", "hosts"])
def test_in_fp32_the_numbers_are_those_of_a_plain_loop(ranks, hosts):
    seen = run_ranks(through_the_door, ranks, without("fp16", default_chunk_size=500), 12, hosts)
    expected = by_torch(seen[0]["before"], adam, 12, ranks)
    for mine in seen:
        assert_alike(mine, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradient_clipping_clamps_elements(ranks):
    limit = 2e-3
    seen = run_ranks(through_the_door, ranks, without("fp16", gradient_clipping=limit), 12)[0]
    clamped = by_torch(seen["before"], adam, 12, ranks, clip=lambda ps: torch.nn.utils.clip_grad_value_(ps, limit))
    assert_alike(seen, clamped)
    free = by_torch(seen["before"], adam, 12, ranks)
    assert abs(free["losses"][-1] / seen["losses"][-1] - 1) > 1e-4, "it matters"


def by_torch_in_fp16(before, steps: int, ranks: int, scales: list[float]) -> tuple[list[float], list[bool]]:
    """A plain loop with fp16 weights over fp32 masters, scaled by `scales`; what it lost at each step, and which
    overflowed."""
    master, model = Net(), Net().half()
    master.load_state_dict(before)
    optimizer, losses, overflows = adam(master.parameters()), [], []
    for step in range(steps):
        with torch.no_grad():
            for low, high in zip(model.parameters(), master.parameters(), strict=True):
                low.copy_(high)
        optimizer.zero_grad()
        parts = []
        for rank in range(ranks):
            model.zero_grad()
            loss = model({key: value.half() for key, value in microbatch(step, rank, 0).items()}).float()
            (loss * scales[step]).backward()
            parts.append(loss.detach())
            for low, high in zip(model.parameters(), master.parameters(), strict=True):
                part = low.grad.float() / scales[step] / ranks
                high.grad = part if high.grad is None else high.grad + part
        overflows.append(not all(bool(high.grad.isfinite().all()) for high in master.parameters()))
        losses.append(float(torch.stack(parts).mean()))
        if not overflows[-1]:
            optimizer.step()
    return losses, overflows


@pytest.mark.parametrize("ranks", [1, 2])
def test_scales_and_skipped_steps_are_deepspeeds(ranks):
    scaling = {"initial_scale_power": 20, "hysteresis": 3, "loss_scale_window": 5, "min_loss_scale": 1}
    config = without(fp16={"enabled": True, "loss_scale": 0, **scaling})
    seen = run_ranks(through_the_door, ranks, config, 25)[0]
    losses, overflows = by_torch_in_fp16(seen["before"], 25, ranks, seen["scales"])
    assert seen["skipped"] == overflows and 3 < sum(overflows) < 20
    assert seen["scales"] == [2.0**20, *by_deepspeed(overflows, Scaling(**scaling))][:25]
    assert seen["losses"] == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_weight_decay_is_that_of_the_named_optimizer(name):
    params = {"lr": 1e-2, "weight_decay": 0.1}
    (seen,) = run_ranks(through_the_door, 1, {"optimizer": {"type": name, "params": params}}, 8)
    kind = getattr(torch.optim, name)
    assert_alike(seen, by_torch(seen["before"], lambda parameters: kind(parameters, **params), 8))


def test_without_a_configuration_patrickstars_defaults_hold():
    (seen,) = run_ranks(through_the_door, 1, None, 5)
    assert_alike(seen, by_torch(seen["before"], lambda parameters: torch.optim.Adam(parameters, lr=0.01), 5))


def of_the_chunks(model, optimizer) -> tuple:
    return (
        [chunk.size for chunk in model.engine.parts.chunks],
        model.engine.plan.to_dict(),
        model.engine.optimizer._host is not None,
    )


def test_the_plan_is_chunk_memory_with_the_chunk_size_in_elements():
    sizes, plan, on_host = run_ranks(
        through_the_door, 1, without("fp16", default_chunk_size=700), 1, False, of_the_chunks
    )[0]["more"]
    assert plan == {"zero": 3, "memory": {}, "exchange": {"name": "allreduce", "chunk_bytes": 2800}}
    assert len(sizes) > 1 and all(size < 1500 for size in sizes) and on_host


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"defualt_chunk_size": 1}, 'has no key "defualt_chunk_size". Did you mean "default_chunk_size"?'),
        ({"zero_optimisation": {}}, 'has no key "zero_optimisation". Did you mean "zero_optimization"?'),
        (without(fp16={"enabled": True, "histeresis": 2}), 'has no key "fp16.histeresis". Did you mean "hysteresis"?'),
        ({"client": {"mem_tracer": {"use_fake_dist": True}}}, "client.mem_tracer.use_fake_dist = True is refused"),
        ({"client": {"mem_tracer": {"overall_gpu_mem_ratio": 2}}}, "overall_gpu_mem_ratio = 2: give a part"),
        ({"client": {"opts": 3}}, "client.opts = 3: this key of PatrickStar's configuration is a table"),
        ({"gradient_clipping": "1"}, "gradient_clipping = '1': give a number"),
        ({"default_chunk_size": 0}, "default_chunk_size = 0: give the number of elements"),
        (
            {"optimizer": {"type": "Adma"}},
            'optimizer.type = "Adma": PatrickStar has Adam and AdamW. Did you mean "Adam"?',
        ),
        (
            {"default_chunk_size": 1, "train_batch_size": 8},
            "default_chunk_size is a key of PatrickStar's configuration, train_batch_size",
        ),
        ("nowhere.json", "cannot read the configuration nowhere.json"),
    ],
)
def test_wrong_configurations_are_refused_by_name(config, message):
    with pytest.raises(UserError) as error:
        initialize_engine(Net, 0, config, world=World.single(device="cpu"))
    assert message in str(error.value)


def test_a_local_rank_that_contradicts_the_launcher_is_refused(monkeypatch):
    with pytest.raises(UserError, match="client: Shoal has none"):
        initialize_engine(Net, 0, {}, client=object(), world=World.single(device="cpu"))
    other = World.single(device="cpu")
    other.size, other.local_rank = 2, 1
    monkeypatch.setattr("shoal.doors.join", lambda: other)
    with pytest.raises(UserError, match="local_rank = 0, but the launcher says 1"):
        initialize_engine(Net, 0, {})


def test_alone_and_unlaunched_it_runs_as_one_rank():
    model, optimizer = initialize_engine(Net, 0, VERBATIM)
    loss = model({"x": torch.zeros(2, INPUTS), "y": torch.ones(2, 4)})
    model.backward(loss)
    optimizer.step()
    assert model.result.grad_norm > 0
    model.close()
