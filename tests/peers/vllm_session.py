"""Greedy decoding by vLLM's Transformers backend, one prompt alone and all at once; run by `test_vllm.py`.

vllm_session.py FOLDER PROMPTS NEW_TOKENS eager|compiled OUT        the tokens go to the file `OUT`
"""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

folder, prompts_file, new_tokens, mode, out = sys.argv[1:]
assert find_spec("attnres") is None, "attnres can be imported here"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams  # noqa: E402

prompts = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts_file).read_text())]
llm = LLM(
    model=folder,
    model_impl="transformers",
    trust_remote_code=True,
    skip_tokenizer_init=True,
    dtype="float32",
    enforce_eager=mode == "eager",
    max_model_len=128,
    max_num_seqs=3,  # fewer than there are prompts: some begin while others go on
    max_num_batched_tokens=128,
    gpu_memory_utilization=0.1,  # of the machine's memory, on a CPU
    kv_cache_memory_bytes=1 << 26,
)
sampling = SamplingParams(temperature=0, max_tokens=int(new_tokens), ignore_eos=True, detokenize=False)
generated = [llm.generate(prompts[:1], sampling), llm.generate(prompts, sampling)]
tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in generated]
Path(out).write_text(json.dumps({"alone": tokens[0], "together": tokens[1]}))
