"""Fixtures with small models of several families, and records of their calls."""

import functools
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnres import AttnResKimiK3ForCausalLM
from attnres.conversion import retrofit

from ...modeling_attnres import kimi_k3_release as release
from .models import OTHERS, small
from .prompts import Requests


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, 99)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def make_model(tiny_model, tmp_path_factory) -> Callable[[str], PreTrainedModel]:
    """Return `make_model(name)`, for `models.MODELS`; ours have KDA, MLA, experts and uneven depth weights."""

    @functools.cache
    def make(name: str) -> PreTrainedModel:
        if name.startswith("block size"):
            return tiny_model(attn_res_block_size=int(name[-1]))
        if name == "Kimi K3":
            fields = release.text_fields(vocab_size=99)
            tensors = release.random_tensors(fields, torch.float32)
            folder = release.write(tmp_path_factory.mktemp("kimi-k3"), fields, tensors)
            return AttnResKimiK3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if name.startswith("retrofit"):
            return retrofit(make(name.rpartition(" ")[2]), block_size=2)
        return small(name, **OTHERS[name])

    return make


@pytest.fixture
def model(make_model) -> PreTrainedModel:
    return make_model("block size 2")


@pytest.fixture
def scored(tokenizer) -> Callable[..., list]:
    """Return `scored(lm_class, model, requests, **arguments)`: the answers of a new model in the harness."""

    def score(lm_class, model, requests: Requests, batch_size: int = 4, **arguments) -> list:
        lm = lm_class(model, tokenizer=tokenizer, batch_size=batch_size, **arguments)
        return lm._loglikelihood_tokens(requests, disable_tqdm=True)

    return score


@pytest.fixture
def calls(monkeypatch) -> Callable[..., list]:
    """Return `calls(model)`: a list to which each later forward pass adds the shape of its input."""

    def record(model: PreTrainedModel, most: int = 10**9, error: str | None = None) -> list:
        shapes, forward = [], model.forward

        @functools.wraps(forward)
        def counted(input_ids=None, **kwargs):
            shapes.append(tuple(input_ids.shape))
            if len(input_ids) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried.") if error is None else RuntimeError(error)
            return forward(input_ids, **kwargs)

        monkeypatch.setattr(model, "forward", counted)
        return shapes

    return record
