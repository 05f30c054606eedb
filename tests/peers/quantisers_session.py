"""Quantise a checkpoint, and the retrofit of it, with packages of others; run by `test_quantisers.py`.

quantisers_session.py CHECKPOINT OUT        what was seen goes to the file `OUT`, by package
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from torch import Tensor
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, PreTrainedModel, TorchAoConfig

from attnres.configuration import load as load_configuration
from attnres.conversion import retrofit
from attnres.residual_attnres import residual_tensors

checkpoint, out = sys.argv[1:]
TOKEN_IDS = torch.randint(3, 512, (2, 40), generator=torch.Generator().manual_seed(0))


def load(folder: str, **settings) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **settings).eval()


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(TOKEN_IDS).logits


def distance(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


def in_their_dtype(model: PreTrainedModel) -> bool:
    """Whether the tensors of the residual connections are as they were."""
    return all(type(t) is torch.nn.Parameter and t.dtype is torch.float32 for t in residual_tensors(model).values())


exact = logits(load(checkpoint))


def torchao() -> dict:
    """Int8 weights, made when a checkpoint is loaded; saved, and loaded again."""
    retrofit(load(checkpoint), block_size=3).save_pretrained("retrofit")
    quantised = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig(version=2))}
    standard, model = load(checkpoint, **quantised), load("retrofit", **quantised)
    model.save_pretrained("saved")
    return {
        "from standard": distance(logits(model), logits(standard)),
        "from exact": distance(logits(model), exact),
        "kind": type(model.model.layers[0].mlp.up_proj.weight).__name__,
        "in their dtype": in_their_dtype(model),
        "saved, from itself": distance(logits(load("saved")), logits(model)),
    }


def torchao_with_gates() -> dict:
    """Int8 weights of tensors that the family adds and checks: gates of attention, in a retrofit and in Kimi K3."""
    quantised = {"quantization_config": TorchAoConfig(Int8WeightOnlyConfig(version=2))}
    gated = retrofit(load(checkpoint), block_size=3, attention_gate="sdpa")
    gated.save_pretrained("gated")
    released = AutoModelForCausalLM.from_config(load_configuration("attnres-k3-tiny", vocab_size=512)).eval()
    released.save_pretrained("kimi-k3")
    gated.model.layers[1].self_attn.g_proj.weight.data[3, 4] = float("nan")
    gated.save_pretrained("damaged")
    try:
        refused = load("damaged", **quantised) and ""
    except ValueError as error:
        refused = str(error)
    return {
        "gated": distance(logits(load("gated", **quantised)), logits(load("gated"))),
        "kimi-k3": distance(logits(load("kimi-k3", **quantised)), logits(released)),
        "damaged": refused,
    }


def compressed_tensors() -> dict:
    """A checkpoint of packed int8 weights, one scale for each row; converted as it is, file by file."""
    weights = QuantizationArgs(num_bits=8, type="int", strategy="channel", symmetric=True)
    groups = {"linear": QuantizationScheme(targets=["Linear"], weights=weights)}
    model = load(checkpoint)
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            module.weight_scale.data = module.weight.detach().abs().amax(1, keepdim=True) / 127
    compressor = ModelCompressor.from_pretrained_model(model, "pack-quantized")
    compressor.compress_model(model)
    model.save_pretrained("packed")
    compressor.update_config("packed")

    convert = [sys.executable, "-m", "attnres_cli", "convert", "packed", "packed-retrofit", "--block-size", "3"]
    subprocess.run(convert, check=True)
    standard, model = load("packed"), load("packed-retrofit")
    return {
        "from standard": distance(logits(model), logits(standard)),
        "from exact": distance(logits(model), exact),
        "kind": json.loads(Path("packed-retrofit", "config.json").read_text())["quantization_config"]["format"],
        "in their dtype": in_their_dtype(model),
    }


seen = {"torchao": torchao(), "with gates": torchao_with_gates(), "compressed-tensors": compressed_tensors()}
Path(out).write_text(json.dumps(seen))
