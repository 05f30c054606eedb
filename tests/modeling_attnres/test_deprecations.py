"""The family uses nothing that `transformers` has deprecated."""

import pytest
import torch
from transformers.utils import logging

BACKBONES = ["kimi_linear", "llama", "deepseek_v3"]


@pytest.mark.parametrize("case", BACKBONES)
def test_a_model_runs_learns_and_generates_without_a_deprecation_warning(backbones, case, caplog, recwarn):
    logging.warning_once.cache_clear()
    logger = logging.get_logger("transformers")
    logger.addHandler(caplog.handler)
    try:
        model, token_ids = backbones.build_member(case), backbones.token_ids()
        model(token_ids, labels=token_ids).loss.backward()
        model.generate(token_ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        with torch.no_grad():
            model(token_ids, use_cache=True, output_hidden_states=True, output_depth_attentions=True)
    finally:
        logger.removeHandler(caplog.handler)
    said = [record.getMessage() for record in caplog.records] + [str(warning.message) for warning in recwarn]
    assert not [text for text in said if "deprecated" in text and ("cache" in text or "past_key_values" in text)]
