"""Sequence classification scores the last token that is not padding, with padding on either side."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from attnres import AttnResForSequenceClassification
from attnres.residual_attnres import residual_tensors

PAD = 0
LENGTHS = (4, 9)


@pytest.fixture
def classifier(tiny_config, vivid_model) -> AttnResForSequenceClassification:
    """Return a classifier of three classes on the decoder of `vivid_model`."""
    fields = {"attn_res_block_size": 3}
    torch.manual_seed(0)
    classifier = AttnResForSequenceClassification(tiny_config(num_labels=3, **fields)).eval()
    classifier.model.load_state_dict(vivid_model(**fields).model.state_dict())
    torch.nn.init.normal_(classifier.score.weight)
    return classifier


def padded(token_ids: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Return the first `LENGTHS[i]` tokens of row i, padded to one width on a side, and the attention mask."""
    rows, masks = [], []
    for row, length in zip(token_ids, LENGTHS):
        padding = row.new_full((token_ids.shape[1] - length,), PAD)
        parts = [row[:length], padding] if side == "right" else [padding, row[:length]]
        rows.append(torch.cat(parts))
        masks.append(torch.cat([torch.full_like(part, part is not padding) for part in parts]))
    return torch.stack(rows), torch.stack(masks)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_does_not_change_the_scores(classifier, token_ids, side):
    together_ids, mask = padded(token_ids, side)
    assert mask.sum(1).tolist() == list(LENGTHS)
    together = classifier(together_ids, attention_mask=mask).logits
    assert together.shape == (2, 3)
    for scores, row, length in zip(together, token_ids, LENGTHS):
        alone = classifier(row[None, :length])
        torch.testing.assert_close(scores, alone.logits[0], rtol=0, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("has_pad_token", [True, False])
def test_padded_embeddings_score_as_their_tokens_alone(classifier, token_ids, side, has_pad_token):
    together_ids, mask = padded(token_ids, side)
    if not has_pad_token:
        classifier.config.pad_token_id = None
    embed, labels = classifier.get_input_embeddings(), torch.tensor([2, 0])
    together = classifier(inputs_embeds=embed(together_ids), attention_mask=mask, labels=labels)
    for scores, row, length in zip(together.logits, token_ids, LENGTHS):
        alone = classifier(row[None, :length])
        torch.testing.assert_close(scores, alone.logits[0], rtol=0, atol=1e-4)
    torch.testing.assert_close(together.loss, torch.nn.functional.cross_entropy(together.logits, labels))
    assert together.keys() == classifier(together_ids[:1], labels=labels[:1]).keys()


@torch.no_grad()
def test_padded_embeddings_score_as_their_ids_on_another_backbone(backbones, token_ids):
    config = backbones.member_config("llama", num_labels=3, attn_res_block_size=3)
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_config(config).eval()
    for side in ("left", "right"):
        ids, mask = padded(token_ids, side)
        embeddings = classifier.get_input_embeddings()(ids)
        options = {"attention_mask": mask, "output_hidden_states": True, "output_depth_attentions": True}
        by_ids, by_embeddings = classifier(ids, **options), classifier(inputs_embeds=embeddings, **options)
        assert torch.equal(by_embeddings.logits, by_ids.logits)
        assert by_embeddings.keys() == by_ids.keys()
        assert all(map(torch.equal, by_embeddings.depth_attentions, by_ids.depth_attentions))


@torch.no_grad()
def test_embeddings_without_a_mask_have_no_padding(classifier, token_ids):
    embeddings = classifier.get_input_embeddings()(token_ids)
    assert torch.equal(classifier(inputs_embeds=embeddings).logits, classifier(token_ids).logits)


@torch.no_grad()
def test_scores_come_from_the_last_token(classifier, token_ids):
    hidden = classifier.model(token_ids).last_hidden_state[:, -1]
    torch.testing.assert_close(classifier(token_ids).logits, classifier.score(hidden))


@torch.no_grad()
@pytest.mark.parametrize(
    ("problem_type", "labels"),
    [
        ("single_label_classification", torch.tensor([2, 0])),
        ("multi_label_classification", torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])),
        ("regression", torch.tensor([[0.5, -1.0, 2.0], [0.0, 1.0, 3.0]])),
    ],
)
def test_the_loss_follows_the_problem_type(classifier, token_ids, problem_type, labels):
    classifier.config.problem_type = problem_type
    outputs = classifier(token_ids, labels=labels)
    loss = {
        "single_label_classification": torch.nn.functional.cross_entropy,
        "multi_label_classification": torch.nn.functional.binary_cross_entropy_with_logits,
        "regression": torch.nn.functional.mse_loss,
    }[problem_type]
    torch.testing.assert_close(outputs.loss, loss(outputs.logits, labels))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_few_training_steps_learn_the_labels(classifier, token_ids, checkpointing):
    classifier.train()
    if checkpointing:
        classifier.gradient_checkpointing_enable()
    batch, mask = padded(token_ids, "right")
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2)
    losses = []
    for step in range(10):
        loss = classifier(batch, attention_mask=mask, labels=torch.tensor([2, 0]), use_cache=False).loss
        loss.backward()
        if step == 0:
            assert all(parameter.grad is not None for parameter in classifier.parameters())
            moved = {name for name, tensor in residual_tensors(classifier).items() if tensor.grad.abs().max() > 0}
            assert len(moved) == 2 * 9 - 2  # all but those of the first sublayer
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.2 * losses[0]


@torch.no_grad()
def test_a_classifier_records_hidden_states(classifier, token_ids):
    expected = classifier.model(token_ids, output_hidden_states=True).hidden_states
    actual = classifier(token_ids, output_hidden_states=True).hidden_states
    assert len(actual) == len(expected) == 5
    assert all(map(torch.equal, actual, expected))
