"""Models of transformers that keep something in a dtype of their own train in low precision as in one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from shoal import Engine, Plan, UserError
from shoal.comm.simulation import simulate_world
from tests.zoo.entry import Microbatch, next_token, rows
from tests.zoo.language import causal, translation

SGD = partial(torch.optim.SGD, lr=0.05)
ROUTER = "encoder.block.1.layer.1.mlp.router.classifier.weight"
SEQUENCES = {"d_model": 16, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "vocab_size": 61}


def switch(router_dtype: str = "float32") -> nn.Module:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        num_heads=2, num_experts=3, dropout_rate=0.0, router_jitter_noise=0.0, router_dtype=router_dtype, **SEQUENCES,
    )  # fmt: skip
    return SwitchTransformersForConditionalGeneration(config)


def nllb() -> nn.Module:
    from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

    names = "dropout attention_dropout activation_dropout moe_token_dropout encoder_layerdrop decoder_layerdrop"
    sides = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = NllbMoeConfig(
        encoder_ffn_dim=24, decoder_ffn_dim=24, num_experts=3, max_position_embeddings=32, bos_token_id=1,
        encoder_sparse_step=2, decoder_sparse_step=2, **sides, **dict.fromkeys(names.split(), 0.0), **SEQUENCES,
    )  # fmt: skip
    return NllbMoeForConditionalGeneration(config)


xglm = partial(causal, "xglm", vocab_size=61, d_model=16, num_layers=2, attention_heads=2, ffn_dim=24, dropout=0.0,
               attention_dropout=0.0, layerdrop=0.0, max_position_embeddings=32)  # fmt: skip
MODELS = {"switch": (switch, translation), "nllb": (nllb, translation), "xglm": (xglm, next_token)}


def made(world, name: str, precision: str, factory=None, **plan) -> Engine:
    torch.set_num_threads(1)
    how = {"global_batch": 4, "microbatch": 2, "precision": precision, "world": world}
    return Engine(factory or MODELS[name][0], MODELS[name][1], SGD, Plan(**plan), **how)


def losses(world, name: str, precision: str = "bf16", factory=None, **plan) -> list[float]:
    engine = made(world, name, precision, factory, **plan)
    try:
        return [engine.step(batch).loss for batch in engine.batches(rows(), steps=2)]
    finally:
        engine.close()


def plain(world, name: str) -> list[float]:
    """Losses of a loop by hand, whose optimizer keeps fp32 masters, from the weights that Shoal gives the model."""
    engine = made(world, name, "fp32")
    given = {each: value.detach().clone() for each, value in engine.module.state_dict().items()}
    module = MODELS[name][0]()
    module.load_state_dict(given)
    module = module.bfloat16().train()
    masters = {each: given[each].clone() for each, _ in module.named_parameters()}
    found = []
    for batch in engine.batches(rows(), steps=2):
        for each, value in module.named_parameters():
            value.data = masters[each].clone() if "router" in each else masters[each].bfloat16()
        module.zero_grad()
        sums = [one_microbatch(module, MODELS[name][1], batch.load(batch.ids[at : at + 2])) for at in (0, 2)]
        total, count = (sum(each) for each in zip(*sums, strict=True))
        for each, value in module.named_parameters():
            if value.grad is not None:
                masters[each] -= 0.05 * value.grad.float() / count
        found.append(float(total / count))
    engine.close()
    return found


def one_microbatch(module: nn.Module, loss, microbatch: Microbatch):
    def in_fp32(**inputs):
        output = module(**inputs)
        output.logits = output.logits.float()
        return output

    total, count = loss(in_fp32, microbatch)
    total.backward()
    return total.detach(), count


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_low_precision_is_one_of_one_process(name):
    """Switch was refused, the others ended in an error of torch's layer norm: its input was fp32, its weight bf16."""
    (one,) = simulate_world(1, losses, name)
    (by_hand,) = simulate_world(1, plain, name)
    assert one[0] == pytest.approx(by_hand[0], rel=1e-6)
    assert one == pytest.approx(by_hand, rel=5e-4), "gradients of a step are bf16 sums by hand"
    assert simulate_world(2, partial(losses, dp=2, zero=3), name)[0] == pytest.approx(one, rel=2e-4)


def routed(world) -> tuple[torch.dtype, torch.dtype]:
    engine = made(world, "switch", "bf16")
    parameters = dict(engine.module.named_parameters())
    engine.close()
    return parameters[ROUTER].dtype, parameters["shared.weight"].dtype


def test_routers_are_seen_in_the_dtype_that_they_compute_in():
    assert simulate_world(1, routed) == [(torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(
    ("precision", "dtype", "remedy"),
    [("fp64", "float32", 'take precision = "fp32"'), ("bf16", "float16", 'router_dtype = "float32"')],
)
def test_a_dtype_that_the_precision_lacks_is_refused(precision, dtype, remedy):
    """The remedies are what the tests above train, and those of fp32."""
    with pytest.raises(UserError, match=f"routers compute in torch.{dtype}.*{remedy}"):
        simulate_world(1, losses, "switch", precision, partial(switch, dtype))


def test_a_router_may_compute_in_the_dtype_of_the_model():
    (one,) = simulate_world(1, losses, "switch", "bf16", partial(switch, "bfloat16"))
    (wide,) = simulate_world(1, losses, "switch")
    assert one != wide and one == pytest.approx(wide, rel=0.05)
