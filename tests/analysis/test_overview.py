"""The overview describes the findings of an inspection in the expected sentences and numbers."""

from dataclasses import replace
from math import isnan

import pytest
import torch

from attnres.analysis.key_numbers import differences, key_numbers, number, percent
from attnres.analysis.overview import overview

from .inspections import NAN, block_attn_res, full_attn_res, standard
from .measured import depth


def sentences(*inspections) -> dict[str, tuple]:
    """Return the sentences about each model, and the comparison, by the title of the section."""
    return {section.title: (section.models, section.comparison) for section in overview(inspections)}


def changed(inspection, part: str, **fields):
    """Return a copy of an inspection with other fields in one of its measurements."""
    return replace(inspection, **{part: replace(getattr(inspection, part), **fields)})


def test_reads_are_described_by_shares_of_the_weight():
    assert sentences(block_attn_res())["Weights of the sources"] == (
        [
            [
                "The output gives 38% of its weight to the embedding and 12% to block 2, the nearest source; most, "
                "50%, goes to block 1; an even share would be 33%.",
                "Sublayers give 42% of their weight to the nearest source and 50% to the embedding, on average over "
                "the 3 that have two sources or more; an even share would be 44%.",
                "To make the weights uniform, 0% of the weight would have to move in attention sublayers and 21% in "
                "MLP sublayers, on average.",
                "Weights differ from token to token: their standard deviation is 0.11 on average, and largest, 0.25, "
                "where MLP 1 reads block 1.",
            ]
        ],
        "",
    )


def test_weights_that_do_not_sum_to_one_are_described_by_shares_of_their_sum():
    inspection = block_attn_res()
    doubled = changed(inspection, "depth_attention", mean=2 * inspection.depth_attention.mean)
    assert sentences(doubled)["Weights of the sources"] == sentences(inspection)["Weights of the sources"]


def test_weights_that_are_the_same_for_every_token_are_described_so():
    inspection = block_attn_res()
    still = changed(inspection, "depth_attention", spread=1e-9 * inspection.depth_attention.spread)
    (lines,), _ = sentences(still)["Weights of the sources"]
    assert lines[-1] == "Weights are the same for every token."


def test_a_residual_stream_is_described_as_a_plain_sum():
    assert sentences(standard())["Weights of the sources"] == (
        [
            [
                "The residual connection has no depth attention, so its depth-mixing matrix is shown.",
                "Every reader gets the plain sum of the embedding and of all outputs before it.",
            ]
        ],
        "",
    )


def test_another_connection_is_described_by_the_entries_of_its_matrix():
    inspection = standard()
    mean, spread = inspection.mixing.mean.clone(), inspection.mixing.spread.clone()
    mean[-1, 0], mean[2, 1], mean[-1, -1], spread[3, 0] = 0.5, -0.25, 1.5, 0.3
    (lines,), _ = sentences(changed(inspection, "mixing", mean=mean, spread=spread))["Weights of the sources"]
    assert lines[1:] == [
        "The output reads the embedding with a weight of 0.50 and MLP 1, the last sublayer, with 1.5; over the matrix, "
        "weights lie between \N{MINUS SIGN}0.25 and 1.5, as means over tokens.",
        "Weights differ from token to token: their standard deviation is 0.020 on average, and largest, 0.30, where "
        "MLP 1 reads the embedding.",
    ]


def test_a_stream_that_ends_far_above_the_embedding_grows():
    assert sentences(standard())["Magnitudes and gradients"] == (
        [
            [
                "The magnitude of the stream grows 6.5 times with depth, from 0.50 at the embedding to 3.2 after "
                "MLP 1.",
                "The first sublayer gets gradients 3.2 times as large as those of the last.",
                "The largest value that a reader meets is 41 times the median one (attention 0); massive activations "
                "are known to reach 1,000 times and more.",
            ]
        ],
        "",
    )


@pytest.mark.parametrize(
    ("make_inspection", "expected"),
    [
        (
            block_attn_res,
            "The sums of whole blocks have magnitudes from 0.20 (block 1) to 0.90 (block 2); that of the embedding is "
            "0.50.",
        ),
        (
            lambda: full_attn_res(2, 8),
            "The magnitude of single outputs lies between 0.20 (MLP 0) and 0.90 (MLP 1).",
        ),
    ],
)
def test_magnitudes_that_do_not_grow_lie_between_two_numbers(make_inspection, expected):
    stream = torch.tensor([0.5, 0.3, 0.2, 0.4, 0.9], dtype=torch.float64)
    (lines,), _ = sentences(changed(make_inspection(), "magnitudes", stream=stream))["Magnitudes and gradients"]
    assert lines[0] == expected


def test_gradients_that_were_not_measured_have_no_sentence():
    without = changed(block_attn_res(), "magnitudes", gradients=torch.full((5,), NAN).double())
    (lines,), _ = sentences(without)["Magnitudes and gradients"]
    assert len(lines) == 3 and not [line for line in lines if "gradient" in line or "nan" in line]
    _, comparison = sentences(without, standard())["Magnitudes and gradients"]
    assert comparison == (
        "The magnitude of the mixture that the output reads, over the embedding, is 1.0 in A and 1.0 in B."
    )


