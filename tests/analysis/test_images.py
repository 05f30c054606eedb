"""An inspection shows what a model that sees reads at the tokens of an image."""

import json
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoConfig, AutoProcessor

from attnres import AttnResKimiK3ForConditionalGeneration
from attnres.analysis import inspect_model
from attnres.analysis.images import image_prompt
from attnres.analysis.page import render
from attnres.kimi_k3_images_attnres import RELEASED

from ..checkpoints.kimi_release import train_vocabulary, write_tokenizer
from ..modeling_attnres import kimi_k3_release as release


def test_the_passage_is_the_image_in_rows_and_columns(tmp_path):
    vocabulary = train_vocabulary([Path(__file__).read_text(encoding="utf-8")], 600)
    write_tokenizer(vocabulary, tmp_path)
    placeholder = len(vocabulary) + 21  # <|media_pad|> of the released control tokens
    fields = {"text_config": release.text_fields(vocab_size=len(vocabulary) + 256), "model_type": "kimi_k3"}
    fields |= {"media_placeholder_token_id": placeholder, "vision_config": release.VISION | {"patch_size": 14}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": RELEASED}))
    Image.effect_noise((90, 50), 60).convert("RGB").save(tmp_path / "image.png")
    torch.manual_seed(0)
    model = AttnResKimiK3ForConditionalGeneration(AutoConfig.from_pretrained(tmp_path)).eval()
    processor = AutoProcessor.from_pretrained(tmp_path)
    prompt = image_prompt(processor, [tmp_path / "image.png"])
    # 90 x 50 pixels are padded to 4 x 2 tokens of 28 x 28 pixels.
    ids = prompt.inputs["input_ids"][0]
    first = int((ids == placeholder).nonzero()[0, 0])
    shown = prompt.words[first - prompt.start :][:8]
    assert shown == [f"{row},{column}" + (" " if column < 4 else "\n") for row in (1, 2) for column in range(1, 5)]
    assert prompt.words[0] == "<|media_begin|>" and len(prompt.words) == len(ids) - prompt.start
    text = "The first source is the embedding. " * 40
    sizes = {"length": 32, "tokens": 64, "intervention_tokens": 0}
    inspected = inspect_model(model, processor.tokenizer, text, prompt=prompt, **sizes)
    with torch.no_grad():
        expected = model(**prompt.inputs, output_depth_attentions=True).depth_attentions
    assert len(inspected.passage.words) == len(prompt.words)
    for weights, row in zip(inspected.passage.weights, expected, strict=True):
        assert torch.allclose(weights, row[:, 0, prompt.start :], atol=1e-6)
    assert f"{len(prompt.words)} tokens that begin with 1 image" in render([inspected], {})
