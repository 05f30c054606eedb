"""The layer for multi-token prediction: its drafts and its loss, on DeepSeek-V3, Kimi Linear and Kimi K3."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, DeepseekV3ForCausalLM, GenerationConfig, PreTrainedModel
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDecoderLayer

from attnres import AttnResKimiK3ForCausalLM
from attnres.mtp_attnres import MultiTokenPrediction

from ..caches import CACHE
from . import kimi_k3_release as release

drafts = pytest.mark.skipif(not hasattr(GenerationConfig(), "use_mtp"), reason="`transformers` has no `use_mtp`")
PROMPT = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(1))
GREEDY = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


def model_on(backbones, backbone: str = "deepseek_v3", **fields) -> PreTrainedModel:
    """Return a model with random weights that all matter, and a layer for multi-token prediction."""
    config = backbones.member_config(backbone, num_nextn_predict_layers=1, **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    backbones.make_vivid(model)
    return model.eval()


def passes(model: PreTrainedModel, prompt: Tensor = PROMPT, **options) -> tuple[Tensor, int]:
    """Generate greedily, and count the forward passes."""
    calls = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    tokens = model.generate(prompt, **GREEDY, **options)
    handle.remove()
    return tokens, len(calls)


@drafts
@pytest.mark.parametrize(
    ("backbone", "fields"),
    [
        ("deepseek_v3", {}),
        ("deepseek_v3", {"residual_connection": "standard"}),
        ("deepseek_v3", {"attention_gate": "sdpa"}),
        ("kimi_linear", {}),
    ],
)
def test_random_drafts_change_no_token(backbones, backbone, fields):
    model = model_on(backbones, backbone, **fields)
    tokens, count = passes(model, use_mtp=True)
    assert torch.equal(tokens, passes(model)[0]) and count > 12
    returned = passes(model, use_mtp=True, output_hidden_states=True, return_dict_in_generate=True)[0]
    assert torch.equal(tokens, returned.sequences) and len(returned.hidden_states) == GREEDY["max_new_tokens"]


@pytest.mark.parametrize(
    "options", [pytest.param({"use_mtp": True}, marks=drafts), {"prompt_lookup_num_tokens": 3}], ids=["mtp", "lookup"]
)
def test_a_cache_may_hold_a_part_of_the_prompt(backbones, options):
    model, cut = model_on(backbones, "kimi_linear"), PROMPT.shape[1] - 2
    for padding in (0, 2):
        prompt, mask = F.pad(PROMPT, (padding, 0)), F.pad(torch.ones_like(PROMPT), (padding, 0))
        inputs = {"attention_mask": mask[:, : padding + cut]}
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        caches = [model(prompt[:, : padding + cut], position_ids=positions, **inputs)[CACHE] for _ in range(2)]
        inputs = {"attention_mask": mask, **options}
        tokens = model.generate(prompt, **GREEDY, **inputs, **{CACHE: caches[0]})
        assert torch.equal(tokens[:, padding:], model.generate(PROMPT, **GREEDY))
    with pytest.raises(ValueError, match="has padding: pass all tokens of the prompt"):
        model.generate(prompt[:, -2:], **GREEDY, **inputs, **{CACHE: caches[1]})


@drafts
def test_drafts_are_those_of_transformers_which_reads_the_layer_from_the_checkpoint(backbones, tmp_path, monkeypatch):
    from transformers.generation.candidate_generator import MTPCandidateGenerator

    model = model_on(backbones, residual_connection="standard")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.5\."])
    standard = DeepseekV3ForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    found: list[tuple[Tensor, Tensor]] = []
    get = MTPCandidateGenerator.get_candidates

    def noting(self, *args, **kwargs):
        found.append(get(self, *args, **kwargs))
        return found[-1]

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noting)
    for each in (model, standard):
        each.generate(PROMPT, **GREEDY, use_mtp=True)
    half = len(found) // 2
    assert half > 10
    for (tokens, logits), (expected, expected_logits) in zip(found[:half], found[half:], strict=True):
        assert torch.equal(tokens, expected)
        assert logits is expected_logits is None or torch.allclose(logits, expected_logits, atol=1e-4)


@drafts
def test_a_trained_layer_saves_passes_and_changes_no_token(backbones):
    fields = {"num_nextn_predict_layers": 1, "mtp_loss_weight": 1.0, "num_hidden_layers": 3}
    config = backbones.member_config("deepseek_v3", **fields)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).train()
    text = (torch.arange(40) % 7 + 3).unsqueeze(0)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
    for _ in range(20):
        model(text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    passes(model, text[:, :7], use_mtp=True)
    assert all(module.training for module in model.modules())
    model.eval()
    tokens, count = passes(model, text[:, :7], use_mtp=True)
    assert torch.equal(tokens, passes(model, text[:, :7])[0])
    assert count == 9  # for 16 tokens: the prompt, and two tokens in a pass


def test_generation_by_a_layer_that_is_not_there_is_refused_in_one_line(backbones):
    model = AutoModelForCausalLM.from_config(backbones.member_config("deepseek_v3"))
    with pytest.raises(ValueError, match=r"no layer for multi-token prediction.*Generate without `use_mtp`.$"):
        model.generate(PROMPT, **GREEDY, use_mtp=True)


@pytest.mark.parametrize("backbone", ["deepseek_v3", "kimi_linear"])
def test_the_loss_is_that_of_the_token_after_the_next_one_in_the_same_document(backbones, backbone):
    model = model_on(backbones, backbone, mtp_loss_weight=0.25).double()
    ids = torch.randint(3, 60, (1, 13), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(8), torch.arange(5)]).unsqueeze(0)
    labels = ids.clone()
    labels[0, 4] = -100
    arguments = {"position_ids": positions, "labels": labels, "use_cache": False}
    with torch.no_grad():
        plain = model(ids, **arguments, output_hidden_states=True)
        model.train()
        trained = model(ids, **arguments)
    assert "mtp_loss" not in plain
    assert trained.loss.item() == pytest.approx(plain.loss.item() + 0.25 * trained.mtp_loss.item(), abs=1e-5)

    # The equation, document by document, on the backbone's own layer.
    layer, losses = model.model.layers[-1].eval(), []
    block = {"deepseek_v3": DeepseekV3DecoderLayer, "kimi_linear": KimiLinearDecoderLayer}[backbone]
    for start, stop in ((0, 8), (8, 13)):
        document = ids[:, start:stop]
        states = final_states(model, document)[:, :-2]
        inputs = [layer.enorm(model.model.embed_tokens(document[:, 1:-1])), layer.hnorm(states)]
        inputs, count = layer.eh_proj(torch.cat(inputs, -1)), stop - start - 2
        mask = torch.full((count, count), -torch.inf, dtype=inputs.dtype).triu(1)[None, None]
        rotary = {}
        if backbone == "deepseek_v3":
            rotary["position_embeddings"] = model.model.rotary_emb(inputs, 1 + torch.arange(count).unsqueeze(0))
        hidden = layer.shared_head.norm(block.forward(layer, inputs, attention_mask=mask, **rotary))
        targets = labels[0, start + 2 : stop]
        losses.append(F.cross_entropy(model.lm_head(hidden)[0], targets, reduction="none")[targets != -100])
    assert trained.mtp_loss.item() == pytest.approx(torch.cat(losses).mean().item(), abs=1e-5)
    is_second = torch.arange(13) >= 8
    is_seen = (is_second == is_second[:, None]).tril()[None, None]
    masked = model(ids, attention_mask=is_seen, labels=labels, use_cache=False)
    assert masked.mtp_loss.item() == pytest.approx(trained.mtp_loss.item(), abs=1e-5)


@torch.no_grad()
def final_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return what the layer reads: the output of the final norm on DeepSeek-V3, else its input."""
    seen = []
    handle = model.model.norm.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
    model(ids, use_cache=False)
    handle.remove()
    return seen[model.config.backbone == "deepseek_v3"]


