"""All measurements of a model on one text, and the beginning of that text token by token."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from attnres.configuration.counting import count_loaded
from attnres.family import describe_connection
from attnres.utils.token_ids import check_token_ids

from .attention_sinks import AttentionSinks, attention_sinks
from .axis import DepthAxis, depth_axis
from .batches import Batch
from .depth_attention import DepthAttention, NoDepthAttention, depth_attention, weights_by_token
from .images import ImagePrompt
from .interventions import Interventions, count_passes, interventions
from .magnitudes import Magnitudes, magnitudes
from .measurement import Measurement
from .mixing import DepthMixing, depth_mixing, rows_by_token
from .text import InspectedText, cut, read_text
from .watching import family_member

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = ("A", "B")  # the letters of two compared inspections, on the page, in figures and in files
PASSAGE_TOKENS = 256  # the largest number of tokens in the passage, of which every single weight is kept
PASSAGE_BYTES = 32_000_000  # the most that the weights of the passage take on the page, in 16 bits each
# The time of each measurement for the progress bar. The unit is a pass without gradients.
_COSTS = {"depth mixing": 2, "magnitudes": 4, "attention sinks": 1}


@dataclass(frozen=True, eq=False, repr=False)
class Passage(Measurement):
    """The beginning of the text or a prompt with images, with the weights of every consumer at each token.

    Attributes:
        words: The tokens as words of the text, one for each token.
        weights: One tensor `[sources of the consumer, tokens]` in float32 for each consumer in turn: depth weights or,
            without depth attention, a row of the depth-mixing matrix up to its diagonal.
        prompt: A description of the prompt with images; `None` for the beginning of the text.
    """

    words: list[str]
    weights: list[Tensor]
    prompt: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Inspection(Measurement):
    """All measurements of a model on one text.

    Attributes:
        model: Facts about the model: name, revision, class, connection, parameters, dtype, layers, sublayers, hidden
            size.
        text: Facts about the text: name, sha256, number and length of sequences, tokens.
        depth: The names of consumers, outputs and sources.
        depth_attention: The depth attention; `None` without attention residuals.
        mixing: The depth-mixing matrix.
        magnitudes: The magnitudes by depth.
        sinks: The attention sinks.
        interventions: The interventions; `None` if they were not made.
        passage: The beginning of the text, or a prompt with images, token by token.
    """

    model: dict[str, Any]
    text: dict[str, Any]
    depth: DepthAxis
    depth_attention: DepthAttention | None
    mixing: DepthMixing
    magnitudes: Magnitudes
    sinks: AttentionSinks
    interventions: Interventions | None
    passage: Passage

    def plot(self, path: str | os.PathLike | None = None) -> "Figure":
        """Draw the depth attention or, where there is none, the depth-mixing matrix; see their `plot`."""
        return (self.depth_attention or self.mixing).plot(path)


def inspect_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: InspectedText | str | os.PathLike,
    *,
    name: str | None = None,
    length: int = 256,
    tokens: int = 8192,
    intervention_tokens: int = 2048,
    batch_size: int = 8,
    prompt: ImagePrompt | None = None,
    advance: Callable[[str, float], Any] = lambda name, share: None,
) -> Inspection:
    """Make all measurements of this folder on one text, in the memory that one batch takes.

    Args:
        model: A causal language model of the family, or a standard one on a backbone in `BACKBONES`. The
            residual stream of a standard model is measured, on the same weights.
        tokenizer: The tokenizer of the model.
        text: The text to read: an `InspectedText`, the text itself as a string, or a text file as a `Path`.
        name: The name of the model in the report; by default the path or Hub id that the model was loaded from.
        length: The number of tokens of a sequence; `tokens`, if that is smaller.
        tokens: The largest number of tokens to read, at least 2. Only whole sequences are read.
        intervention_tokens: How many of these tokens each intervention reads, rounded up to whole sequences. There is a
            pass for each source and each consumer. 0 makes no interventions.
        batch_size: The number of sequences of a batch.
        prompt: A prompt with images, whose tokens are shown one by one in place of the text's. The other measurements
            are of the text.
        advance: Called to report progress as `advance(name, share)`, with the name of the current measurement and the
            share of all work that is done, from 0 to 1.

    Returns:
        The measurements, with facts about the model and the text.

    Raises:
        OSError: The text file cannot be read.
        ValueError: The model is not of the family and cannot become a member; the text is not UTF-8 or shorter than one
            sequence; `length` or `tokens` is out of range; the tokenizer gives ids that the model does not have; or the
            model's results are not finite.
    """
    if tokens < 2:
        raise ValueError(f"`tokens` must be at least 2, got {tokens}.")
    limit = getattr(model.config, "max_position_embeddings", None) or length
    if not 2 <= min(length, tokens) <= limit:
        raise ValueError(f"`length` must be from 2 to {limit:,}, the number of positions of the model, got {length}.")
    length = min(length, tokens)
    if not isinstance(text, InspectedText):
        text = InspectedText("text", text) if isinstance(text, str) else read_text(text, tokens)
    member = family_member(model)
    ids, words = cut(text, tokenizer, length, tokens)
    check_token_ids(ids, model, f"{text.name}, by this tokenizer,")  # the name is the subject of its message
    batches = ids.split(batch_size)
    intervention_batches = ids[: math.ceil(intervention_tokens / length)].split(batch_size)

    # Depth attention comes first: the sources, and so the number of passes for interventions, follow from it.
    advance("depth attention", 0.0)
    shown = passage_tokens(depth_axis(member))
    # A prompt is read whole, since its images are.
    passage: Batch = ids[:1, :shown] if prompt is None else prompt.inputs
    words, start = (words, 0) if prompt is None else (prompt.words, prompt.start)
    words = words[:shown]
    places = slice(start, start + len(words))
    try:
        attention = depth_attention(member, batches)
        weights = [row[:, 0, places].float().cpu() for row in weights_by_token(member, passage)]
    except NoDepthAttention:
        attention, rows = None, rows_by_token(member, passage)[..., places].float()
        weights = [row[: index + 1] for index, row in enumerate(rows)]
    depth = attention.depth if attention else depth_axis(member)

    # Work is counted in tokens of passes without gradients.
    num_passes = count_passes(depth, attention) if intervention_tokens else 0
    intervention_work = sum(batch.numel() for batch in intervention_batches)
    done = ids.numel()
    total = ids.numel() * (1 + sum(_COSTS.values())) + num_passes * intervention_work

    def run_measurement(name: str, measure: Callable[..., Any]) -> Any:
        """Return the result of a measurement, and report progress."""
        nonlocal done
        advance(name, done / total)
        result = measure(member, batches)
        done += ids.numel() * _COSTS[name]
        return result

    def advance_interventions() -> None:
        nonlocal done
        done += intervention_work
        advance("interventions", done / total)

    return Inspection(
        model=_model_facts(model, member, name, depth),
        text={
            "name": text.name,
            "sha256": text.sha256,
            "sequences": len(ids),
            "length": length,
            "tokens": ids.numel(),
        },
        depth=depth,
        depth_attention=attention,
        mixing=run_measurement("depth mixing", depth_mixing),
        magnitudes=run_measurement("magnitudes", magnitudes),
        sinks=run_measurement("attention sinks", attention_sinks),
        interventions=interventions(member, intervention_batches, attention, advance_interventions)
        if num_passes
        else None,
        passage=Passage(words, weights, None if prompt is None else str(prompt)),
    )


def passage_tokens(depth: DepthAxis) -> int:
    """Return the largest number of tokens in the passage of a model.

    It depends on the depth alone, so that two models of one depth show the same words whatever their connections.

    Args:
        depth: The depth axis of the model.
    """
    num_weights = math.comb(len(depth.consumers) + 1, 2)  # of a token: consumer i has up to i + 1 sources
    return max(1, min(PASSAGE_TOKENS, PASSAGE_BYTES // (2 * num_weights)))


def _model_facts(model: PreTrainedModel, member: PreTrainedModel, name: str | None, depth: DepthAxis) -> dict[str, Any]:
    """Return the facts about a model that a report shows; `member` is the model, or the member made from it."""
    config = member.config
    return {
        "name": name or model.name_or_path or type(model).__name__,
        "revision": getattr(model.config, "_commit_hash", None),
        "class": type(model).__name__,
        "connection": describe_connection(config),
        "parameters": count_loaded(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": depth.num_sublayers // len(depth.kinds),
        "sublayers": depth.num_sublayers,
        "hidden_size": config.hidden_size,
    }


__all__ = ["LABELS", "PASSAGE_BYTES", "PASSAGE_TOKENS", "Inspection", "Passage", "inspect_model", "passage_tokens"]