def test_gradients_of_many_sublayers_are_those_of_the_first_and_last_quarter():
    (lines,), _ = sentences(full_attn_res(4, 8))["Magnitudes and gradients"]
    # The gradients of the eight sublayers go from 7.25 down to 2 in equal steps.
    assert lines[-2] == "The first 2 sublayers get gradients 2.9 times as large as those of the last 2, on average."


def test_interventions_are_described_by_the_largest_rises():
    assert sentences(block_attn_res())["Use of the sources"] == (
        [
            [
                "The loss is 1.833 nats per token, over 60 predicted tokens.",
                "Hiding the embedding costs 0.69 nats, more than any other source; next is block 1 (0.25 nats).",
                "Among readers, making the weights of MLP 1 uniform costs most: 0.12 nats.",
            ]
        ],
        "",
    )


@pytest.mark.parametrize(
    ("rise", "expected"),
    [
        (0.6904, "Hiding the embedding costs 0.691 nats, more than any other source; next is block 1 (0.690 nats)."),
        (0.6913, "Hiding the embedding costs 0.69 nats, and so does hiding block 1; no source costs more."),
    ],
)
def test_a_source_costs_most_only_if_the_numbers_show_it(rise, expected):
    inspection = block_attn_res()
    hidden = inspection.interventions.hidden.clone()
    hidden[0], hidden[1] = 0.6913, rise
    (lines,), _ = sentences(changed(inspection, "interventions", hidden=hidden))["Use of the sources"]
    assert lines[1] == expected


def test_interventions_that_cost_nothing_are_described_so():
    inspection = block_attn_res()
    hidden, uniform = inspection.interventions.hidden, inspection.interventions.uniform
    helped = changed(inspection, "interventions", hidden=-hidden.abs(), uniform=-uniform.abs())
    (lines,), _ = sentences(helped)["Use of the sources"]
    assert lines[1:] == [
        "No source raises the loss when it is hidden.",
        "Making the weights of any one reader uniform does not raise the loss.",
    ]
    with_uniform = changed(helped, "depth_attention", distance=0 * inspection.depth_attention.distance)
    assert sentences(with_uniform)["Use of the sources"][0][0][-1] == "All weights are uniform already."
    assert "All weights are uniform." in sentences(with_uniform)["Weights of the sources"][0][0]


def test_without_interventions_there_is_no_section_about_them():
    assert "Use of the sources" not in sentences(block_attn_res(interventions=None))
    _, comparison = sentences(block_attn_res(interventions=None), standard())["Use of the sources"]
    assert comparison == ""


def test_sinks_are_described_for_layers_that_have_weights():
    inspection = block_attn_res()
    one = changed(
        inspection, "sinks", mean=torch.tensor([NAN, 0.3]).double(), strongest=torch.tensor([NAN, 0.6]).double()
    )
    assert sentences(one)["Attention sinks"][0] == [
        [
            "Later tokens give 30% of their attention to the first token, on average over the 1 of 2 layers that is "
            "not linear; uniform attention would give it 4.0%.",
            "The strongest head of layer 1 gives it 60%.",
        ]
    ]
    none = changed(inspection, "sinks", mean=torch.full((2,), NAN).double(), strongest=torch.full((2,), NAN).double())
    assert sentences(none)["Attention sinks"][0] == [
        ["All attention over the sequence is linear: it has no weights, and so no sinks to measure."]
    ]
    assert sentences(none, standard())["Attention sinks"][1] == ""
    both = changed(
        inspection, "sinks", mean=torch.tensor([0.1, 0.3]).double(), strongest=torch.tensor([0.2, 0.6]).double()
    )
    assert sentences(both)["Attention sinks"][0][0][1] == "Layer 1 gives it most, 30%, and its strongest head 60%."
    alone = changed(inspection, "sinks", mean=torch.tensor([0.3]).double(), strongest=torch.tensor([0.6]).double())
    assert "on average over 1 layer;" in sentences(alone)["Attention sinks"][0][0][0]


def test_a_single_layer_has_no_plural():
    assert replace(depth(2, 2), counts_layers=True).block == "block of 1 layer"


def test_two_models_are_compared_section_by_section():
    sections = sentences(block_attn_res(), standard())
    assert {title: comparison for title, (_, comparison) in sections.items()} == {
        "Weights of the sources": "Their depth-mixing matrices are the same: every reader gets the plain sum of the "
        "embedding and of all outputs before it.",
        "Magnitudes and gradients": "The magnitude of the mixture that the output reads, over the embedding, is 1.0 in "
        "A and 1.0 in B; the first sublayers get 3.2 times the gradients of the last in A and 3.2 in B.",
        "Use of the sources": "On the same tokens the loss of B is 0.083 nats lower than that of A; hiding the "
        "embedding changes the loss by +0.69 nats in A and +2.5 nats in B.",
        "Attention sinks": "The first token gets 31% of the attention in A and 31% in B.",
    }
    assert all(len(models) == 2 for models, _ in sections.values())


