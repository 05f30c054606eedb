"""Describe the findings of an inspection, or of two that are compared, in sentences with numbers.

Every sentence depends on measurements alone. If a measurement is missing, its sentence is left out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from attnres.utils.wording import counted

from .axis import DepthAxis
from .inspection import LABELS, Inspection
from .key_numbers import (
    FIRST_TOKEN,
    HIDDEN_EMBEDDING,
    MISSING,
    NEAREST,
    OUTPUT_INPUT,
    SPREAD,
    ZERO,
    gradient_ratio,
    key_numbers_of,
    mean_of_known,
    mean_share_of_sublayers,
    number,
    percent,
    read_same_tokens,
    shares_of_weight,
    signed,
    sublayers_with_choice,
    told_apart,
)

_CONSTANT = 1e-5  # a difference of weights up to this is a rounding error
_GROWS = 2.0  # a stream grows if it ends at this multiple of the embedding's magnitude, or above


@dataclass(frozen=True)
class Section:
    """The sentences on one subject.

    Attributes:
        title: The subject.
        models: For each model, the sentences about it.
        comparison: A sentence about both models; empty if there is one model, or nothing to compare.
    """

    title: str
    models: list[list[str]]
    comparison: str = ""


def overview(inspections: Sequence[Inspection]) -> list[Section]:
    """Describe one inspection, or two inspections and their differences.

    Args:
        inspections: One inspection or two.

    Returns:
        A section for each subject that has findings.
    """
    is_comparison = len(inspections) == 2
    sections = [
        Section(title, [describe(i) for i in inspections], compare(*inspections) if is_comparison else "")
        for title, describe, compare in (
            ("Weights of the sources", _describe_reads, _compare_reads),
            ("Magnitudes and gradients", _describe_magnitudes, _compare_magnitudes),
            ("Use of the sources", _describe_interventions, _compare_interventions),
            ("Attention sinks", _describe_sinks, _compare_sinks),
        )
    ]
    return [section for section in sections if any(section.models)]


# --- one model


def _describe_reads(inspection: Inspection) -> list[str]:
    """Describe how much consumers take from which source."""
    if inspection.depth_attention is None:
        return _describe_mixing(inspection)
    attention, depth = inspection.depth_attention, inspection.depth
    sentences = []

    # The output, if it has two sources or more.
    num_sources = attention.num_sources[-1]
    if num_sources > 1:
        embedding, nearest = (shares_of_weight(w, attention)[-1] for w in (attention.embedding, attention.nearest))
        nearest_name, (most_name, weight) = depth.sources[num_sources - 1], attention.most_read(-1, 1)[0]
        most = f"; most, {percent(weight / attention.mean[-1].nansum().item())}, goes to {most_name}"
        sentences.append(
            f"The output gives {percent(embedding)} of its weight to the embedding and {percent(nearest)} to "
            f"{nearest_name}, the nearest source{'' if most_name in ('embedding', nearest_name) else most}; an even "
            f"share would be {percent(1 / num_sources)}."
        )

    # The sublayers that have two sources or more, and their differences by kind.
    sublayers = sublayers_with_choice(inspection)
    if sublayers:
        even = sum(1 / attention.num_sources[sublayer] for sublayer in sublayers) / len(sublayers)
        sentences.append(
            f"Sublayers give {percent(mean_share_of_sublayers(inspection, 'nearest'))} of their weight to the nearest "
            f"source and {percent(mean_share_of_sublayers(inspection, 'embedding'))} to the embedding, on average over "
            f"the {len(sublayers)} that have two sources or more; an even share would be {percent(even)}."
        )
        by_kind = {kind: [s for s in sublayers if depth.kind(s) == kind] for kind in depth.kinds}
        if len(by_kind) == 2 and all(by_kind.values()):
            if attention.distance.max() > _CONSTANT:
                (first, first_distance), (second, second_distance) = (
                    (kind, percent(attention.distance[members].mean().item())) for kind, members in by_kind.items()
                )
                sentences.append(
                    f"To make the weights uniform, {first_distance} of the weight would have to move in {first} "
                    f"sublayers and {second_distance} in {second} sublayers, on average."
                )
            else:
                sentences.append("All weights are uniform.")
    return [*sentences, _describe_spread(attention.spread, depth, depth.sources, sublayers)]


def _describe_mixing(inspection: Inspection) -> list[str]:
    """Describe how much of which output consumers get, for a model without depth attention."""
    depth, mean = inspection.depth, inspection.mixing.mean
    entries = mean[_lower_triangle(mean)]
    sentences = ["The residual connection has no depth attention, so its depth-mixing matrix is shown."]
    if (entries - 1).abs().max() <= _CONSTANT and inspection.mixing.spread.max() <= _CONSTANT:
        return [*sentences, "Every reader gets the plain sum of the embedding and of all outputs before it."]
    sentences.append(
        f"The output reads the embedding with a weight of {number(mean[-1, 0].item())} and {depth.outputs[-1]}, the "
        f"last sublayer, with {number(mean[-1, -1].item())}; over the matrix, weights lie between "
        f"{number(entries.min().item())} and {number(entries.max().item())}, as means over tokens."
    )
    spread = inspection.mixing.spread.where(_lower_triangle(mean), math.nan)
    return [*sentences, _describe_spread(spread, depth, depth.outputs, range(len(mean)))]


def _describe_spread(spread: Tensor, depth: DepthAxis, sources: Sequence[str], consumers: Sequence[int]) -> str:
    """Describe whether weights differ from token to token.

    Args:
        spread: The standard deviations over tokens, `[L + 1, sources]`; NaN where there is no weight.
        depth: The depth axis of the model.
        sources: The names of the columns.
        consumers: The rows to average.
    """
    known = spread.nan_to_num(0)
    if known.max() <= _CONSTANT:
        return "Weights are the same for every token."
    consumer, source = divmod(int(known.argmax()), known.shape[1])
    where = f"{_with_article(depth.consumers[consumer])} reads {_with_article(sources[source])}"
    average = number(mean_of_known(spread[[*consumers]]))
    return (
        f"Weights differ from token to token: their standard deviation is {average} on average, and largest, "
        f"{number(known.max().item())}, where {where}."
    )


def _describe_magnitudes(inspection: Inspection) -> list[str]:
    """Describe how the stream and the gradients change with depth, and how large the largest value is."""
    magnitudes, depth = inspection.magnitudes, inspection.depth
    stream, outputs = magnitudes.stream, depth.outputs
    # In blocks of one, outputs are not summed: what stands for the stream is one output at a time.
    stream_name = "the stream" if magnitudes.has_stream else "single outputs"
    first, last, peak = stream[0].item(), stream[-1].item(), int(stream.argmax())
    output_input = number(key_numbers_of(inspection)[OUTPUT_INPUT])
    read_by_output = f"The mixture that the output reads has {output_input} times the magnitude of the embedding."
    if depth.block_size > 1 and not magnitudes.has_stream:
        ends = [depth.members(source)[-1] for source in range(1, len(depth.sources))]
        sums = sorted((stream[end].item(), depth.sources[source]) for source, end in enumerate(ends, 1))
        (least, least_name), (most, most_name) = sums[0], sums[-1]
        blocks = (
            f"The sums of whole blocks have magnitudes from {number(least)} ({least_name}) to {number(most)} "
            f"({most_name})"
            if len(sums) > 1
            else f"The sum of the block has a magnitude of {number(most)}"
        )
        sentences = [f"{blocks}; that of the embedding is {number(first)}.", read_by_output]
    elif last >= _GROWS * first > 0:
        with_peak = f", with its largest, {number(stream[peak].item())}, after {outputs[peak]}"
        sentences = [
            f"The magnitude of {stream_name} grows {number(last / first)} times with depth, from {number(first)} at "
            f"the embedding to {number(last)} after {outputs[-1]}{with_peak if peak < len(outputs) - 1 else ''}."
        ]
    else:
        least = int(stream.argmin())
        sentences = [
            f"The magnitude of {stream_name} lies between {number(stream[least].item())} ({outputs[least]}) and "
            f"{number(stream[peak].item())} ({outputs[peak]}).",
            read_by_output,
        ]

    count, ratio = gradient_ratio(inspection)
    if not math.isnan(ratio):
        early = f"The first {count} sublayers get gradients" if count > 1 else "The first sublayer gets gradients"
        late = f"the last {count}, on average" if count > 1 else "the last"
        sentences.append(f"{early} {number(ratio)} times as large as those of {late}.")

    largest = int(magnitudes.largest.argmax())
    sentences.append(
        f"The largest value that a reader meets is {number(magnitudes.largest[largest].item())} times the median one "
        f"({depth.consumers[largest]}); massive activations are known to reach 1,000 times and more."
    )
    return sentences


def _describe_interventions(inspection: Inspection) -> list[str]:
    """Describe on which source, and on which reader's weights, the loss depends most."""
    interventions, depth = inspection.interventions, inspection.depth
    if interventions is None:
        return []
    loss, hidden = interventions.loss, interventions.hidden
    tokens = counted(interventions.tokens, "predicted token")
    sentences = [f"The loss is {number(loss, 4)} nats per token, over {tokens}."]

    most, *others = hidden.argsort(descending=True).tolist()
    if hidden[most] > 0:
        rise, next_most = number(hidden[most].item()), ""
        if others:
            name = _with_article(depth.sources[others[0]])
            rise, next_rise = told_apart(hidden[most].item(), hidden[others[0]].item())
            next_most = f", more than any other source; next is {name} ({next_rise} nats)"
            if rise == next_rise:
                next_most = f", and so does hiding {name}; no source costs more"
        sentences.append(f"Hiding {_with_article(depth.sources[most])} costs {rise} nats{next_most}.")
    else:
        sentences.append("No source raises the loss when it is hidden.")

    if inspection.depth_attention is not None and inspection.depth_attention.distance.max() <= _CONSTANT:
        return [*sentences, "All weights are uniform already."]
    uniform = interventions.uniform.nan_to_num(-math.inf)
    consumer = int(uniform.argmax())
    if math.isfinite(uniform[consumer]) and uniform[consumer] > 0:
        sentences.append(
            f"Among readers, making the weights of {_with_article(depth.consumers[consumer])} uniform costs most: "
            f"{number(uniform[consumer].item())} nats."
        )
    elif math.isfinite(uniform[consumer]):
        sentences.append("Making the weights of any one reader uniform does not raise the loss.")
    return sentences


