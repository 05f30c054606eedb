"""Tokenizers with Python code run it if they are trusted, in training and evaluation; code of a model never runs."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from attnres.checkpoints.tokenizers import load_tokenizer
from attnres.commands.eval import run_eval
from attnres.eval.benchmarks import pick
from attnres.eval.start import EvalOptions
from attnres.training.data.documents import DataSpec, Documents, Encoder
from attnres.training.recipe import Recipe
from attnres.training.train import run_train

from ..conversion.checkpoints import change_json, save_tokenizer, standard_model

SLOW = """from transformers import PreTrainedTokenizer

from .letters import FIRST


class LetterTokenizer(PreTrainedTokenizer):
    def __init__(self, **options):
        super().__init__(**{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | options)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {chr(i): i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text):
        return [letter for letter in text if ord(letter) < 256]

    def _convert_token_to_id(self, token):
        return ord(token) - FIRST

    def _convert_id_to_token(self, index):
        return chr(index + FIRST)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()
"""
# The code of a fast tokenizer is around its backend, which does not know it.
FAST = """from transformers import PreTrainedTokenizerFast


class LowerTokenizer(PreTrainedTokenizerFast):
    def _batch_encode_plus(self, text, *arguments, **options):
        text = text.lower() if isinstance(text, str) else [each.lower() for each in text]
        return super()._batch_encode_plus(text, *arguments, **options)

    def _encode_plus(self, text, *arguments, **options):
        text = text.lower() if isinstance(text, str) else [each.lower() for each in text]
        return super()._encode_plus(text, *arguments, **options)
"""
CHAT = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
SIZES = {"length": 32, "batch_size": 2, "micro_batch_size": 2, "steps": 1, "held_out_sequences": 2}


@pytest.fixture
def model(tmp_path) -> Path:
    """A model whose tokenizer is code, and whose other code makes the file `sprung` if it runs."""
    folder = tmp_path / "source"
    standard_model(vocab_size=300, max_position_embeddings=2048, num_hidden_layers=1).save_pretrained(folder)
    (folder / "tokenization_letters.py").write_text(SLOW)
    (folder / "letters.py").write_text("FIRST = 0\n")
    fields = {"tokenizer_class": "LetterTokenizer", "chat_template": CHAT}
    auto_map = {"AutoTokenizer": ["tokenization_letters.LetterTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"auto_map": auto_map}))
    (folder / "evil.py").write_text(
        f"open({str(tmp_path / 'sprung')!r}, 'w').close()\nfrom transformers import LlamaConfig, LlamaForCausalLM\n\n\n"
        "class C(LlamaConfig): ...\n\n\nclass M(LlamaForCausalLM): ...\n"
    )
    change_json(folder / "config.json", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    return folder


@pytest.fixture(params=["text", "chat"])
def recipe(request, model, tmp_path) -> dict:
    """The arguments of a recipe that trains the model, on text or on conversations."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "One two three. " * 4}]
    row = {"text": "Once upon a time. " * 4, "messages": chat}
    (tmp_path / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 40)
    options = {"chat": True, "column": "messages"} if request.param == "chat" else {}
    names = {"model": str(model), "train": (str(tmp_path / "data.jsonl"),), "out": str(tmp_path / "out")}
    return names | SIZES | options


def refused(call, *arguments) -> str:
    with pytest.raises(ValueError) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.slow
def test_training_runs_and_saves_the_code_of_the_tokenizer_alone(recipe, model, tmp_path):
    run_train(Recipe(**recipe, trust_remote_code=True))
    saved = tmp_path / "out" / "model"
    assert not (tmp_path / "sprung").exists()
    assert {path.relative_to(saved).as_posix() for path in saved.rglob("*.py")} == {
        "source_code/letters.py",
        "source_code/tokenization_letters.py",
    }
    expected = load_tokenizer(model, trust_remote_code=True)("a Test")["input_ids"]
    assert AutoTokenizer.from_pretrained(saved, trust_remote_code=True)("a Test")["input_ids"] == expected
    run_train(Recipe(**recipe | {"steps": 2}, trust_remote_code=True))  # which replaces the folder with the code


@pytest.mark.slow
def test_a_model_from_scratch_takes_a_tokenizer_with_code(recipe, tmp_path):
    scratch = {"model": "attnres-tiny", "tokenizer": recipe["model"], "config": {"num_hidden_layers": 4}}
    run_train(Recipe(**recipe | scratch, trust_remote_code=True))
    assert (tmp_path / "out" / "model" / "source_code" / "tokenization_letters.py").exists()
    assert not (tmp_path / "sprung").exists()


def test_without_leave_one_line_says_how_to_give_it(recipe, model, assets, tmp_path):
    benchmarks = pick("arc_challenge")
    options = EvalOptions(str(model), tmp_path / "scores", benchmarks, data=assets / "hub")
    for message in (refused(run_train, Recipe(**recipe)), refused(run_eval, options)):
        assert message == (
            f"The tokenizer of {model} is code that came with it: read that code, then allow it to run by "
            "--trust-remote-code, or in a recipe by trust_remote_code=true."
        )


@pytest.mark.slow
def test_an_evaluation_runs_the_code_of_the_tokenizer_alone(model, assets, tmp_path):
    options = {"benchmarks": pick("arc_challenge"), "data": assets / "hub", "limit": 2, "trust_remote_code": True}
    run_eval(EvalOptions(str(model), tmp_path / "scores", **options))
    assert not (tmp_path / "sprung").exists()
    # Results that another tokenizer's code gave do not count any more.
    (model / "letters.py").write_text("FIRST = 1\n")
    with pytest.raises(FileExistsError):
        run_eval(EvalOptions(str(model), tmp_path / "scores", **options))


def test_training_texts_pass_through_the_code_of_a_fast_tokenizer(tmp_path):
    save_tokenizer(tmp_path)
    (tmp_path / "tokenization_lower.py").write_text(FAST)
    auto_map = {"AutoTokenizer": [None, "tokenization_lower.LowerTokenizer"]}
    change_json(tmp_path / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="LowerTokenizer")
    tokenizer = load_tokenizer(tmp_path, trust_remote_code=True)
    (tmp_path / "text.txt").write_text("A Test")
    encoder = Encoder(tokenizer)
    (tokens,) = encoder.batches(Documents(DataSpec((str(tmp_path / "text.txt"),))))
    assert tokens.ids.tolist() == [*tokenizer("a test")["input_ids"], tokenizer.eos_token_id]
    before = encoder.key()
    (tmp_path / "tokenization_lower.py").write_text(FAST.replace("lower()", "upper()"))
    assert Encoder(load_tokenizer(tmp_path, trust_remote_code=True)).key() != before
