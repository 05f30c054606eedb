"""A checkpoint that lacks tensors or does not fit its configuration is refused before memory of its size is taken."""

import json
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoModelForCausalLM, AutoTokenizer

from attnres.checkpoints.tokenizers import load_tokenizer
from attnres.checkpoints.whole import load_whole
from attnres.commands.inspect import InspectedSource
from attnres.conversion import retrofit
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.publishing.publication import make_publication
from attnres.residual_attnres import FamilyWarning
from attnres.training.recipe import Recipe
from attnres.training.train import run_train

from ..conversion.checkpoints import change_json

LACKING = "model.layers.2.mlp.down_proj.weight"


@pytest.fixture(params=["standard", "retrofit"])
def incomplete(request, assets, tmp_path) -> Path:
    """Return a directory with a tokenizer whose weights lack one tensor."""
    source, folder = assets / "checkpoints" / "stories260K-hf", tmp_path / "incomplete"
    model = AutoModelForCausalLM.from_pretrained(source)
    (model if request.param == "standard" else retrofit(model, block_size=2)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors[LACKING]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def train(model: Path, **config) -> None:
    text = model.parent / "text.txt"
    text.write_text("Once upon a time there was a cat.\n" * 400)
    sizes = {"steps": 1, "length": 16, "batch_size": 1, "micro_batch_size": 1}
    run_train(Recipe(str(model), (str(text),), str(model.parent / "out"), config=config, **sizes))


LOADS = {
    "train": train,
    "eval": lambda model: SharedPrefixLM(str(model), device="cpu"),
    "inspect": lambda model: InspectedSource(str(model)).load(),
    "retrofit": retrofit,
}


def test_every_command_names_a_missing_tensor(incomplete):
    for load in LOADS.values():
        with pytest.raises(ValueError, match=rf"^{incomplete} is incomplete: it lacks `{LACKING}`\."):
            load(incomplete)


@pytest.fixture(scope="module")
def sound(assets, tmp_path_factory) -> Path:
    """Return a directory with a tokenizer whose weights are complete."""
    source, folder = assets / "checkpoints" / "stories260K-hf", tmp_path_factory.mktemp("whole") / "sound"
    retrofit(source, block_size=2).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


@pytest.fixture
def model(sound, tmp_path) -> Path:
    """Return a copy of `sound` that a test may change."""
    return shutil.copytree(sound, tmp_path / "model")


@contextmanager
def little_memory() -> Iterator[None]:
    """Let the block take 1 GB more address space and make 1000 modules. A huge model would exceed one of them."""
    modules = []
    count = register_module_module_registration_hook(lambda module, name, submodule: modules.append(name))
    before = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        count.remove()
    assert len(modules) < 1000


HUGE = {
    "num_labels": 10**9,
    "vocab_size": 10**9,
    "intermediate_size": 10**9,
    "num_hidden_layers": 10_000,
    # Fewer than the files have bits, so that only the shapes show the error.
    "hidden_size": 8 * 10**6,
    "head_dim": 10**6,
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("field", HUGE)
def test_a_configuration_far_larger_than_the_weights_is_refused_before_memory_is_taken(model, field, load):
    change_json(model / "config.json", **{field: HUGE[field]})
    with little_memory(), pytest.raises(ValueError) as refused:
        LOADS[load](model)
    message = str(refused.value)
    assert message.startswith(f"{model / 'config.json'}") and message.endswith("Use the checkpoint's own config.json.")
    assert field in message or "would have shape" in message
    assert not list(model.parent.glob("out/checkpoint-*"))


@pytest.mark.parametrize("load", LOADS)
def test_a_tensor_of_a_slightly_wrong_shape_is_named(model, load):
    change_json(model / "config.json", intermediate_size=200)
    with pytest.raises(RuntimeError, match=r"`model.layers.0.mlp.down_proj.weight` has shape \[64, 172\], but must be"):
        LOADS[load](model)


@pytest.mark.parametrize("load", LOADS)
def test_tensors_that_the_model_does_not_read_are_reported(model, load):
    change_json(model / "config.json", num_hidden_layers=4)
    message = r"does not read \d+ tensors of \S+, such as `model.layers.4.\S+`: see that"
    with pytest.warns(FamilyWarning, match=message), suppress(ValueError):  # it has residual connections already
        LOADS[load](model)


def test_pickled_weights_are_compared_with_the_configuration_too(sound, model):
    tensors = load_file(model / "model.safetensors")
    torch.save(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    assert SharedPrefixLM(str(model), device="cpu").model.num_parameters() == 261_440
    change_json(model / "config.json", vocab_size=10**6)
    with little_memory(), pytest.raises(ValueError, match=r"would have shape \[1000000, 64\]"):
        SharedPrefixLM(str(model), device="cpu")


@pytest.mark.slow
def test_a_model_in_a_subfolder_is_loaded(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "run" / "model")
    model = load_whole(AutoModelForCausalLM, str(tmp_path / "run"), subfolder="model")
    assert model.config.num_hidden_layers == 5


def test_a_pipe_that_an_index_names_in_another_folder_is_not_read(model):
    (model / "model.safetensors").unlink()
    (model / "parts").mkdir()
    os.mkfifo(model / "parts/one.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "parts/one.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OSError, match=r"one\.safetensors is not a file\. Put one there, or remove it\."):
        load_whole(AutoModelForCausalLM, str(model))


def test_weights_behind_links_and_a_field_of_the_recipe_are_loaded(sound, model):
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(sound / "model.safetensors")
    train(model, max_position_embeddings=4096)
    assert json.loads((model.parent / "out" / "model" / "config.json").read_text())["max_position_embeddings"] == 4096


VALUES = {
    "unknown quantiser": ("quantization_config", '{"quant_method": "evil"}', "has the `quant_method` 'evil', which"),
    "no quantiser": ("quantization_config", "{}", "has the `quant_method` None, which"),
    "a list of quantisers": ("quantization_config", "[]", "is [], but must be an object"),
}


def read_as_push_does(model: Path) -> None:
    make_publication(str(model))  # a `Path` elsewhere


@pytest.mark.parametrize("load", [*LOADS.values(), read_as_push_does], ids=[*LOADS, "push"])
@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_no_model_has_is_named_with_its_file(model, name, load):
    field, value, message = VALUES[name]
    content = json.loads((model / "config.json").read_text()) | {field: "VALUE"}
    (model / "config.json").write_text(json.dumps(content).replace('"VALUE"', value))
    with pytest.raises(ValueError, match=rf"^{model / 'config.json'}: `\w+` .*\. Remove ") as refused:
        load(model)
    assert message in str(refused.value)


def test_a_configuration_that_does_not_load_is_not_taken_for_a_missing_tokenizer(model):
    change_json(model / "config.json", hidden_size=5.5)
    with pytest.raises(ValueError, match=rf"^{model / 'config.json'} cannot be used .*'hidden_size' expected int"):
        load_tokenizer(model)
