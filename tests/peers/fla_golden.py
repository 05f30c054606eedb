"""Depth attention by flash-linear-attention's reference, `fla.ops.attnres.naive_attnres`: golden values for ours.

    python fla_golden.py INPUTS OUTPUTS

`test_fla_agreement.py` runs it in a process that can import `fla` and never imports `transformers` or `attnres`.
INPUTS: a list of dictionaries (`query`, `sources`, `key_norm_weight`, `eps`, and for the derivatives `grad_result` and
`grad_weights`). OUTPUTS: a list of lists: result, weights, gradients of query, key-norm weight and every source.
"""

import sys

import torch
from fla.ops.attnres.naive import naive_attnres


def golden(case: dict) -> list[torch.Tensor]:
    leaves = [tensor.requires_grad_() for tensor in (case["query"], case["key_norm_weight"], *case["sources"])]
    query, key_norm_weight, *sources = leaves
    outputs = naive_attnres(query, sources, key_norm_weight, rms_eps=case["eps"], return_weights=True)
    gradients = torch.autograd.grad(outputs, leaves, (case["grad_result"], case["grad_weights"]))
    return [tensor.detach() for tensor in (*outputs, *gradients)]


if __name__ == "__main__":
    torch.save([golden(case) for case in torch.load(sys.argv[1])], sys.argv[2])