def _describe_sinks(inspection: Inspection) -> list[str]:
    """Describe how much attention the first token gets."""
    sinks = inspection.sinks
    layers = [layer for layer, value in enumerate(sinks.mean.tolist()) if not math.isnan(value)]
    if not layers:
        return ["All attention over the sequence is linear: it has no weights, and so no sinks to measure."]
    counted_layers = counted(len(layers), "layer")
    if len(layers) < len(sinks.mean):
        verb = "is" if len(layers) == 1 else "are"
        counted_layers = f"the {len(layers)} of {counted(len(sinks.mean), 'layer')} that {verb} not linear"
    most = max(layers, key=lambda layer: sinks.mean[layer].item())
    strongest = percent(sinks.strongest[most].item())
    return [
        f"Later tokens give {percent(mean_of_known(sinks.mean))} of their attention to the first token, on average "
        f"over {counted_layers}; uniform attention would give it {percent(sinks.uniform)}.",
        f"Layer {most} gives it most, {percent(sinks.mean[most].item())}, and its strongest head {strongest}."
        if len(layers) > 1
        else f"The strongest head of layer {most} gives it {strongest}.",
    ]


# --- two models


def _compare_reads(one: Inspection, other: Inspection) -> str:
    if one.depth_attention is None or other.depth_attention is None:
        return _compare_mixing(one, other)
    nearest = _in_both(percent, NEAREST, one, other)
    spread = _in_both(number, SPREAD, one, other)
    return f"Sublayers give the nearest source {nearest}; the standard deviation over tokens is {spread} on average."


