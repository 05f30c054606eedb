"""What an inspection found, in plain words with their numbers, and a table of the numbers that sum it up.

Every sentence is made from measurements alone. Where one is missing, so is its sentence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnres.utils.wording import counted

from .inspection import Inspection
from .names import Depth

LABELS = ("A", "B")  # what two models are called where they are compared
MISSING = "\N{EN DASH}"
_CONSTANT = 1e-5  # a standard deviation over tokens up to this is rounding
_LOSS = "loss, in nats per token"
_STREAM = "largest size of the stream, over the embedding"
_READ = "size of what the output reads, over the embedding"
_NOTHING = 1e-6  # numbers below are rounding
_ROUNDING = 1e-5  # so is what two numbers differ by, up to this part of them
_GROWS = 2.0  # times, from where on a stream that ends near its largest magnitude is said to grow


@dataclass(frozen=True)
class Section:
    """Sentences on one matter.

    Attributes:
        title: the matter.
        models: of each model its sentences, in turn.
        comparison: a sentence on both models; empty where there is one model or nothing to compare.
    """

    title: str
    models: list[list[str]]
    comparison: str = ""


def overview(inspections: Sequence[Inspection]) -> list[Section]:
    """Sentences on one inspection, or on two and how they compare."""
    two = len(inspections) == 2
    sections = [
        Section(title, [of(inspection) for inspection in inspections], compared(*inspections) if two else "")
        for title, of, compared in _SECTIONS
    ]
    return [section for section in sections if any(section.models)]


def differences(one: Inspection, other: Inspection) -> list[tuple[str, float]]:
    """Name -> how much larger the key number of the other is, 0 for rounding, and NaN where that says nothing."""
    found = {}
    for name, (first, second) in key_numbers([one, other]):
        found[name] = 0.0 if math.isclose(first, second, rel_tol=_ROUNDING) else second - first
    if not _same_tokens(one, other):
        found[_LOSS] = math.nan
    if one.depth.block_size != other.depth.block_size or bool(one.depth_attention) != bool(other.depth_attention):
        found[_STREAM] = math.nan  # a residual stream, and the sum of a block
    return list(found.items())


def key_numbers(inspections: Sequence[Inspection]) -> list[tuple[str, list[float]]]:
    """Name -> the number of each inspection, NaN where it has none; what none has is left out."""
    columns = [_numbers(inspection) for inspection in inspections]
    rows = [(name, [column[name] for column in columns]) for name in columns[0]]
    return [(name, values) for name, values in rows if not all(math.isnan(value) for value in values)]


def number(value: float, digits: int = 2) -> str:
    """So many digits that count, and all of those before the point: `0.027`, `6.4`, `1,204`."""
    if not math.isfinite(value):
        return MISSING if math.isnan(value) else str(value).replace("inf", "\N{INFINITY}")
    if abs(value) < _NOTHING:
        return "0"
    value = float(f"{value:.{digits - 1}e}") if abs(value) < 10**digits else round(value)
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(places, 0)}f}".replace("-", "\N{MINUS SIGN}")


def signed(value: float) -> str:
    """[`number`] with its sign."""
    return number(value) if value < _NOTHING else f"+{number(value)}"


def share(value: float) -> str:
    """The same in percent."""
    return f"{number(100 * value)}%"


def _numbers(inspection: Inspection) -> dict[str, float]:
    attention, sizes, interventions = inspection.depth_attention, inspection.magnitudes, inspection.interventions
    several, spread = _readers_of_several(inspection), (attention or inspection.mixing).spread
    return {
        _LOSS: interventions.loss if interventions else math.nan,
        "rise of the loss with the embedding hidden": interventions.hidden[0].item() if interventions else math.nan,
        "weight of the output on the embedding": _shares(attention.embedding, attention)[-1] if attention else math.nan,
        "weight of the output on the nearest source": _shares(attention.nearest, attention)[-1]
        if attention
        else math.nan,
        "weight of sublayers on the embedding": _mean_share(inspection, "embedding"),
        "weight of sublayers on the nearest source": _mean_share(inspection, "nearest"),
        "distance of their weights from even ones": attention.distance[several].mean().item()
        if attention
        else math.nan,
        "standard deviation of weights over tokens": _mean(spread[several]),
        _READ: (sizes.inputs[-1] / sizes.inputs[0]).item(),
        _STREAM: (sizes.stream.max() / sizes.stream[0]).item(),
        "gradients, first sublayers over last": _gradient_ratio(inspection)[1],
        "largest value read, over the median": sizes.largest.max().item(),
        "attention on the first token": _mean(inspection.sinks.mean),
    }


def _depth(inspection: Inspection) -> list[str]:
    """What readers take from sources."""
    if inspection.depth_attention is None:
        return _mixing(inspection)
    attention, depth = inspection.depth_attention, inspection.depth
    several, count = _readers_of_several(inspection), attention.num_sources[-1]
    found = []
    if count > 1:
        embedding, nearest = (_shares(of, attention)[-1] for of in (attention.embedding, attention.nearest))
        last, (most, weight) = depth.sources[count - 1], attention.most_read(len(depth.readers) - 1, 1)[0]
        elsewhere = f"; most, {share(weight / _total(attention, -1))}, goes to {most}"
        found.append(
            f"The output gives {share(embedding)} of its weight to the embedding and {share(nearest)} to {last}, the "
            f"nearest source{'' if most in ('embedding', last) else elsewhere}; an even share would be "
            f"{share(1 / count)}."
        )
    if several:
        even = sum(1 / attention.num_sources[reader] for reader in several) / len(several)
        found.append(
            f"Sublayers give {share(_mean_share(inspection, 'nearest'))} of their weight to the nearest source and "
            f"{share(_mean_share(inspection, 'embedding'))} to the embedding, on average over the {len(several)} that "
            f"have two sources or more; an even share would be {share(even)}."
        )
        kinds = [(kind, [reader for reader in several if depth.kind(reader) == kind]) for kind in depth.kinds]
        if len(kinds) == 2 and all(readers for _, readers in kinds):
            far = [share(attention.distance[readers].mean().item()) for _, readers in kinds]
            found.append(
                f"To make the weights even, {far[0]} of the weight would have to move in {kinds[0][0]} sublayers and "
                f"{far[1]} in {kinds[1][0]} sublayers, on average."
                if attention.distance.max() > _CONSTANT
                else "All weights are even."
            )
    return [*found, _by_token(attention.spread, depth, depth.sources, several)]


def _mixing(inspection: Inspection) -> list[str]:
    depth, mean = inspection.depth, inspection.mixing.mean
    held = mean[_lower(mean)]
    found = ["The residual connection has no depth attention, so its depth-mixing matrix is shown."]
    if (held - 1).abs().max() <= _CONSTANT and inspection.mixing.spread.max() <= _CONSTANT:
        return [*found, "Every reader gets the plain sum of the embedding and of all outputs before it."]
    found.append(
        f"The output reads the embedding with a weight of {number(mean[-1, 0].item())} and {depth.outputs[-1]}, the "
        f"last sublayer, with {number(mean[-1, -1].item())}; over the matrix, weights lie between "
        f"{number(held.min().item())} and {number(held.max().item())}, as means over tokens."
    )
    spread = inspection.mixing.spread.where(_lower(mean), math.nan)
    return [*found, _by_token(spread, depth, depth.outputs, range(len(mean)))]


def _by_token(spread: Tensor, depth: Depth, sources: Sequence[str], readers: Sequence[int]) -> str:
    """Whether weights differ from token to token; `spread` is NaN where there is no weight."""
    known = spread.nan_to_num(0)
    if known.max() <= _CONSTANT:
        return "Weights are the same for every token."
    reader, source = divmod(known.argmax().item(), known.shape[1])
    where = f"{_named(depth.readers[reader])} reads {_named(sources[source])}"
    return (
        f"Weights differ from token to token: their standard deviation is {number(_mean(spread[list(readers)]))} on "
        f"average, and largest, {number(known.max().item())}, where {where}."
    )


def _magnitudes(inspection: Inspection) -> list[str]:
    sizes, depth, attention = inspection.magnitudes, inspection.depth, inspection.depth_attention
    stream, outputs = sizes.stream, depth.outputs
    name = "the stream" if attention is None else "single outputs"
    first, last, largest = stream[0].item(), stream[-1].item(), stream.argmax().item()
    read = f"What the output reads is {number(_numbers(inspection)[_READ])} times the size of the embedding."
    if depth.block_size > 1:
        ends = [depth.members(source)[-1] for source in range(1, len(depth.sources))]
        sums = sorted((stream[end].item(), depth.sources[place]) for place, end in enumerate(ends, 1))
        (least, small), (most, large) = sums[0], sums[-1]
        said = f"The sums of whole blocks have magnitudes from {number(least)} ({small}) to {number(most)} ({large})"
        if len(sums) == 1:
            said = f"The sum of the block has a magnitude of {number(most)}"
        found = [f"{said}; that of the embedding is {number(first)}.", read]
    elif last >= _GROWS * first > 0:
        peak = f", with its largest, {number(stream[largest].item())}, after {outputs[largest]}"
        found = [
            f"The magnitude of {name} grows {number(last / first)} times with depth, from {number(first)} at the "
            f"embedding to {number(last)} after {outputs[-1]}{peak if largest < len(outputs) - 1 else ''}."
        ]
    else:
        least = stream.argmin().item()
        found = [
            f"The magnitude of {name} lies between {number(stream[least].item())} ({outputs[least]}) and "
            f"{number(stream[largest].item())} ({outputs[largest]}).",
            read,
        ]
    count, ratio = _gradient_ratio(inspection)
    if not math.isnan(ratio):
        ends = f"The first {count} sublayers get gradients" if count > 1 else "The first sublayer gets gradients"
        whose = f"the last {count}, on average" if count > 1 else "the last"
        found.append(f"{ends} {number(ratio)} times as large as those of {whose}.")
    largest = sizes.largest.argmax().item()
    found.append(
        f"The largest value that a reader meets is {number(sizes.largest[largest].item())} times the median one "
        f"({depth.readers[largest]}); massive activations are known to reach 1,000 times and more."
    )
    return found


def _interventions(inspection: Inspection) -> list[str]:
    if inspection.interventions is None:
        return []
    found, depth = inspection.interventions, inspection.depth
    said = [f"The loss is {number(found.loss, 4)} nats per token, over {counted(found.tokens, 'predicted token')}."]
    order = found.hidden.argsort(descending=True).tolist()
    if found.hidden[order[0]] > 0:
        more = f", more than any other source; next is {_named(depth.sources[order[1]])}" if len(order) > 1 else ""
        next_one = f" ({_rise(found.hidden[order[1]].item())})" if len(order) > 1 else ""
        cost = _rise(found.hidden[order[0]].item())
        said.append(f"Hiding {_named(depth.sources[order[0]])} costs {cost}{more}{next_one}.")
    else:
        said.append("No source raises the loss when it is hidden.")
    if inspection.depth_attention is not None and inspection.depth_attention.distance.max() <= _CONSTANT:
        return [*said, "All weights are uniform already."]
    uniform = found.uniform.nan_to_num(-math.inf)
    reader = uniform.argmax().item()
    if math.isfinite(uniform[reader]) and uniform[reader] > 0:
        said.append(
            f"Among readers, making the weights of {_named(depth.readers[reader])} uniform costs most: "
            f"{_rise(uniform[reader].item())}."
        )
    elif math.isfinite(uniform[reader]):
        said.append("Making the weights of any one reader uniform does not raise the loss.")
    return said


def _sinks(inspection: Inspection) -> list[str]:
    sinks = inspection.sinks
    layers = [layer for layer, value in enumerate(sinks.mean.tolist()) if not math.isnan(value)]
    if not layers:
        return ["All attention over the sequence is linear: it has no weights, and so no sinks to measure."]
    linear = len(sinks.mean) - len(layers)
    are = "is" if len(layers) == 1 else "are"
    of = f"the {len(layers)} of {len(sinks.mean)} layers that {are} not linear" if linear else f"{len(layers)} layers"
    most = max(layers, key=lambda layer: sinks.mean[layer].item())
    return [
        f"Later tokens give {share(_mean(sinks.mean))} of their attention to the first token, on average over {of}; "
        f"even attention would give it {share(sinks.uniform)}.",
        f"Layer {most} gives it most, {share(sinks.mean[most].item())}, and its strongest head "
        f"{share(sinks.strongest[most].item())}.",
    ]


def _compared_depth(one: Inspection, other: Inspection) -> str:
    if one.depth_attention is None or other.depth_attention is None:
        return _compared_mixing(one, other)
    nearest = _both(share, "weight of sublayers on the nearest source", one, other)
    spread = _both(number, "standard deviation of weights over tokens", one, other)
    return f"Sublayers give the nearest source {nearest}; the standard deviation over tokens is {spread} on average."


def _compared_mixing(one: Inspection, other: Inspection) -> str:
    matrices = [of.mixing.mean for of in (one, other)]
    if matrices[0].shape != matrices[1].shape:
        return "Their depths differ, so their depth-mixing matrices do not compare."
    apart = (matrices[1] - matrices[0]).abs()
    if apart.max() <= _CONSTANT:
        is_plain = (matrices[0] - 1)[_lower(matrices[0])].abs().max() <= _CONSTANT
        what = ": every reader gets the plain sum of the embedding and of all outputs before it" if is_plain else ""
        return f"Their depth-mixing matrices are the same{what}."
    reader, output = divmod(apart.argmax().item(), len(apart))
    first, second = (number(matrix[reader, output].item()) for matrix in matrices)
    return (
        f"Their depth-mixing matrices differ most in how much of {_named(one.depth.outputs[output])} "
        f"{_named(one.depth.readers[reader])} gets: {first} in A and {second} in B."
    )


def _compared_magnitudes(one: Inspection, other: Inspection) -> str:
    read = _both(number, _READ, one, other)
    said = f"What the output reads, over the size of the embedding, is {read}"
    gradients = [number(_gradient_ratio(of)[1]) for of in (one, other)]
    if MISSING in gradients:
        return f"{said}."
    return (
        f"{said}; the first sublayers get {gradients[0]} times the gradients of the last in A and {gradients[1]} in B."
    )


def _compared_interventions(one: Inspection, other: Inspection) -> str:
    if one.interventions is None or other.interventions is None:
        return ""
    hidden = _both(signed, "rise of the loss with the embedding hidden", one, other, "nats ")
    costs = f"hiding the embedding changes the loss by {hidden}."
    if not _same_tokens(one, other):
        return f"The models read different tokens, so their losses do not compare; {costs}"
    difference = other.interventions.loss - one.interventions.loss
    if abs(difference) < _NOTHING:
        return f"On the same tokens both have the same loss; {costs}"
    lower = "lower" if difference < 0 else "higher"
    return f"On the same tokens the loss of B is {number(abs(difference))} nats {lower} than that of A; {costs}"


def _compared_sinks(one: Inspection, other: Inspection) -> str:
    name = "attention on the first token"
    if any(math.isnan(_numbers(of)[name]) for of in (one, other)):
        return ""
    first, second = (share(_numbers(of)[name]) for of in (one, other))
    return f"The first token gets {first} of the attention in A and {second} in B."


def _same_tokens(one: Inspection, other: Inspection) -> bool:
    """Whether losses are on the same tokens, as far as text, cuts and the words of the passage tell."""
    first, second = ((of.text, of.passage.words, of.interventions and of.interventions.tokens) for of in (one, other))
    return first == second


def _both(shown, name: str, one: Inspection, other: Inspection, unit: str = "") -> str:
    values = [f"{shown(_numbers(of)[name])} {unit}in {label}" for label, of in zip(LABELS, (one, other))]
    return " and ".join(values)


def _readers_of_several(inspection: Inspection) -> list[int]:
    """The sublayers, without the output, that have two sources or more."""
    attention, length = inspection.depth_attention, inspection.depth.num_sublayers
    return [reader for reader in range(length) if attention is None or attention.num_sources[reader] > 1]


def _shares(weights: Tensor, attention) -> list[float]:
    """Weights `[L + 1]` as shares of what each reader gives in all, which is one unless weights are sigmoids."""
    return (weights / attention.mean.nansum(1)).tolist()


def _total(attention, reader: int) -> float:
    return attention.mean[reader].nansum().item()


def _mean_share(inspection: Inspection, name: str) -> float:
    attention, several = inspection.depth_attention, _readers_of_several(inspection)
    if attention is None or not several:
        return math.nan
    shares = _shares(getattr(attention, name), attention)
    return sum(shares[reader] for reader in several) / len(several)


def _gradient_ratio(inspection: Inspection) -> tuple[int, float]:
    """A quarter of the sublayers, and the mean gradient of the first ones over that of the last ones."""
    gradients, count = inspection.magnitudes.gradients[1:], max(1, inspection.depth.num_sublayers // 4)
    return count, (gradients[:count].mean() / gradients[-count:].mean()).item()


def _lower(matrix: Tensor) -> Tensor:
    """Where a square matrix has entries that count: up to the diagonal."""
    return matrix.new_ones(matrix.shape).tril().bool()


def _mean(values: Tensor) -> float:
    return values.nanmean().item()


def _rise(nats: float) -> str:
    return f"{number(nats)} nats"


def _named(name: str) -> str:
    return f"the {name}" if name in ("embedding", "output") else name


_SECTIONS = (
    ("What is read from where", _depth, _compared_depth),
    ("Magnitudes and gradients", _magnitudes, _compared_magnitudes),
    ("What is used", _interventions, _compared_interventions),
    ("Attention sinks", _sinks, _compared_sinks),
)

__all__ = ["LABELS", "MISSING", "Section", "differences", "key_numbers", "number", "overview", "share"]
