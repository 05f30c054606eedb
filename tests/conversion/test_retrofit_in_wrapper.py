"""A retrofit keeps its weights, and those of its source, when it is put into a wrapper or initialised once more."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from attnres import CONNECTIONS
from attnres.conversion import retrofit

from .checkpoints import FIELDS, standard_model


class ValueModel(PreTrainedModel):
    """A model around another one, as in reinforcement learning. Its constructor initialises what is not yet."""

    _supports_sdpa = True
    _can_set_experts_implementation = classmethod(lambda cls: True)

    def __init__(self, model: PreTrainedModel):
        super().__init__(model.config)
        self.model = model
        self.value = nn.Linear(model.config.hidden_size, 1)
        self.post_init()


INITIALISATIONS = {
    "a wrapper": ValueModel,
    "post_init": lambda model: model.post_init(),
    "init_weights": lambda model: model.init_weights(),
}


def assert_keeps_weights(*models: PreTrainedModel) -> None:
    """Assert that no initialisation of the first model changes a tensor of any of them, buffers included."""
    for name, initialise in INITIALISATIONS.items():
        tensors = [(key, t) for model in models for key, t in (*model.named_parameters(), *model.named_buffers())]
        before = [tensor.detach().clone() for _, tensor in tensors]
        initialise(models[0])
        changed = [key for (key, tensor), old in zip(tensors, before) if not torch.equal(tensor, old)]
        assert changed == [], name


def loaded(model: PreTrainedModel, folder) -> PreTrainedModel:
    model.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def resized(model: PreTrainedModel) -> PreTrainedModel:
    model.resize_token_embeddings(FIELDS["vocab_size"] + 5, mean_resizing=False)
    return model


# The ways in which the source of a retrofit may have been made.
SOURCES = {
    "made in memory": lambda model, folder: model,
    "loaded": loaded,
    "a copy of a loaded one": lambda model, folder: copy.deepcopy(loaded(model, folder)),
    "with a resized vocabulary": lambda model, folder: resized(loaded(model, folder)),
    "a standard member of the family": lambda model, folder: retrofit(model, "standard"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_retrofit_and_its_source_keep_their_weights(source, tmp_path):
    model = SOURCES[source](standard_model(tie_word_embeddings=False), tmp_path)
    assert_keeps_weights(model)
    assert_keeps_weights(retrofit(model), model)
    assert_keeps_weights(model)


@pytest.mark.parametrize("change", [copy.deepcopy, resized, lambda model: model.bfloat16()])
def test_a_retrofit_that_was_copied_or_changed_keeps_its_weights(change):
    assert_keeps_weights(change(retrofit(standard_model())))


def test_the_retrofit_of_a_directory_keeps_its_weights_also_when_saved(tmp_path):
    standard_model().save_pretrained(tmp_path / "source")
    model = retrofit(tmp_path / "source")
    assert_keeps_weights(model)
    assert_keeps_weights(loaded(model, tmp_path / "saved"))


@pytest.mark.parametrize("name", [name for name, connection in CONNECTIONS.items() if connection.retrofit is not None])
def test_every_connection_with_a_gate_and_value_residuals_keeps_its_weights(name):
    """Its tensors are moved away from their start, to which an initialisation would put them back."""
    source = standard_model()
    model = retrofit(source, name, attention_gate="sdpa", value_residual="standard")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert_keeps_weights(model, source)


def test_a_retrofit_with_experts_and_delta_attention_keeps_its_weights(backbones):
    source = backbones.build("kimi_linear")
    assert_keeps_weights(retrofit(source, full=True), source)


def test_a_retrofit_in_float64_keeps_the_digits_of_all_tensors(backbones):
    """Tensors that 16-bit models keep in float32, such as decays of delta attention, belong to the source too."""
    source = backbones.build("kimi_linear").double()
    model = retrofit(source, "hyper_connections")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert_keeps_weights(model, source)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