def test_two_models_with_depth_attention_are_compared_by_their_weights():
    inspection = block_attn_res()
    other = changed(inspection, "depth_attention", spread=2 * inspection.depth_attention.spread)
    assert sentences(inspection, other)["Weights of the sources"][1] == (
        "Sublayers give the nearest source 42% in A and 42% in B; the standard deviation over tokens is 0.11 in A and "
        "0.21 in B on average."
    )


def test_connections_without_depth_attention_are_compared_by_their_matrices():
    one, mean = standard(), standard().mixing.mean.clone()
    mean[3, 1] = -0.5
    assert sentences(one, changed(one, "mixing", mean=mean))["Weights of the sources"][1] == (
        f"Their depth-mixing matrices differ most in how much of {one.depth.outputs[1]} {one.depth.consumers[3]} gets: "
        "1.0 in A and \N{MINUS SIGN}0.50 in B."
    )
    mean[3, 1] = 1.002
    comparison = sentences(one, changed(one, "mixing", mean=mean))["Weights of the sources"][1]
    assert comparison.endswith("gets: 1.000 in A and 1.002 in B.")
    _, comparison = sentences(full_attn_res(4, 8), standard())["Weights of the sources"]
    assert comparison == "Their depths differ, so their depth-mixing matrices cannot be compared."


def test_rounding_is_no_difference():
    one = block_attn_res()
    other = changed(one, "interventions", loss=one.interventions.loss + 1e-8)
    assert dict(differences(one, other))["loss, in nats per token"] == 0
    assert sentences(one, other)["Use of the sources"][1].startswith("On the same tokens both have the same loss;")


@pytest.mark.parametrize("inspection", [block_attn_res(), full_attn_res(2, 8)], ids=["block", "full"])
def test_a_stream_beside_depth_attention_is_called_a_stream(inspection):
    beside = changed(inspection, "magnitudes", has_stream=True)
    (lines,), _ = sentences(beside)["Magnitudes and gradients"]
    assert lines[0].startswith("The magnitude of the stream grows 6.5 times with depth")
    name = "largest magnitude of the stream, over the embedding"
    assert dict(differences(beside, beside))[name] == 0
    assert isnan(dict(differences(beside, inspection))[name])


def test_a_stream_that_ends_below_its_largest_grows_all_the_same():
    stream = torch.tensor([0.5, 1.0, 3.0, 2.5, 2.0], dtype=torch.float64)
    (lines,), _ = sentences(changed(standard(), "magnitudes", stream=stream))["Magnitudes and gradients"]
    assert lines[0].endswith("to 2.0 after MLP 1, with its largest, 3.0, after MLP 0.")


def test_losses_on_different_tokens_are_not_compared():
    one, other = block_attn_res(), standard()
    words = changed(other, "passage", words=["other", *other.passage.words[1:]])
    text = replace(other, text={**other.text, "sha256": "cd" * 32})
    few = changed(other, "interventions", tokens=30)
    assert dict(differences(one, other))["loss, in nats per token"] == pytest.approx(-0.0825)
    for different in (words, text, few):
        assert isnan(dict(differences(one, different))["loss, in nats per token"])
        assert dict(differences(one, different))["rise of the loss with the embedding hidden"] == pytest.approx(1.81)
        assert sentences(one, different)["Use of the sources"][1] == (
            "The models read different tokens, so their losses cannot be compared; hiding the embedding changes the "
            "loss by +0.69 nats in A and +2.5 nats in B."
        )


def test_key_numbers_are_missing_if_a_model_does_not_have_them():
    table = dict(key_numbers([block_attn_res(), standard()]))
    assert table["loss, in nats per token"] == [1.8325, 1.75]
    assert table["weight of the output on the embedding"] == pytest.approx([0.375, NAN], nan_ok=True)
    assert table["weight of sublayers on the nearest source"] == pytest.approx([1.25 / 3, NAN], nan_ok=True)
    assert table["attention on the first token"] == [0.3125, 0.3125]
    assert "loss, in nats per token" not in dict(key_numbers([block_attn_res(interventions=None)]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0267, "0.027"),
        (0.00012, "0.00012"),
        (6.44, "6.4"),
        (9.96, "10"),
        (99.7, "100"),
        (1203.6, "1,204"),
        (-0.31, "\N{MINUS SIGN}0.31"),
        (-1e-9, "0"),
        (NAN, "\N{EN DASH}"),
    ],
)
def test_numbers_have_two_significant_digits(value, expected):
    assert number(value) == expected


def test_shares_are_percents():
    assert [percent(value) for value in (0.394, 0.0041, 0.0, 1.0)] == ["39%", "0.41%", "0%", "100%"]
    assert number(1.83251, 4) == "1.833" and number(1234.5, 3) == "1,234"


def test_the_next_source_is_named_with_its_article():
    inspection = changed(block_attn_res(), "interventions", hidden=torch.tensor([0.25, 0.75, 0.0]).double())
    assert "next is the embedding (0.25 nats)." in sentences(inspection)["Use of the sources"][0][0][1]