def _compare_mixing(one: Inspection, other: Inspection) -> str:
    first, second = one.mixing.mean, other.mixing.mean
    if first.shape != second.shape:
        return "Their depths differ, so their depth-mixing matrices cannot be compared."
    difference = (second - first).abs()
    if difference.max() <= _CONSTANT:
        is_plain_sum = (first - 1)[_lower_triangle(first)].abs().max() <= _CONSTANT
        remark = ": every reader gets the plain sum of the embedding and of all outputs before it"
        return f"Their depth-mixing matrices are the same{remark if is_plain_sum else ''}."
    consumer, output = divmod(int(difference.argmax()), len(difference))
    in_one, in_other = told_apart(first[consumer, output].item(), second[consumer, output].item())
    return (
        f"Their depth-mixing matrices differ most in how much of {_with_article(one.depth.outputs[output])} "
        f"{_with_article(one.depth.consumers[consumer])} gets: {in_one} in A and {in_other} in B."
    )


def _compare_magnitudes(one: Inspection, other: Inspection) -> str:
    ratios = _in_both(number, OUTPUT_INPUT, one, other)
    inputs = f"The magnitude of the mixture that the output reads, over the embedding, is {ratios}"
    gradients = [number(gradient_ratio(inspection)[1]) for inspection in (one, other)]
    if MISSING in gradients:
        return f"{inputs}."
    return (
        f"{inputs}; the first sublayers get {gradients[0]} times the gradients of the last in A and {gradients[1]} in "
        "B."
    )


def _compare_interventions(one: Inspection, other: Inspection) -> str:
    if one.interventions is None or other.interventions is None:
        return ""
    rises = _in_both(signed, HIDDEN_EMBEDDING, one, other, "nats ")
    hidden = f"hiding the embedding changes the loss by {rises}."
    if not read_same_tokens(one, other):
        return f"The models read different tokens, so their losses cannot be compared; {hidden}"
    difference = other.interventions.loss - one.interventions.loss
    if abs(difference) < ZERO:
        return f"On the same tokens both have the same loss; {hidden}"
    direction = "lower" if difference < 0 else "higher"
    return f"On the same tokens the loss of B is {number(abs(difference))} nats {direction} than that of A; {hidden}"


def _compare_sinks(one: Inspection, other: Inspection) -> str:
    first, second = (key_numbers_of(inspection)[FIRST_TOKEN] for inspection in (one, other))
    if math.isnan(first) or math.isnan(second):
        return ""
    return f"The first token gets {percent(first)} of the attention in A and {percent(second)} in B."


def _in_both(style: Callable[[float], str], name: str, one: Inspection, other: Inspection, unit: str = "") -> str:
    """Format a key number of both models: `0.11 in A and 0.20 in B`, with `unit` after each number."""
    values = [f"{style(key_numbers_of(i)[name])} {unit}in {label}" for label, i in zip(LABELS, (one, other))]
    return " and ".join(values)


# --- parts of sentences


def _lower_triangle(matrix: Tensor) -> Tensor:
    """Return the boolean mask of a square matrix's entries on and below the diagonal."""
    return matrix.new_ones(matrix.shape).tril().bool()


def _with_article(name: str) -> str:
    return f"the {name}" if name in ("embedding", "output") else name


__all__ = ["Section", "overview"]
