"""Models written for one device: a GPT with presets, BERT, ResNet, LSTM, MLP, and any causal language model of
`transformers`.

Importing this does not import `transformers`; `shoal.models.hf` does where it is used.
"""

from shoal.models.bert import Bert, BertConfig, MaskedTokens
from shoal.models.chess import chess_evaluator, encode_fen
from shoal.models.generate import generate
from shoal.models.gpt import GPT, GPTConfig
from shoal.models.hf import export_hf, from_config
from shoal.models.losses import LOSSES, causal_lm, classification, find_loss, masked_lm, regression
from shoal.models.lstm import LSTM, LSTMConfig
from shoal.models.mlp import MLP
from shoal.models.moe import MoE, MoEConfig
from shoal.models.presets import PRESETS, count_parameters, flops_per_token
from shoal.models.pretrained import from_pretrained
from shoal.models.registry import ModelSpec, build
from shoal.models.resnet import ResNet, ResNetConfig

__all__ = [
    "GPT",
    "LOSSES",
    "LSTM",
    "MLP",
    "PRESETS",
    "Bert",
    "BertConfig",
    "GPTConfig",
    "LSTMConfig",
    "MaskedTokens",
    "MoE",
    "MoEConfig",
    "ModelSpec",
    "ResNet",
    "ResNetConfig",
    "build",
    "causal_lm",
    "chess_evaluator",
    "classification",
    "count_parameters",
    "encode_fen",
    "export_hf",
    "find_loss",
    "flops_per_token",
    "from_config",
    "from_pretrained",
    "generate",
    "masked_lm",
    "regression",
]
