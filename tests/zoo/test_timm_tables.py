"""Tables of timm's models that are not persistent, in low precision."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from shoal import Engine
from tests.zoo.entry import classes, images
from tests.zoo.vision import timm

SWIN = {"img_size": 32, "window_size": 2, "embed_dim": 24, "depths": (1, 2), "num_heads": (2, 4), "patch_size": 2}
BEIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
MODELS = {
    "swin_tiny_patch4_window7_224": SWIN,
    "swinv2_tiny_window8_256": SWIN,
    "beit_base_patch16_224": BEIT,
    "eva02_tiny_patch14_224": BEIT,
}


def losses(name: str, precision: str) -> list[float]:
    torch.set_num_threads(1)
    model, sgd = partial(timm, name, **MODELS[name]), partial(torch.optim.SGD, lr=0.01)
    engine = Engine(model, classes, sgd, global_batch=4, microbatch=2, precision=precision)
    try:
        return [float(engine.step(batch).loss) for batch in engine.batches(images(32), steps=2)]
    finally:
        engine.close()


@pytest.mark.parametrize("name", MODELS)
def test_tables_follow_the_weights(name):
    """Masks and biases of zeros in fp32 widened what the next product has bf16 weights for, which torch refuses."""
    assert losses(name, "bf16") == pytest.approx(losses(name, "fp32"), rel=2e-2)
