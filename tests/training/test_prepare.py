"""The model of a recipe: settings without effect are refused, and a sharded model is loaded as a whole one is."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from attnres.checkpoints.whole import load_whole
from attnres.commands import options_train
from attnres.commands import train as train_command
from attnres.commands.errors import describe
from attnres.configuration import load
from attnres.conversion import retrofit
from attnres.mtp_attnres import MultiTokenPrediction
from attnres.training import prepare
from attnres.training.lora import add_adapters
from attnres.training.parallel.pipeline_parts import part_of
from attnres.training.parallel.pipeline_settings import PipelineSettings
from attnres.training.prepare import check_model, prepare_model
from attnres.training.recipe import Recipe, write_recipe


@pytest.fixture
def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def recipe_of(model, folder: Path, **fields) -> Recipe:
    """Save a model, and return a recipe that trains it further."""
    model.save_pretrained(folder / "source")
    return Recipe(str(folder / "source"), ("a.txt",), str(folder / "out"), steps=8, **fields)


def test_residual_alone_is_refused_for_a_model_without_residual_tensors(llama, tmp_path):
    """No tensor would be trained in these steps."""
    recipe = recipe_of(llama, tmp_path, residual_alone=0.5)
    with pytest.raises(
        ValueError, match=r"^`residual_alone` of the recipe is 0\.5, but must be 0: .* has no tensors of"
    ):
        prepare_model(recipe, None, None, None)
    prepare_model(recipe_of(retrofit(llama), tmp_path, residual_alone=0.5), None, None, None)


def test_multi_token_prediction_gets_a_new_layer_where_the_model_can_have_one(llama, tmp_path):
    for model, message in ((llama, "not a model of the family"), (retrofit(llama), "on deepseek_v3 or kimi_linear")):
        with pytest.raises(ValueError, match=message):
            check_model(recipe_of(model, tmp_path, mtp_loss_weight=0.3), "")
    config = load("attnres-tiny", num_hidden_layers=4, vocab_size=32)
    recipe = recipe_of(AutoModelForCausalLM.from_config(config), tmp_path, mtp_loss_weight=0.3)
    check_model(recipe, "")
    model = prepare_model(recipe, None, None, None)
    layer = MultiTokenPrediction.layer(model)
    assert layer.eh_proj.weight.requires_grad and layer.eh_proj.weight.std() > 0
    with pytest.raises(ValueError, match="`pipeline` of the recipe does not hold the layer"):
        part_of(PipelineSettings(stages=2), 0)(model)


def test_a_sharded_model_does_not_refer_to_code_that_came_with_its_source(llama, tmp_path, monkeypatch):
    llama.config.auto_map = {"AutoModelForCausalLM": "strange.Code"}
    monkeypatch.setattr(prepare, "load_sharded", lambda *arguments, **options: llama)
    model = prepare_model(recipe_of(llama, tmp_path, distributed={}), None, DistributedConfig(), None)
    assert not hasattr(model.config, "auto_map")


@pytest.mark.parametrize("sharding", [None, DistributedConfig()])
def test_a_wrong_field_of_the_configuration_is_named_whether_the_model_is_sharded_or_not(
    sharding, llama, tmp_path, monkeypatch
):

    def load(source, sharding, start, build, auto_class, **config):
        return load_whole(auto_class, source, **config)

    monkeypatch.setattr(prepare, "load_sharded", load)
    recipe = recipe_of(llama, tmp_path, config={"rms_norm_epsilon": 1e-5})
    with pytest.raises(ValueError, match=r"^`config` does not fit .*rms_norm_epsilon"):
        prepare_model(recipe, None, sharding, None)


def test_the_path_of_a_recipe_is_not_taken_for_its_name(tmp_path, monkeypatch):
    """The name is written into the card of the model."""
    names = []
    monkeypatch.setattr(train_command, "train_in_this_process", lambda recipe, name: names.append(name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Once upon a time.")
    (tmp_path / "t").mkdir()
    recipe = Recipe("attnres-tiny", ("a.txt",), str(tmp_path / "out"), tokenizer="t", steps=8)
    (tmp_path / "mine.yaml").write_text(write_recipe(recipe))
    options_train.train(str(tmp_path / "mine.yaml"))
    options_train.train("pretrain", ["model=attnres-tiny", "train=a.txt", f"out={tmp_path / 'out'}", "tokenizer=t"])
    assert names == ["", "pretrain"]


@pytest.mark.parametrize(
    "settings, message",
    [
        ("[1]", "TypeError: 'list' object is not a mapping"),
        ('{"max_new_tokens": -1}', "`max_new_tokens` must be greater than 0, but is -1"),
    ],
)
def test_settings_of_generation_that_cannot_be_saved_are_refused(settings, message, llama, tmp_path):
    recipe = recipe_of(llama, tmp_path)
    path = tmp_path / "source" / "generation_config.json"
    path.write_text(settings)
    with pytest.raises((TypeError, ValueError)) as refused:
        check_model(recipe, "")
    line, is_foreseen = describe(refused.value)
    assert message in line and f"(in {path})" in line and is_foreseen


def test_settings_of_generation_that_only_warn_are_refused_only_if_the_recipe_changes_them(llama, tmp_path):
    recipe = recipe_of(llama, tmp_path)
    path = tmp_path / "source" / "generation_config.json"
    path.write_text('{"temperature": 0.6, "eos_token_id": 7}')  # a temperature without `do_sample` warns
    check_model(recipe, "")
    with pytest.raises(ValueError, match=r"`temperature` is set to `0\.6`") as refused:
        check_model(replace(recipe, config={"eos_token_id": 8}), "")
    assert str(path) in refused.value.__notes__[0]


def test_a_model_with_the_files_of_an_adapter_beside_it_is_refused(llama, tmp_path):
    recipe = recipe_of(llama, tmp_path)
    add_adapters(llama, rank=2).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=r"has the files of an adapter \(adapter_config.json\).*Move them elsewhere"):
        check_model(recipe, "")