def test_the_loss_of_a_batch_that_is_accumulated_is_divided_by_all_labels(backbones):
    model = model_on(backbones, mtp_loss_weight=0.5).train()
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        # DDP makes the outputs anew.
        whole = tree_map(lambda value: value, model(ids, labels=ids, num_items_in_batch=torch.tensor(14)))
        parts = [model(row, labels=row, num_items_in_batch=torch.tensor(14)) for row in ids[:, None]]
    assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), abs=1e-5)
    assert sum(part.mtp_loss for part in parts).item() / 2 == pytest.approx(whole.mtp_loss.item(), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("backbone", ["deepseek_v3", "kimi_linear"])
def test_no_token_is_predicted_from_padding_before_a_text(backbones, backbone):
    model = model_on(backbones, backbone, mtp_loss_weight=0.5).train()
    padded, labels = F.pad(PROMPT, (3, 0)), F.pad(PROMPT, (3, 0), value=-100)
    expected = model(PROMPT, labels=PROMPT).mtp_loss.item()
    arguments = {"attention_mask": F.pad(torch.ones_like(PROMPT), (3, 0)), "labels": labels}
    assert model(padded, **arguments).mtp_loss.item() == pytest.approx(expected, abs=1e-4)
    by_position = (arguments.get(name) for name in model.argument_names[1:6])
    assert model(padded, *by_position).mtp_loss.item() == pytest.approx(expected, abs=1e-4)


def test_a_layer_whose_loss_is_not_trained_is_frozen(backbones, tmp_path):
    for weight in (0.0, 0.3):
        model = model_on(backbones, mtp_loss_weight=weight)
        model.save_pretrained(tmp_path, max_shard_size="100KB")
        for each in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
            each.train()(PROMPT, labels=PROMPT).loss.backward()
            layer = MultiTokenPrediction.layer(each)
            assert {parameter.requires_grad for parameter in layer.parameters()} == {bool(weight)}
            assert (layer.eh_proj.weight.grad is not None) == bool(weight)


def test_a_layer_that_the_checkpoint_does_not_hold_is_left_out_unless_it_is_to_be_trained(backbones, tmp_path):
    AutoModelForCausalLM.from_config(backbones.member_config("deepseek_v3")).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, num_nextn_predict_layers=1)
    assert model.config.num_nextn_predict_layers == 0 and len(model.model.layers) == 5
    model = AutoModelForCausalLM.from_pretrained(tmp_path, num_nextn_predict_layers=1, mtp_loss_weight=0.3)
    assert model.config.num_nextn_predict_layers == 1 and MultiTokenPrediction.layer(model).eh_proj.weight.std() > 0


