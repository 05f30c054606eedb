"""Pack weights as MXFP4 by compressed-tensors; run by `test_quantisers.py`.

mxfp4_session.py WEIGHTS OUT        codes and scales of each weight of the safetensors file go to the file `OUT`
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file

weights, out = sys.argv[1:]
ARGUMENTS = QuantizationArgs(
    num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
)
SCHEME = QuantizationScheme(targets=["Linear"], weights=ARGUMENTS, format="mxfp4-pack-quantized")
compressor = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
seen = {}
for name, weight in load_file(weights).items():
    groups = weight.unflatten(1, (-1, 32))
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), ARGUMENTS)
    packed = compressor.compress({"weight": weight, "weight_scale": scale}, SCHEME)
    seen[name] = {"packed": packed["weight_packed"].tolist(), "scale": packed["weight_scale"].tolist()}
Path(out).write_text(json.dumps(seen))
