"""A process of a pipeline holds the tensors of its stages alone, with the values that they have in the whole model."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from attnres.backbones_attnres import config_on
from attnres.checkpoints.whole import load_whole
from attnres.configuration import count_parameters, load
from attnres.conversion import retrofit
from attnres.conversion.family import retrofit_config
from attnres.kimi_linear_configuration_attnres import AttnResConfig
from attnres.training.parallel.pipeline_parts import make_part, part_of
from attnres.training.parallel.pipeline_settings import PipelineSettings
from attnres.training.prepare import build_model, check_training_memory
from attnres.training.recipe import Recipe

from ... import forks
from ...conftest import TINY
from ...conversion.backbones import CASES, COMMON, build

TWO_STAGES = PipelineSettings(stages=2, virtual=2)


def assert_is_part(part: PreTrainedModel, whole: PreTrainedModel, stage: int, settings=TWO_STAGES) -> None:
    """Assert that a model has the tensors of its stage, equal to those of the whole model, and no others."""
    names, expected = part_of(settings, stage)(whole), whole.state_dict()
    for name, parameter in part.named_parameters(remove_duplicate=False):
        assert parameter.is_meta == (name not in names), name
    tensors = part.state_dict()
    assert tensors.keys() == expected.keys() > names
    for name in names:
        assert tensors[name].dtype == expected[name].dtype and torch.equal(tensors[name], expected[name]), name
    buffers = dict(whole.named_buffers())
    assert all(buffer.is_meta or torch.equal(buffer, buffers[name]) for name, buffer in part.named_buffers())


def on_backbone(case: str) -> PreTrainedConfig:
    """Return the configuration of a backbone of four layers with attention residuals."""
    model_type, fields = CASES[case]
    config = AutoConfig.for_model(model_type, **COMMON | fields)
    config.num_nextn_predict_layers = 0  # DeepSeek-V3 has one by default, which no pipeline holds
    return retrofit_config(config, block_size=3)


@pytest.mark.parametrize(
    "config",
    [
        # Connections that start at random, and one that does not.
        *(AttnResConfig(**TINY, residual_connection=name) for name in ("attn_res", "dca", "highway", "muddformer")),
        AttnResConfig(**TINY, tie_word_embeddings=True, dtype=torch.bfloat16),
        load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=99),
        *map(on_backbone, ("deepseek_v3", "gpt_neox", "gpt_neox, sequential")),
    ],
    ids=lambda config: f"{config.model_type}, {config.residual_connection}",
)
def test_a_part_has_the_tensors_of_a_whole_model_of_the_same_seed(config):
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config)
    random = torch.get_rng_state()
    for stage in range(2):
        torch.manual_seed(0)
        assert_is_part(make_part(config, part_of(TWO_STAGES, stage)), whole, stage)
        assert torch.equal(torch.get_rng_state(), random)
    held = [part_of(TWO_STAGES, stage)(whole) for stage in range(2)]
    assert held[0] | held[1] == whole.state_dict().keys()


@pytest.mark.parametrize("member", ["hybrid", "tied", "Kimi K3"])
def test_a_part_is_read_from_a_checkpoint(member, tiny_model, tmp_path):
    """The published layout of Kimi Linear and Kimi K3 has a tensor for each expert, which loading stacks."""
    torch.manual_seed(0)
    config = load("attnres-k3-tiny", num_hidden_layers=4, vocab_size=99)
    model = AutoModelForCausalLM.from_config(config) if member == "Kimi K3" else tiny_model(**TIED[member])
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    for stage in range(2):
        part = load_whole(AutoModelForCausalLM, str(tmp_path), part=part_of(TWO_STAGES, stage))
        assert_is_part(part, model, stage)
    whole = load_whole(AutoModelForCausalLM, str(tmp_path))  # nothing of the other way of loading is left
    assert not any(tensor.is_meta for tensor in whole.state_dict().values())


TIED = {"hybrid": {}, "tied": {"tie_word_embeddings": True}}


@pytest.mark.parametrize("case", ["llama", "gpt_neox, sequential"])
def test_a_part_is_retrofitted_like_the_whole_model(case, tmp_path):
    """The connection's start is drawn at random."""
    build(case).save_pretrained(tmp_path)
    recipe = Recipe(str(tmp_path), ("a.txt",), "out", steps=1, retrofit={"residual": "muddformer"})
    torch.manual_seed(0)
    whole = build_model(recipe, None)
    for stage in range(2):
        torch.manual_seed(0)
        assert_is_part(build_model(recipe, None, part_of(TWO_STAGES, stage)), whole, stage)


