"""Compare sharded packed experts with those on one process: `torchrun ... kimi_k3_packed_session.py SOURCE FOLDER`.

SOURCE holds a release with packed experts. Saves and `results.json` go into FOLDER.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from attnres import AttnResKimiK3ForCausalLM

WAYS = {
    "FSDP2": {"fsdp_size": 2},
    "FSDP2 in 16 bits": {"fsdp_size": 2, "fsdp_mixed_precision": True},
    "EP beside FSDP2": {"fsdp_size": 2, "ep_size": 2},
}


def train(model: Any) -> dict[str, Tensor]:
    """Compute the loss of a batch; return it with the whole gradients."""
    ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    loss = model(ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return {"loss": loss.detach()} | whole


def held(model: Any) -> int:
    """Return the bytes of the experts that this process holds."""
    parts = [p for name, p in model.named_parameters() if ".experts." in name]
    assert {p.dtype for p in parts} == {torch.uint8}
    return sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parts)


def main() -> None:
    """Compare each way, and save the model."""
    source, folder = map(Path, sys.argv[1:3])
    options: dict[str, Any] = {"packed_experts": True, "dtype": torch.float32}
    whole = AttnResKimiK3ForCausalLM.from_pretrained(source, **options).train()
    expected, in_all = train(whole), held(whole)
    results = {}
    for name, way in WAYS.items():
        model = AttnResKimiK3ForCausalLM.from_pretrained(source, **options, distributed_config=DistributedConfig(**way))
        found = train(model.train())
        assert found.keys() == expected.keys()
        differences = [((found[k].float() - v).norm() / v.norm().clamp(min=1e-6)).item() for k, v in expected.items()]
        results[name] = {"difference": max(differences), "share": held(model) / in_all}
        model.save_pretrained(folder / name)
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
