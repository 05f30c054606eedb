"""Compare every residual connection with the residual stream, on the same weights.

It measures a training step, its memory, and decoding. Attention residuals run by their kernels, and the other
connections by PyTorch's operations.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from .memory import step_bytes
from .models import DECODED, TOKENS
from .shapes import STANDARD, llama, token_ids
from .stored import cell, markdown_table
from .timing import Setting, compare, interleave
from .workloads import decoding, training_step

FORMS: dict[str, dict] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
COLUMNS = ("training step", "memory of the step", "decoding")


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per workload, with all connections as its ways."""
    config = llama(width=64, layers=2) if setting.quick else llama(width=512, layers=6)
    models, row = build(config, setting.device), {"model": "Llama"}
    pairs = {f"{name} / {STANDARD}": (name, STANDARD) for name in FORMS if name != STANDARD}
    ids = token_ids(config, 16 if setting.quick else TOKENS, 1, setting.device)
    steps = training_step(models, ids)
    peaks = {name: step_bytes(models[name], step, setting.device)["step"] for name, step in steps.items()}
    seconds = interleave(steps, setting)
    yield row | {"workload": "training step", "bytes": peaks} | compare(seconds, pairs)
    seconds = interleave(decoding(models, ids), replace(setting, repeats=4 * setting.repeats), calls=DECODED)
    yield row | {"workload": "decoding", "bytes": {}} | compare(seconds, pairs)


def build(config: PreTrainedConfig, device: str) -> dict[str, PreTrainedModel]:
    """Build one untrained model per form. All share the backbone weights of the standard one."""
    fields = config.to_dict()
    del fields["model_type"]
    models = {}
    for name, form in FORMS.items():
        torch.manual_seed(0)
        form_config = AutoConfig.for_model(f"attnres_{config.model_type}", **fields | form)
        with torch.device(device):
            models[name] = AutoModelForCausalLM.from_config(form_config, dtype=torch.float32).eval()
        if name != STANDARD:
            models[name].load_state_dict(models[STANDARD].state_dict(keep_vars=True), strict=False, assign=True)
    return models


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the table of all rows, by its name in the README."""
    step, decode = rows

    def cells(name: str) -> list[str]:
        ratio = f"{name} / {STANDARD}"
        return [cell(step, ratio, 2), f"{step['bytes'][name] / step['bytes'][STANDARD]:.2f}", cell(decode, ratio, 2)]

    return {
        "connections": markdown_table(
            "Residual connections, as a ratio to the standard residual stream",
            ["connection", *COLUMNS],
            [[name, *cells(name)] for name in FORMS if name != STANDARD],
        )
    }
