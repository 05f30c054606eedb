"""Parameter groups: matrices decay, vectors and AttnRes tensors do not, and the latter have their own rate."""

import torch

from attnres.loading_attnres import attn_res_tensors
from attnres.training.optimizer import parameter_groups


def test_every_trainable_parameter_is_in_one_group_with_its_own_rule(tiny_model):
    model = tiny_model()
    model.lm_head.weight.requires_grad_(False)
    groups = parameter_groups(model, learning_rate=0.1, weight_decay=0.2, residual_lr_factor=3.0)
    rules = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rules)
    residual = attn_res_tensors(model)
    for name, parameter in model.named_parameters():
        if name == "lm_head.weight":
            assert id(parameter) not in rules
        elif name in residual:
            assert rules[id(parameter)] == (0.1 * 3.0, 0.0), name
        else:
            assert rules[id(parameter)] == (0.1, 0.2 if parameter.ndim > 1 else 0.0), name
    torch.optim.AdamW(groups)


def test_a_model_without_attention_residuals_has_no_empty_group(tiny_model):
    groups = parameter_groups(tiny_model(residual_connection="standard"), 0.1, 0.2)
    assert len(groups) == 2
    assert all(group["params"] for group in groups)
