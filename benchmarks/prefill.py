"""Measure the peak memory of a prefill against the length of the prompt: in one pass, and in chunks.

    one pass    N blocks of [tokens, hidden]
    chunks      N blocks of [chunk, hidden], whatever the length of the prompt

The model is a small Kimi Linear, of which one layer in eight has full attention, so that most of its memory is that of
block states. The residual stream on the same shape shows what the rest takes: the cache, and what a layer computes.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, PreTrainedModel

from attnres import AttnResConfig

from .memory import peak_bytes
from .report import make_table
from .shapes import STANDARD, connect
from .timing import Setting

if TYPE_CHECKING:
    from attnres.utils.drawing import Drawing

LAYERS, BLOCKS = 8, 8
LENGTHS, CHUNK = (8192, 32768, 131072), 4096
QUICK_LENGTHS, QUICK_CHUNK = (64, 128), 32
OURS = "ours"
# Queries whose scores are computed at once. Only their mask and scores are in memory.
QUERIES = 32
ATTENTION = "by_queries"


def measure(setting: Setting) -> Iterator[dict]:
    """Yield one row per length and way: the peak bytes of each model, and the bytes of N blocks of all tokens.

    `chunk` of a row is the tokens of a chunk, `None` for one pass.
    """
    lengths, chunk = (QUICK_LENGTHS, QUICK_CHUNK) if setting.quick else (LENGTHS, CHUNK)
    AttentionInterface.register(ATTENTION, attend_by_queries)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
    width = 64 if setting.quick else 256
    standard = build_standard(width, setting.device)
    models = {OURS: connect(standard, block_size=2 * LAYERS // BLOCKS), STANDARD: standard}
    for tokens in lengths:
        ids = torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(0)).to(setting.device)
        for size in (None, chunk):
            prefill = {name: partial(generate, model, ids, size) for name, model in models.items()}
            peaks = {name: peak_bytes(run, setting.device) for name, run in prefill.items()}
            ratios = {f"{OURS} / {STANDARD}": peaks[OURS] / peaks[STANDARD]}
            peaks["blocks"] = BLOCKS * tokens * width * 4
            yield {"tokens": tokens, "chunk": size, "ratios": ratios, "bytes": peaks}


def build_standard(width: int, device: str) -> PreTrainedModel:
    """Return a Kimi Linear of 8 layers with the residual stream, in float32."""
    config = AttnResConfig(
        vocab_size=128,
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=LAYERS,
        layer_types=["linear_attention"] * (LAYERS - 1) + ["full_attention"],
        mlp_layer_types=["dense"] * LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_head_dim=32,
        linear_num_heads=1,
        residual_connection=STANDARD,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    # A member of the family: the delta attention of `transformers` takes more memory. A retrofit keeps the attention.
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    return model.to(device).eval()


def generate(model: PreTrainedModel, ids: Tensor, chunk: int | None) -> Tensor:
    """Read a prompt, in one pass or in chunks, and generate one token."""
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk)


def attend_by_queries(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Compute causal attention in the memory of a few queries, as flash attention does on a GPU.

    PyTorch's attention on a CPU would write the mask of a chunk, `[chunk, tokens]`, which is larger than all that this
    benchmark is about. Shapes are those of `transformers`: `[batch, heads, seq, head_dim]`.
    """
    length, tokens = query.shape[2], key.shape[2]
    output = value.new_empty(query.shape[0], length, query.shape[1], value.shape[-1])
    for start in range(0, length, QUERIES):
        end = min(start + QUERIES, length)
        seen = tokens - length + end  # by the last of these queries
        last = torch.arange(seen - (end - start), seen, device=key.device)[:, None]
        mask = torch.arange(seen, device=key.device) <= last  # (queries, tokens)
        part = F.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, :seen], value[:, :, :seen], attn_mask=mask, scale=scaling
        )
        output[:, start:end] = part.transpose(1, 2)
    return output, None


def tables(rows: list[dict]) -> dict[str, Table]:
    """Return the table of all rows, by its name in the README."""
    return {
        "prefill": make_table(
            "Peak memory of a prefill (MiB)",
            ["tokens", "read in", "Block AttnRes", "residual stream", "difference", f"{BLOCKS} blocks of all tokens"],
            [
                [
                    f"{row['tokens']:,}",
                    "one pass" if row["chunk"] is None else f"chunks of {row['chunk']:,}",
                    *(mebibytes(row["bytes"][name]) for name in (OURS, STANDARD)),
                    mebibytes(added(row)),
                    mebibytes(row["bytes"]["blocks"]),
                ]
                for row in rows
            ],
        )
    }


def added(row: dict) -> int:
    """Return how many bytes attention residuals add to the peak of the residual stream."""
    return row["bytes"][OURS] - row["bytes"][STANDARD]


def mebibytes(size: int) -> str:
    """Return a size in MiB with one decimal."""
    return f"{size / 2**20:,.1f}"


def plot(rows: list[dict], path: Path) -> None:
    """Draw peak memory against the length of the prompt into a PNG file, in full and beyond the residual stream."""
    from attnres.utils.drawing import column, finish, styled  # matplotlib is in an extra

    finish(styled(_draw)(column(2.6), rows), path)


def _draw(figure: "Drawing", rows: list[dict]) -> "Drawing":
    """Fill the figure of `plot`, and return it."""
    panels = figure.subplots(1, 2, sharey=True)
    shown = {"peak memory of a prefill": lambda row: row["bytes"][OURS], "added to the residual stream": added}
    for axes, (title, size_of) in zip(panels, shown.items()):
        for chunk in dict.fromkeys(row["chunk"] for row in rows):
            line = [row for row in rows if row["chunk"] == chunk]
            name = "one pass" if chunk is None else f"chunks of {chunk:,} tokens"
            lengths, sizes = [row["tokens"] for row in line], [size_of(row) / 2**20 for row in line]
            axes.plot(lengths, sizes, "o-", markersize=4, label=name)
        lengths = sorted({row["tokens"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [f"{tokens // 1024}K" if tokens >= 1024 else str(tokens) for tokens in lengths])
        axes.minorticks_off()
        axes.set_title(title)
        axes.set_xlabel("tokens of the prompt")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("MiB")
    panels[0].yaxis.set_major_formatter("{x:g}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure
