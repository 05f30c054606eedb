"""Compare greedy generation that looks ahead with plain generation, on hybrids: prompt lookup and an assistant model.

Random weights cannot predict text, so the drafts are right by construction. The assistant is the first half of the
model with the same weights. The second half is scaled down so far that both mostly choose the same tokens. For prompt
lookup, the prompt is text that the model has generated, in which it goes on.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnres import AttnResForCausalLM
from attnres.configuration import load

from .shapes import VOCABULARY, build, token_ids
from .stored import cell, markdown_table
from .timing import Setting, Ways, compare, interleave

DRAFTED = 5  # tokens of a draft
PLAIN, RATIO = "plain", "time to plain"


@dataclass(frozen=True)
class Draft:
    """One way to draft tokens."""

    name: str
    scale: float  # of the second half of the model, which the assistant lacks
    options: Callable[[PreTrainedModel], dict[str, Any]]  # of `generate`, for the model


def _lookup(model: PreTrainedModel) -> dict[str, Any]:
    return {"prompt_lookup_num_tokens": DRAFTED}


def _assistant(model: PreTrainedModel) -> dict[str, Any]:
    return {"assistant_model": first_half(model)}


DRAFTS = (
    Draft("prompt lookup", 0.3, _lookup),
    Draft("assistant, mostly right", 0.3, _assistant),
    Draft("assistant, often wrong", 3.0, _assistant),
)


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per model and draft."""
    new = 8 if setting.quick else 24
    for mlp in ("dense",) if setting.quick else ("dense", "experts"):
        for draft in DRAFTS:
            model = hybrid(mlp, draft.scale, setting.quick, setting.device)
            ids = token_ids(model.config, 16, 1, setting.device)
            if draft.options is _lookup:
                ids = _generate(model, ids, 4 * new)
            ways, passes = {}, {}
            for name, options in ((PLAIN, {}), (draft.name, draft.options(model))):
                passes[name] = _count_passes(model, ids, new, options)
                ways[name] = _way(model, ids, new, options)
            seconds = interleave(ways, setting, calls=1)
            row = {"mlp": mlp, "draft": draft.name, "per_pass": new / passes[draft.name]}
            yield row | compare(seconds, {RATIO: (draft.name, PLAIN)})


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the table of all rows, by its name in the README."""
    cells = [[row["mlp"], row["draft"], f"{row['per_pass']:.2f}", cell(row, RATIO)] for row in rows]
    columns = ["MLPs", "draft", "tokens a pass", RATIO]
    title = f"Greedy generation of a hybrid with drafts of {DRAFTED} tokens, as a ratio to generation without drafts"
    return {"drafts": markdown_table(title, columns, cells)}


@torch.no_grad()
def hybrid(mlp: str, scale: float, quick: bool, device: str) -> PreTrainedModel:
    """Return a hybrid with AttnRes in blocks, whose second half of layers is scaled by a factor."""
    size, layers = (32, 8) if quick else (512, 8)
    fields = {"mlp_layer_types": ["dense"] * layers} if mlp == "dense" else {"num_local_experts": 16}
    name = "attnres-tiny" if quick else "attnres-296m"
    config = load(name, vocab_size=VOCABULARY, hidden_size=size, num_hidden_layers=layers, **fields)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None
    model = build(config, torch.float32, device)
    for layer in model.model.layers[layers // 2 :]:
        layer.self_attn.o_proj.weight.mul_(scale)
        for name, parameter in layer.mlp.named_parameters():
            if "down_proj" in name:
                parameter.mul_(scale)
    return model


def first_half(model: PreTrainedModel) -> PreTrainedModel:
    """Return an assistant: the first half of the model's layers, with the same weights."""
    config = deepcopy(model.config)
    layers = config.num_hidden_layers // 2
    config.num_hidden_layers = layers
    config.layer_types, config.mlp_layer_types = config.layer_types[:layers], config.mlp_layer_types[:layers]
    assistant = AttnResForCausalLM(config).eval()
    weights = model.state_dict()
    assistant.load_state_dict({name: weights[name] for name in assistant.state_dict()})
    assistant.generation_config.update(
        num_assistant_tokens=DRAFTED, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return assistant.to(model.device)


def _generate(model: PreTrainedModel, ids: Tensor, new: int, **options: Any) -> Tensor:
    """Generate exactly so many tokens greedily, after those of a prompt `[1, tokens]`."""
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None, **options
    )


def _way(model: PreTrainedModel, ids: Tensor, new: int, options: dict[str, Any]) -> Callable[[], object]:
    return lambda: _generate(model, ids, new, **options)


def _count_passes(model: PreTrainedModel, ids: Tensor, new: int, options: dict[str, Any]) -> int:
    """Return the number of passes of the model, without those of an assistant."""
    passes: list[int] = []
    hook = model.model.register_forward_hook(lambda *_: passes.append(1))
    _generate(model, ids, new, **options)
    hook.remove()
    return len(passes)
