"""Compute logits of a checkpoint of Kimi K3 by the code that it was released with, which `llmcompressor` carries.

    python kimi_release_model_session.py FOLDER IDS OUT

FOLDER is a whole release, IDS a JSON list of token ids. OUT gets the names that the code's model lacks or has more, and
the `logits` in float32. The kernels of delta attention need a GPU, so their equations stand here in their place.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
import transformers.utils.generic as generic
from safetensors.torch import load_file
from torch import Tensor, nn

PREFIX = "language_model."
VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class ShortConvolution(nn.Conv1d):
    def __init__(self, hidden_size: int, kernel_size: int, activation: str):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=False)

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, None]:
        return F.silu(super().forward(F.pad(x.mT, (self.kernel_size[0] - 1, 0)))).mT, None


class FusedRMSNormGated(nn.Module):
    def __init__(self, size: int, eps: float, activation: str):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * gate.sigmoid()


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    **_: Any,
) -> tuple[Tensor, None]:
    rate = A_log.exp()[:, None] * (g.float() + dt_bias.view(g.shape[2:]))
    decay = (lower_bound * rate.sigmoid()).exp()
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q.float(), k.float()))
    q, beta, outputs = q * q.shape[-1] ** -0.5, beta.sigmoid(), []
    state = torch.zeros(*q.shape[::2], q.shape[-1], v.shape[-1])  # (batch, heads, d_k, d_v)
    for t in range(q.shape[1]):
        state = state * decay[:, t, ..., None]
        wrong = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], k[:, t], wrong)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1), None


def rearrange(x: Tensor, pattern: str, d: int | None = None) -> Tensor:
    return x.flatten(-2) if d is None else x.unflatten(-1, (-1, d))


def put_module(name: str, **content: Any) -> None:
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(content, __path__=[])


def read(folder: Path) -> dict[str, Tensor]:
    """Read the tensors in float32, and decode packed ones."""
    stored = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_packed"):
            codes = torch.stack((tensor % 16, tensor // 16), -1).flatten(1).long()
            scale = 2.0 ** (stored[name.replace("_packed", "_scale")].float() - 127)
            signs = torch.where(codes > 7, -1.0, 1.0)
            tensors[name.removesuffix("_packed")] = VALUES[codes % 8] * signs * scale.repeat_interleave(32, 1)
        elif not name.endswith("_scale"):
            tensors[name] = tensor.float()
    return tensors


def prepare_imports() -> None:
    """Let the released code be imported as `kimi_k3`, without the packages that it needs on a GPU."""
    (package,) = find_spec("llmcompressor").submodule_search_locations
    put_module("einops", rearrange=rearrange)
    for name in (
        "fla",
        "fla.ops",
        "fla.ops.utils",
        "llmcompressor",
        "llmcompressor.modeling",
        "llmcompressor.modeling.moe",
    ):
        put_module(name)
    put_module("fla.modules", FusedRMSNormGated=FusedRMSNormGated, ShortConvolution=ShortConvolution)
    put_module("fla.ops.kda", chunk_kda=chunk_kda, fused_recurrent_kda=None)
    put_module("fla.ops.utils.index", prepare_cu_seqlens_from_mask=None, prepare_lens_from_mask=None)
    put_module("fla.utils", tensor_cache=lambda function: function)
    put_module("llmcompressor.modeling.moe.context", get_calibrate_all_experts_flag=lambda: False)
    put_module("kimi_k3")
    sys.modules["kimi_k3"].__path__ = [f"{package}/modeling/kimi_k3"]
    if not hasattr(generic, "check_model_inputs"):  # removed in later releases of `transformers`
        generic.check_model_inputs = lambda function: function


def text_tensors(tensors: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Return the text model's tensors without prefix.

    The released files pad `A_log`, and the released class does not.
    """
    text = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    return text | {name: tensor.flatten()[:heads] for name, tensor in text.items() if name.endswith("A_log")}


def main(folder: Path, ids: str, out: Path) -> None:
    prepare_imports()
    from kimi_k3.configuration_kimi_k3 import KimiK3Config
    from kimi_k3.modeling_kimi_linear import KimiLinearForCausalLM

    config = KimiK3Config(**json.loads((folder / "config.json").read_text()))
    model = KimiLinearForCausalLM(config.text_config).float().eval()
    tensors = text_tensors(read(folder), config.text_config.linear_attn_config["num_heads"])
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        logits = model(torch.tensor([json.loads(ids)]), use_cache=False).logits[0]
    seen = {"missing": missing, "unexpected": unexpected, "logits": logits.tolist()}
    seen["quantization"] = config.quantization_config["format"] if hasattr(config, "quantization_config") else None
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
