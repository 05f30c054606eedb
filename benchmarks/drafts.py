"""Compare greedy generation that looks ahead with plain generation, on hybrids: prompt lookup and an assistant model.

Random weights cannot predict text, so the drafts are right by construction. The outputs of all layers are scaled down
so far that the last token mostly decides the next one. So the model's text repeats, and prompt lookup finds it. The
assistant is the first half of the layers with the same weights. The other assistant has wrong names for all words.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnres import AttnResForCausalLM
from attnres.configuration import load

from .shapes import build, token_ids
from .stored import cell, markdown_table
from .timing import Setting, compare, interleave

DRAFTED = 5  # tokens of a draft
TEXT = 48  # tokens of the prompt that the model has generated; with so few words they soon repeat
WORDS = 64
SCALE = 0.02  # of the outputs of all layers, so that a word mostly decides the next one
PLAIN = "plain"


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per model and draft. All drafts of a model go on from the same text."""
    new = 8 if setting.quick else 16
    for mlp in ("dense",) if setting.quick else ("dense", "experts"):
        model = hybrid(mlp, setting.quick, setting.device)
        ids = _generate(model, token_ids(model.config, 16, 1, setting.device), TEXT)
        right, wrong = first_half(model), first_half(model)
        with torch.no_grad():
            wrong.lm_head.weight.copy_(wrong.lm_head.weight.roll(1, 0))
        drafts: dict[str, dict[str, Any]] = {
            PLAIN: {},
            "prompt lookup": {"prompt_lookup_num_tokens": DRAFTED},
            "assistant, mostly right": {"assistant_model": right},
            "assistant, always wrong": {"assistant_model": wrong},
        }
        passes = {name: _count_passes(model, ids, new, options) for name, options in drafts.items()}
        seconds = interleave({name: _way(model, ids, new, drafts[name]) for name in drafts}, setting, calls=1)
        for name in [*drafts][1:]:
            pair = {each: seconds[each] for each in (PLAIN, name)}
            row = {"mlp": mlp, "draft": name, "per_pass": new / passes[name]}
            yield row | compare(pair, {f"{name} / {PLAIN}": (name, PLAIN)})


def tables(rows: list[dict]) -> dict[str, str]:
    """Return the table of all rows, by its name in the README."""
    cells = [
        [row["mlp"], row["draft"], f"{row['per_pass']:.2f}", cell(row, f"{row['draft']} / {PLAIN}")] for row in rows
    ]
    columns = ["MLPs", "draft", "tokens a pass", "draft / plain"]
    title = f"Greedy generation of a hybrid with drafts of {DRAFTED} tokens, as a ratio to generation without drafts"
    return {"drafts": markdown_table(title, columns, cells)}


@torch.no_grad()
def hybrid(mlp: str, quick: bool, device: str) -> PreTrainedModel:
    """Return a hybrid with AttnRes in blocks, whose layers change little, so that its text repeats."""
    size, layers = (32, 8) if quick else (512, 8)
    fields = {"mlp_layer_types": ["dense"] * layers} if mlp == "dense" else {"num_local_experts": 16}
    name = "attnres-tiny" if quick else "attnres-296m"
    config = load(name, vocab_size=WORDS, hidden_size=size, num_hidden_layers=layers, **fields)
    config.pad_token_id, config.bos_token_id, config.eos_token_id = 0, None, None
    model = build(config, torch.float32, device)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(SCALE)
        for name, parameter in layer.mlp.named_parameters():
            if "down_proj" in name:
                parameter.mul_(SCALE)
    return model


def first_half(model: PreTrainedModel) -> PreTrainedModel:
    """Return an assistant: the first half of the model's layers, with the same weights."""
    config: Any = deepcopy(model.config)
    layers = config.num_hidden_layers // 2
    config.num_hidden_layers = layers
    config.layer_types, config.mlp_layer_types = config.layer_types[:layers], config.mlp_layer_types[:layers]
    assistant: Any = AttnResForCausalLM(config).eval()
    assistant.to(model.device)
    weights = model.state_dict()
    assistant.load_state_dict({name: weights[name] for name in assistant.state_dict()})
    assistant.generation_config.update(
        num_assistant_tokens=DRAFTED, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    return assistant


def _generate(model: PreTrainedModel, ids: Tensor, new: int, **options: Any) -> Tensor:
    """Generate exactly so many tokens greedily, after those of a prompt `[1, tokens]`."""
    options |= {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
    # pyrefly: ignore[not-callable]  # a language model is a `GenerationMixin`
    return model.generate(ids, max_new_tokens=new, **options)


def _way(model: PreTrainedModel, ids: Tensor, new: int, options: dict[str, Any]) -> Callable[[], object]:
    """Return a call that generates so many tokens."""
    return lambda: _generate(model, ids, new, **options)


def _count_passes(model: PreTrainedModel, ids: Tensor, new: int, options: dict[str, Any]) -> int:
    """Return the number of passes of the model, without those of an assistant."""
    passes: list[int] = []
    hook = model.model.register_forward_hook(lambda *_: passes.append(1))
    _generate(model, ids, new, **options)
    hook.remove()
    return len(passes)
