"""The name of the cache among the arguments and outputs of a model, which transformers 5.24 changed."""

import inspect

from transformers import LlamaForCausalLM

# `past_key_values` still works in 5.24, with a warning, and goes in 5.40.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
