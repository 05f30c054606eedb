"""Compare the functions of two checkpoints by their logits on text, with one model in memory at a time.

Decoders without a head are compared by their last hidden states.
"""

import math
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from attnres.checkpoints.checkpoint import Checkpoint
from attnres.residual_attnres import FamilyWarning
from attnres.utils.quiet import quiet_transformers

RELATIVE_TOLERANCE = 1e-4  # in units of the largest logit, in float32
# Share of equal top-1 tokens. Two tokens whose logits differ by less than the tolerance may change places.
MIN_AGREEMENT = 0.999
MAX_LENGTH = 512  # tokens of a sequence
MAX_LOGITS = 2**26  # logits of one model that are held in memory
MEMORY_OF_LOGITS = 16 * MAX_LOGITS  # bytes of both models' logits, and of their comparison
MAX_CHARACTERS = 2**18  # characters of a text that are enough for more than MAX_LOGITS
PROMPTS = (
    "Once upon a time there was a lighthouse keeper who could not sleep.",
    "The derivative of sin(x) is cos(x), and the integral of 1/x is",
    "def fibonacci(n: int) -> int:\n    return n if n < 2 else",
    '{"name": "Ada", "born": 1815, "languages": ["English", "French"]}',
    "Der Zug nach Basel fährt heute von Gleis 7, nicht von Gleis 4.",
    "水は摂氏百度で沸騰し、零度で凍る。",
    "Q: Which planet has the most moons?\nA:",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144,",
)


@dataclass(frozen=True)
class FunctionComparison:
    """The distance between the logits of a source and of the result of its conversion.

    Attributes:
        tokens: The number of tokens.
        max_logit: The source's largest absolute logit.
        max_difference: The largest absolute difference of two logits.
        kl: The mean Kullback-Leibler divergence from source to result, in nats per token.
        agreement: The share of positions at which both models give the largest logit to the same token.
    """

    tokens: int
    max_logit: float
    max_difference: float
    kl: float
    agreement: float

    @property
    def is_same(self) -> bool:
        """Whether the functions are equal up to rounding. False if a logit is NaN."""
        return self.max_difference <= RELATIVE_TOLERANCE * self.max_logit and self.agreement >= MIN_AGREEMENT

    def __str__(self) -> str:
        return (
            f"max |logit difference| {self.max_difference:.1e} at logits up to {self.max_logit:.1f}, "
            f"mean KL {self.kl:.1e}, top-1 agreement {self.agreement:.2%} ({self.tokens:,} tokens)"
        )


def compare(
    source: Checkpoint | str | os.PathLike,
    result: Checkpoint | str | os.PathLike,
    texts: Sequence[str] = PROMPTS,
    model_class: type[PreTrainedModel] | None = None,
) -> FunctionComparison:
    """Run both models on texts in float32, and compare their logits. Quantised models run as they are.

    Args:
        source: The checkpoint of one model, or its directory.
        result: That of the other.
        texts: The texts. Without a tokenizer, random tokens replace the built-in prompts.
        model_class: The class to load both by. By default an Auto class, which goes by the result's configuration.

    Returns:
        The comparison.

    Raises:
        ValueError: A tokenizer fails, the two give different tokens, or the texts have fewer than two tokens; or there
            is no tokenizer, and `texts` are not the built-in prompts.
    """
    source, result = (c if isinstance(c, Checkpoint) else Checkpoint(c) for c in (source, result))
    with quiet_transformers():
        vocab_size, config = source.config.vocab_size, result.config
        # A source may name any class in `architectures`; the result names the one that was converted.
        decoder_class: Any = MODEL_MAPPING[type(config)]
        is_decoder = model_class is None and config.architectures == [decoder_class.__name__]
        auto_class = model_class or (AutoModel if is_decoder else AutoModelForCausalLM)
        sequences, result_sequences = _token_ids(source, texts), _token_ids(result, texts)
        if sequences is None and texts is not PROMPTS:
            raise ValueError(f"{source.name} has no tokenizer that loads here, and a text needs one.")
        if sequences is None:
            sequences = list(torch.randint(vocab_size, (4, 64), generator=torch.Generator().manual_seed(0)))
        elif (
            result_sequences is None
            or len(result_sequences) != len(sequences)
            or not all(map(torch.equal, sequences, result_sequences))
        ):
            raise ValueError(f"the tokenizers of {source.name} and {result.name} differ.")
        largest = max(sequence.max().item() for sequence in sequences)
        if largest >= vocab_size:
            raise ValueError(
                f"the tokenizer of {source.name} gives token {largest}, but the model has only {vocab_size} tokens."
            )
        expected, actual = (_logits(checkpoint.folder, sequences, auto_class) for checkpoint in (source, result))
    # The logarithms are taken in float64, for 64 tokens at a time to save memory.
    divergences, matches = [], []
    for source_logits, result_logits in zip(expected, actual):
        for a, b in zip(source_logits.split(64), result_logits.split(64)):
            log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
            divergences.append(F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1))
            matches.append(a.argmax(-1) == b.argmax(-1))
    return FunctionComparison(
        tokens=sum(map(len, expected)),
        max_logit=torch.stack([a.abs().max() for a in expected]).max().item(),
        # `max` keeps a NaN, so that `is_same` sees it.
        max_difference=torch.stack([(a - b).abs().max() for a, b in zip(expected, actual)]).max().item(),
        kl=torch.cat(divergences).mean().item(),
        agreement=torch.cat(matches).double().mean().item(),
    )


def _token_ids(checkpoint: Checkpoint, texts: Sequence[str]) -> list[Tensor] | None:
    """Return the texts as token ids `[length]`, cut into pieces of `MAX_LENGTH`; None without a tokenizer."""
    if (tokenizer := checkpoint.tokenizer) is None:
        return None
    try:
        ids = [torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long) for text in texts]
    except Exception as error:  # `tokenizers` raises nothing more special
        raise ValueError(
            f"the tokenizer of {checkpoint.name} fails: {error}. --no-verify skips the comparison."
        ) from error
    pieces = [piece for text in ids for piece in text.split(MAX_LENGTH) if len(piece) > 1]
    if not pieces:
        raise ValueError("the text must have at least two tokens.")
    return pieces


@torch.no_grad()
def _logits(folder: str | os.PathLike, sequences: Sequence[Tensor], auto_class: type) -> list[Tensor]:
    """Return the logits `[length, vocab]` of each sequence, or the last hidden states, in float32 on the CPU.

    Sequences are cut off once `MAX_LOGITS` are held.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FamilyWarning)  # a conversion has printed them before
        model = auto_class.from_pretrained(folder, dtype=torch.float32, device_map="auto", trust_remote_code=False)
    model.eval()
    limit = math.ceil(MAX_LOGITS / model.config.vocab_size)
    logits = []
    for sequence in sequences:
        sequence = sequence[:limit]
        if len(sequence) == 0:
            break
        outputs = model(sequence[None].to(model.device), use_cache=False)
        values = outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
        logits.append(values[0].float().cpu())
        limit -= len(sequence)
    return logits


__all__ = ["MAX_CHARACTERS", "MEMORY_OF_LOGITS", "PROMPTS", "FunctionComparison", "compare"]
