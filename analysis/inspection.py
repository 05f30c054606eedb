"""All measurements of a model on one text, and a passage of it token by token."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnres.utils.token_ids import check_token_ids

from .attention_sinks import AttentionSinks, attention_sinks
from .depth_attention import DepthAttention, NoDepthAttention, depth_attention, weights_by_token
from .interventions import Interventions, count_passes, interventions
from .magnitudes import Magnitudes, magnitudes
from .mixing import DepthMixing, depth_mixing, rows_by_token
from .names import Depth, Measurement, depth_of
from .text import Text, cut, read_text
from .watching import family_member

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PASSAGE = 256  # tokens at most, of each of which all weights are kept
_COSTS = {"depth mixing": 2, "magnitudes": 4, "attention sinks": 1}  # in passes without gradients, about


@dataclass(frozen=True, eq=False, repr=False)
class Passage(Measurement):
    """What every reader takes from every source, token by token.

    Attributes:
        words: of the tokens, as the text has them, `[tokens]`.
        weights: of each reader in turn, `[sources that it has, tokens]` in float32: depth weights, or where there is no
            depth attention a row of the depth-mixing matrix, up to its diagonal.
    """

    words: list[str]
    weights: list[Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Measurement):
    """What was found out about a model.

    Attributes:
        model: facts on it: name, revision, class, connection, parameters, dtype, layers, sublayers, hidden size.
        text: facts on the text: name, sha256, sequences, length of each, tokens.
        depth: names of readers, outputs and sources.
        depth_attention: `None` without attention residuals.
        mixing: see its class.
        magnitudes: see its class.
        sinks: see its class.
        interventions: `None` if they were left out.
        passage: of the beginning of the text.
    """

    model: dict[str, Any]
    text: dict[str, Any]
    depth: Depth
    depth_attention: DepthAttention | None
    mixing: DepthMixing
    magnitudes: Magnitudes
    sinks: AttentionSinks
    interventions: Interventions | None
    passage: Passage

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draw what readers take: the depth attention or, where there is none, the depth mixing."""
        return (self.depth_attention or self.mixing).plot(path)


def inspect_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: Text | str | os.PathLike,
    *,
    name: str | None = None,
    length: int = 256,
    tokens: int = 8192,
    intervention_tokens: int = 2048,
    batch_size: int = 8,
    advance: Callable[[str, float], Any] = lambda what, share: None,
) -> Inspection:
    """Measure all that this folder measures, in as much memory as one batch takes.

    Args:
        model: a causal language model of the family, or a standard one with a backbone that the family knows: its
            residual stream is measured, on the same weights.
        text: what it reads, or the file that has it.
        name: what to call the model; by default where it was loaded from.
        length: tokens of a sequence.
        tokens: how many to read at most, in whole sequences.
        intervention_tokens: how many of these for each intervention, one pass for each source and each reader; 0 leaves
            interventions out.
        advance: called now and then with what is being measured, and the share of all passes that is done.

    Raises:
        ValueError: the model is not of the family and cannot be seen as a member; the text is shorter than one
            sequence, or `length` out of range; or what the model computes is not finite.
    """
    limit = getattr(model.config, "max_position_embeddings", None) or length
    if not 2 <= length <= limit:
        raise ValueError(f"`length` is {length}, but must be from 2 to {limit:,}, the positions that the model has.")
    if not isinstance(text, Text):
        text = Text("text", text) if isinstance(text, str) else read_text(text, max(tokens, length))
    member = family_member(model)
    ids, words = cut(text, tokenizer, length, tokens)
    check_token_ids(ids, model, f"{text.name}, by this tokenizer,")
    batches = ids.split(batch_size)
    few = ids[: math.ceil(intervention_tokens / length)].split(batch_size)
    advance("depth attention", 0.0)
    try:
        attention = depth_attention(member, batches)
        weights = [row[:, 0].float().cpu() for row in weights_by_token(member, ids[:1, :PASSAGE])]
    except NoDepthAttention:
        attention, rows = None, rows_by_token(member, ids[:1, :PASSAGE]).float()
        weights = [row[: place + 1] for place, row in enumerate(rows)]
    depth = attention.depth if attention else depth_of(member)

    facts = _facts(model, member, name, depth)
    passes = count_passes(depth, attention) if intervention_tokens else 0
    done, total = ids.numel(), ids.numel() * (1 + sum(_COSTS.values())) + passes * sum(batch.numel() for batch in few)

    def after(what: str, measure: Callable[..., Any]) -> Any:
        nonlocal done
        advance(what, done / total)
        result = measure(member, batches)
        done += ids.numel() * _COSTS[what]
        return result

    def after_pass() -> None:
        nonlocal done
        done += sum(batch.numel() for batch in few)
        advance("interventions", done / total)

    return Inspection(
        facts,
        {
            "name": text.name,
            "sha256": text.sha256,
            "sequences": len(ids),
            "length": length,
            "tokens": ids.numel(),
        },
        depth,
        attention,
        after("depth mixing", depth_mixing),
        after("magnitudes", magnitudes),
        after("attention sinks", attention_sinks),
        interventions(member, few, attention, after_pass) if passes else None,
        Passage(words[:PASSAGE], weights),
    )


def _facts(model: PreTrainedModel, member: PreTrainedModel, name: str | None, depth: Depth) -> dict[str, Any]:
    config = member.config
    return {
        "name": name or model.name_or_path or type(model).__name__,
        "revision": getattr(model.config, "_commit_hash", None),
        "class": type(model).__name__,
        "connection": config.connection.describe(config),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": depth.num_sublayers // len(depth.kinds),
        "sublayers": depth.num_sublayers,
        "hidden_size": config.hidden_size,
    }


__all__ = ["Inspection", "Passage", "inspect_model"]