def test_kimi_k3_gets_a_new_layer_to_train_which_is_reported_as_new(tmp_path):
    fields = release.text_fields(num_hidden_layers=2, kda_layers=[1], full_attn_layers=[2])
    options = {"num_nextn_predict_layers": 1, "mtp_loss_weight": 0.3}
    source = release.write(tmp_path / "source", fields, release.random_tensors(fields))
    model, info = AutoModelForCausalLM.from_pretrained(source, **options, output_loading_info=True)
    assert set(info["missing_keys"]) == MultiTokenPrediction.names(model)
    assert all(p.requires_grad and p.float().abs().sum() > 0 for p in MultiTokenPrediction.layer(model).parameters())
    model.save_pretrained(tmp_path / "saved")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert loaded.config.mtp_loss_weight == 0.3 and not info["missing_keys"]
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "packed", packed_experts=True)
    with pytest.raises(ValueError, match=r"a new one could not train its packed experts. Load it without"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed", packed_experts=True, **options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_nextn_predict_layers": 2}, "`num_nextn_predict_layers` is 2, but must be 0 or 1"),
        ({"mtp_loss_weight": -1}, "`mtp_loss_weight` is -1, but must be a finite number >= 0"),
        ({"mtp_loss_weight": 0.3}, "`mtp_loss_weight` is 0.3, but must be 0 without a layer to train: set"),
    ],
)
def test_wrong_fields_are_refused_in_one_line(backbones, fields, message):
    with pytest.raises(ValueError, match=message) as error:
        backbones.member_config("deepseek_v3", **fields)
    assert "\n" not in str(error.value)


def test_the_layer_of_kimi_k3_is_loaded_and_saved_byte_for_byte_and_drafts(tmp_path):
    fields = release.text_fields(num_nextn_predict_layers=1)
    tensors = release.random_tensors(fields)
    source = release.write(tmp_path / "source", fields, tensors)
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    assert isinstance(model, AttnResKimiK3ForCausalLM)
    model.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == {f"language_model.{name}" for name in tensors}
    assert all(torch.equal(saved[f"language_model.{name}"], tensor) for name, tensor in tensors.items())
    assert any(name.startswith("model.layers.7.self_attn.g_proj") for name in tensors)
    if hasattr(GenerationConfig(), "use_mtp"):
        model = model.float().eval()
        assert torch.equal(passes(model, use_mtp=True)[0], passes(model)[0])
