"""Tests that every message and surprise on the page for troubleshooting is one that the code or a run has."""

import copy
import logging
import logging.handlers
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.dynamic_module_utils import resolve_trust_remote_code

import attnres
from attnres.conversion import retrofit

from .messages import is_of_the_code
from .reading import ROOT

PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
_ENTRY = re.compile(r"^### (?P<title>.+)\n(?P<text>(?:(?!^##).*\n?)*)", re.MULTILINE)
_MESSAGE = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def entries() -> dict[str, str]:
    """Return the text of each entry of the page by its title."""
    return {entry["title"]: entry["text"] for entry in _ENTRY.finditer(PAGE.read_text(encoding="utf-8"))}


def messages(text: str) -> list[str]:
    """Return the messages that an entry quotes, each in one line."""
    return [" ".join(message.split()) for message in _MESSAGE.findall(text)]


@pytest.fixture(scope="module")
def standard() -> LlamaForCausalLM:
    """A small Llama."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes)).eval()


IDS = torch.arange(3, 35)[None]


def ask_for_trust(standard: LlamaForCausalLM, folder: Path) -> str:
    with pytest.raises(ValueError) as raised:
        resolve_trust_remote_code(False, "qwen3-attnres", has_local_code=False, has_remote_code=True)
    return str(raised.value)


def load_kimi_k3(standard: LlamaForCausalLM, folder: Path) -> str:
    with pytest.raises(KeyError) as raised, torch.device("meta"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model("kimi_linear", hidden_act="situ"))
    return f"KeyError: {raised.value}"


def load_by_class(standard: LlamaForCausalLM, folder: Path) -> str:
    """The class of the family computes another function than the source, unless its scale is `sum`."""
    standard.save_pretrained(folder)
    expected, logger = standard(IDS).logits, logging.getLogger("transformers")
    handler = logging.handlers.MemoryHandler(1000)
    logger.addHandler(handler)
    model, exact = (
        attnres.AttnResLlamaForCausalLM.from_pretrained(folder, **options).eval()
        for options in ({}, {"attn_res_scale": "sum"})
    )
    assert (exact(IDS).logits - expected).abs().max() < 1e-5
    assert (model(IDS).logits - expected).abs().max() > 1e-5
    logger.removeHandler(handler)
    return " ".join(record.getMessage() for record in handler.buffer)


def adapt(standard: LlamaForCausalLM, folder: Path) -> str:
    """PEFT freezes the pseudo-queries, unless they are among `modules_to_save`."""
    names = attnres.peft_modules_to_save(retrofit(standard, full=True))
    for given, is_trained in ((None, False), (names, True)):
        config = LoraConfig(target_modules="all-linear", modules_to_save=given)
        adapted = get_peft_model(retrofit(copy.deepcopy(standard), full=True), config)
        trained = [name for name, parameter in adapted.named_parameters() if parameter.requires_grad]
        assert any("res_proj" in name for name in trained) == is_trained
    with pytest.raises(ValueError) as raised:
        get_peft_model(retrofit(copy.deepcopy(standard), full=True), LoraConfig(target_modules=names))
    return str(raised.value)


def pad(standard: LlamaForCausalLM, folder: Path) -> str:
    """A row alone and padded in a batch: another number in bfloat16, the same but for rounding in float32."""
    mask = torch.ones(2, IDS.shape[1], dtype=torch.long)
    mask[0, :9] = 0
    differences = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = retrofit(copy.deepcopy(standard), full=True).to(dtype)
        together = model(IDS.expand(2, -1), attention_mask=mask).logits[0, 9:]
        differences[dtype] = (together - model(IDS[:, 9:]).logits[0]).abs().max()
    assert differences[torch.float32] < 1e-5 < 1e-4 < differences[torch.bfloat16]
    return ""


# Title of an entry whose message is not in the code, or that has none -> a run that returns what it is told.
RUNS: dict[str, Callable[[LlamaForCausalLM, Path], str]] = {
    "The model asks to run code": ask_for_trust,
    "Kimi K3 does not load by the Auto classes": load_kimi_k3,
    "A pretrained model loads, but computes something else": load_by_class,
    "LoRA does not train the pseudo-queries": adapt,
    "Scores change with the batch size": pad,
}


def test_every_entry_is_short_and_has_a_message_or_a_run():
    assert 15 <= len(entries()) <= 22
    for title, text in entries().items():
        assert 1 <= len(_MESSAGE.sub("", text).strip().splitlines()) <= 6, title
        assert title in RUNS or messages(text), title


def test_every_message_is_one_of_the_code():
    for title, text in entries().items():
        if title not in RUNS:
            assert [message for message in messages(text) if not is_of_the_code(message)] == [], title


@pytest.mark.parametrize("title", RUNS)
def test_what_the_code_does_not_say_comes_out_of_a_run(title, standard, tmp_path):
    told = " ".join(RUNS[title](standard, tmp_path).split())
    assert [message for message in messages(entries()[title]) if message not in told] == []


def test_a_message_that_the_code_does_not_have_is_found_out():
    text = "The recipe lacks `train`: give train=..."
    assert is_of_the_code("this model is sequence parallel already, or another tool has replaced its `forward`.")
    assert not is_of_the_code(text.replace("lacks", "is without"))
    assert not is_of_the_code("this model is sequence parallel already, or another tool has changed its `forward`.")
