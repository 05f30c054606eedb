"""Every command that reads text names a token id without an embedding, and the size of the vocabulary."""

from pathlib import Path

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, TrainingArguments

from attnres import AttnResForCausalLM
from attnres.analysis import InspectedText, inspect_model
from attnres.eval.shared_prefix import SharedPrefixLM
from attnres.training.recipe import Recipe
from attnres.training.trainer import AttnResTrainer
from attnres.utils.token_ids import check_token_ids

TOLD = "has the token id 120, but the model's `vocab_size` is 99"


@pytest.fixture
def model(tiny_model) -> AttnResForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of 150 tokens; the model has 99."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 150)}, "<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_the_last_token_of_the_vocabulary_is_allowed_and_the_next_is_not(model):
    check_token_ids(torch.tensor([[3, 98]]), model, "the data")
    check_token_ids([], model, "the data")
    with pytest.raises(ValueError, match="the data has the token id 99,"):
        check_token_ids([3, 99], model, "the data")


def test_training_names_the_token_and_the_document(model, tmp_path: Path):
    row = {"input_ids": torch.tensor([3, 120]), "labels": torch.tensor([3, 120]), "documents": "a.txt:7"}
    arguments = TrainingArguments(
        str(tmp_path), max_steps=1, use_cpu=True, report_to="none", remove_unused_columns=False
    )
    recipe = Recipe("model", ["a.txt"], str(tmp_path), steps=1)
    trainer = AttnResTrainer(model, recipe, arguments, train_dataset=[row])
    with pytest.raises(ValueError, match=rf"a\.txt:7.*{TOLD}"):
        trainer.train()


def test_an_inspection_names_the_token_and_the_file(model, tokenizer):
    text = InspectedText("some.txt", "w3 w4 w120 w5 " * 4)
    with pytest.raises(ValueError, match=rf"some\.txt.*{TOLD}"):
        inspect_model(model, tokenizer, text, length=8, tokens=8)


def test_an_evaluation_names_the_token(model, tokenizer):
    lm = SharedPrefixLM(model, tokenizer=tokenizer)
    choice = Instance("loglikelihood", {}, ("w3 w4", " w120"), 0)
    prompt = Instance("generate_until", {}, ("w3 w120", {"until": ["w5"], "max_gen_toks": 2}), 0)
    with pytest.raises(ValueError, match=TOLD):
        lm.loglikelihood([choice], disable_tqdm=True)
    with pytest.raises(ValueError, match=TOLD):
        lm.generate_until([prompt], disable_tqdm=True)