@pytest.mark.parametrize("made", ["from a configuration", "from a checkpoint", "by a retrofit"])
def test_a_part_is_not_initialised_once_more(made, tmp_path):
    part = part_of(TWO_STAGES, 0)
    if made == "from a configuration":
        model = make_part(on_backbone("llama"), part)
    else:
        source = build("llama") if made == "by a retrofit" else retrofit(build("llama"))
        source.save_pretrained(tmp_path)
        options = {"retrofit": {"residual": "muddformer"}} if made == "by a retrofit" else {}
        model = build_model(Recipe(str(tmp_path), ("a.txt",), "out", steps=1, **options), None, part)
    held = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    before = {name: tensor.clone() for name, tensor in held.items()}
    assert 0 < len(held) < len(model.state_dict())
    model.post_init()
    assert [name for name, tensor in held.items() if not torch.equal(tensor, before[name])] == []


def test_a_checkpoint_without_the_tensors_of_connections_is_loaded_whole(tiny_model, tmp_path):
    """They start anew, in an order that a part would not follow."""
    tiny_model(residual_connection="standard").save_pretrained(tmp_path)
    options = {"starts_anew": True, "residual_connection": "highway", "part": part_of(TWO_STAGES, 1)}
    with pytest.warns(match="computes another function"):
        model = load_whole(AutoModelForCausalLM, str(tmp_path), **options)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


def test_a_run_from_scratch_needs_memory_for_its_stage(monkeypatch):
    recipe = Recipe("attnres-tiny", ("a.txt",), "out", steps=1, tokenizer="stories", optimizer="adamw")
    kept = 1 if torch.accelerator.is_available() else 4  # weights, on a CPU also gradients and two moments
    config = load("attnres-tiny")
    needed = 4 * kept * count_parameters(config).total
    monkeypatch.setattr("attnres.checkpoints.whole.free_memory", lambda: int(0.8 * needed))
    with pytest.raises(ValueError, match=r"attnres-tiny has .* in float32 take "):
        check_training_memory(recipe, config)
    recipe = replace(recipe, pipeline={"stages": 2})
    check_training_memory(recipe, config)
    monkeypatch.setattr("attnres.checkpoints.whole.free_memory", lambda: int(0.2 * needed))
    with pytest.raises(ValueError, match=r"attnres-tiny has .* in float32 on a process take "):
        check_training_memory(recipe, config)


def test_a_model_outside_the_family_is_refused_before_it_is_loaded(tmp_path):
    config = AutoConfig.for_model("gpt2", n_embd=16, n_layer=2, n_head=2, vocab_size=40)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="needs a language model of the family, not gpt2"):
        load_whole(AutoModelForCausalLM, str(tmp_path), part=part_of(TWO_STAGES, 0))


def test_a_retrofit_refuses_a_model_of_which_a_part_is_loaded(backbones):
    model = backbones.build("llama")
    model.model.layers[1].to("meta")
    with pytest.raises(ValueError, match="is offloaded or on the meta device"):
        retrofit(model)


MEMORY = """
import ctypes
import gc
import json
import sys
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM
from attnres.checkpoints.whole import load_whole
from attnres.training.parallel.pipeline_parts import make_part, part_of
from attnres.training.parallel.pipeline_settings import PipelineSettings

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

def growth(make, *arguments, **options):
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # the memory that an earlier model has left
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew, at the memory in use
    before = peak()
    model = make(*arguments, **options)
    for tensor in model.state_dict().values():
        tensor.sum()  # a tensor from a file is not in memory before it is used
    return peak() - before

def measure(source):
    config, part = AutoConfig.from_pretrained(source), part_of(PipelineSettings(stages=4), 1)
    made = growth(make_part, config, part), growth(AutoModelForCausalLM.from_config, config)
    return made, [growth(load_whole, AutoModelForCausalLM, source, **chosen) for chosen in ({"part": part}, {})]

measure(sys.argv[1])  # a small model, so that all code is in memory
print(json.dumps(measure(sys.argv[2])))
"""


@pytest.mark.slow
def test_a_part_takes_the_memory_of_its_stage_and_of_one_tensor(tmp_path):
    """The peak of the resident memory of the process, and of file pages in it, is measured by the system."""
    for size in (16, 256):
        torch.manual_seed(0)
        config = config_on("llama")(
            vocab_size=64, hidden_size=size, intermediate_size=4 * size, num_attention_heads=4, num_hidden_layers=8
        )
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / str(size))
    sizes = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
    held = sum(sizes[name] for name in part_of(PipelineSettings(stages=4), 1)(model))
    done = forks.run("-c", MEMORY, tmp_path / "16", tmp_path / "256")
    assert done.returncode == 0, done.stderr
    margin = 6 * 2**20  # for allocations other than weights
    for part, whole in json.loads(done.stdout):
        assert part <= held + max(sizes.values()) + margin < sum(sizes.values()) / 2
        assert whole >= 0.9 * sum(sizes.values())
