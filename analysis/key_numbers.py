"""The key numbers of an inspection, their differences between two inspections, and their text for people.

The page shows the key numbers in a table. The overview uses them in sentences.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from .depth_attention import DepthAttention
from .inspection import Inspection

MISSING = "\N{EN DASH}"  # in place of a number that does not exist
ZERO = 1e-6  # smaller numbers are rounding errors, and are written as 0
_EQUAL = 1e-5  # a relative difference up to this is a rounding error

# Names of key numbers that the overview or `differences` looks up. The page shows these names.
LOSS = "loss, in nats per token"
HIDDEN_EMBEDDING = "rise of the loss with the embedding hidden"
NEAREST = "weight of sublayers on the nearest source"
SPREAD = "standard deviation of weights over tokens"
OUTPUT_INPUT = "magnitude of the mixture that the output reads, over the embedding"
STREAM = "largest magnitude of the stream, over the embedding"
FIRST_TOKEN = "attention on the first token"


def key_numbers_of(inspection: Inspection) -> dict[str, float]:
    """Return the key numbers of an inspection by their names; NaN for a number that the model does not have."""
    attention, magnitudes, interventions = inspection.depth_attention, inspection.magnitudes, inspection.interventions
    sublayers, spread = sublayers_with_choice(inspection), (attention or inspection.mixing).spread
    output_embedding = output_nearest = distance = math.nan
    if attention:
        output_embedding = shares_of_weight(attention.embedding, attention)[-1]
        output_nearest = shares_of_weight(attention.nearest, attention)[-1]
        distance = attention.distance[sublayers].mean().item()
    return {
        LOSS: interventions.loss if interventions else math.nan,
        HIDDEN_EMBEDDING: interventions.hidden[0].item() if interventions else math.nan,
        "weight of the output on the embedding": output_embedding,
        "weight of the output on the nearest source": output_nearest,
        "weight of sublayers on the embedding": mean_share_of_sublayers(inspection, "embedding"),
        NEAREST: mean_share_of_sublayers(inspection, "nearest"),
        "distance of sublayers' weights from uniform": distance,
        SPREAD: mean_of_known(spread[sublayers]),
        OUTPUT_INPUT: (magnitudes.inputs[-1] / magnitudes.inputs[0]).item(),
        STREAM: (magnitudes.stream.max() / magnitudes.stream[0]).item(),
        "gradients, first sublayers over last": gradient_ratio(inspection)[1],
        "largest value read, over the median": magnitudes.largest.max().item(),
        FIRST_TOKEN: mean_of_known(inspection.sinks.mean),
    }


def key_numbers(inspections: Sequence[Inspection]) -> list[tuple[str, list[float]]]:
    """Return the table of key numbers.

    Args:
        inspections: One inspection, or several to compare.

    Returns:
        Pairs of a name and the number of each inspection; NaN for a model that does not have the number. A number that
        no model has is left out.
    """
    columns = [key_numbers_of(inspection) for inspection in inspections]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    return [(name, values) for name, values in rows if not all(math.isnan(value) for value in values)]


def differences(one: Inspection, other: Inspection) -> list[tuple[str, float]]:
    """Subtract the key numbers of the first inspection from those of the second.

    Args:
        one: The first inspection.
        other: The second inspection.

    Returns:
        Pairs of a name and a difference: 0 for a rounding error, NaN if the two numbers cannot be compared.
    """
    by_name = {}
    for name, (first, second) in key_numbers([one, other]):
        by_name[name] = 0.0 if math.isclose(first, second, rel_tol=_EQUAL) else second - first
    if not read_same_tokens(one, other):
        by_name[LOSS] = math.nan
    # A residual stream and the running sums of blocks are different things, and so are sums of blocks of other sizes.
    sums = {"stream" if i.magnitudes.has_stream else i.depth.block_size for i in (one, other)}
    if len(sums) > 1:
        by_name[STREAM] = math.nan
    return list(by_name.items())


def read_same_tokens(one: Inspection, other: Inspection) -> bool:
    """Return whether the losses of two inspections are on the same tokens, so that they can be compared.

    Args:
        one: The first inspection.
        other: The second inspection.
    """
    # Inspections hold no token ids. Equal texts, sequence lengths, words and counts imply equal ids.
    first, second = ((i.text, i.passage.words, i.interventions and i.interventions.tokens) for i in (one, other))
    return first == second


def sublayers_with_choice(inspection: Inspection) -> list[int]:
    """Return the indices of the sublayers that have two sources or more."""
    attention, sublayers = inspection.depth_attention, range(inspection.depth.num_sublayers)
    return [sublayer for sublayer in sublayers if attention is None or attention.num_sources[sublayer] > 1]


def shares_of_weight(weights: Tensor, attention: DepthAttention) -> list[float]:
    """Divide one weight of each consumer by the sum of all weights of this consumer.

    Args:
        weights: A weight of each consumer, `[L + 1]`.
        attention: The depth attention with all weights. Its rows sum to one, unless weights are sigmoids.
    """
    return (weights / attention.mean.nansum(1)).tolist()


def mean_share_of_sublayers(inspection: Inspection, source: str) -> float:
    """Return the mean share of their weight that sublayers give to a source; NaN without depth attention.

    Args:
        inspection: The inspection.
        source: `embedding`, `nearest` or `rest`, a property of [`DepthAttention`].
    """
    attention, sublayers = inspection.depth_attention, sublayers_with_choice(inspection)
    if attention is None or not sublayers:
        return math.nan
    shares = shares_of_weight(getattr(attention, source), attention)
    return sum(shares[sublayer] for sublayer in sublayers) / len(sublayers)


def gradient_ratio(inspection: Inspection) -> tuple[int, float]:
    """Return n, a quarter of the number of sublayers, and the mean gradient of the first n over that of the last n."""
    gradients, count = inspection.magnitudes.gradients[1:], max(1, inspection.depth.num_sublayers // 4)
    return count, (gradients[:count].mean() / gradients[-count:].mean()).item()


def mean_of_known(values: Tensor) -> float:
    """Return the mean of all values that are not NaN."""
    return values.nanmean().item()


def number(value: float, digits: int = 2) -> str:
    """Format a number for people: `0.027`, `6.4`, `1,204`.

    Args:
        value: The number; NaN is written as a dash.
        digits: The number of significant digits. All digits before the point are written.
    """
    if not math.isfinite(value):
        return MISSING if math.isnan(value) else str(value).replace("inf", "\N{INFINITY}")
    if abs(value) < ZERO:
        return "0"
    value = float(f"{value:.{digits - 1}e}") if abs(value) < 10**digits else round(value)
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(places, 0)}f}".replace("-", "\N{MINUS SIGN}")


def told_apart(first: float, second: float) -> tuple[str, str]:
    """Format two numbers for people, with as many digits as it takes to see that they differ.

    Args:
        first: A number.
        second: The number that it is compared with.

    Returns:
        Both as text, with at least two significant digits. The texts are alike if the numbers differ only by rounding.
    """
    alike = number(first), number(second)
    if math.isclose(first, second, rel_tol=_EQUAL):
        return alike
    texts = ((number(first, digits), number(second, digits)) for digits in range(2, 8))
    return next((pair for pair in texts if pair[0] != pair[1]), alike)


def signed(value: float) -> str:
    """Format a number with its sign: `+0.027`."""
    return number(value) if value < ZERO else f"+{number(value)}"


def percent(value: float) -> str:
    """Format a share in percent: `39%` for 0.39."""
    return f"{number(100 * value)}%"


__all__ = [
    "FIRST_TOKEN",
    "HIDDEN_EMBEDDING",
    "LOSS",
    "MISSING",
    "NEAREST",
    "OUTPUT_INPUT",
    "SPREAD",
    "STREAM",
    "ZERO",
    "differences",
    "gradient_ratio",
    "key_numbers",
    "key_numbers_of",
    "mean_of_known",
    "mean_share_of_sublayers",
    "number",
    "percent",
    "read_same_tokens",
    "shares_of_weight",
    "signed",
    "sublayers_with_choice",
    "told_apart",
]
