"""Tables of the commands of pages that tests run otherwise than printed.

A command without an entry runs as it is printed. The key of an entry is the beginning of a command.
"""

# Commands that are not run here -> the reason, or the test that runs them.
ELSEWHERE = {
    "pip install": "a package registry; environments of pip are made by `make` and by tests/peers/environments.py",
    "make demo": "tests/training/test_demo.py; .ci/run makes an environment",
    "attnres demo": "tests/training/test_demo.py, on less text",
    "make notebooks": "tests/notebooks",
    "python notebooks/execute.py": "tests/notebooks",
    "vllm serve my-k3": "needs GPUs; the guide says that it was not run",
    "python llama.cpp/convert_hf_to_gguf.py": "tests/peers/test_llama_cpp.py, which writes such a file itself",
    "llama-server": "tests/peers/test_llama_cpp.py, which calls the library",
    "vllm serve": "tests/peers/test_vllm.py, in an environment of its own",
    'python -c "import attnres; from transformers.cli': "serves without end; tests/modeling_attnres/test_tools.py",
    "attnres inspect attnres-demo/model --serve": "serves without end; tests/commands/test_inspect.py",
    "lm_eval run": "needs all 15 data sets; tests/eval/test_command.py, with some",
    "attnres train pretrain model=attnres-194m mtp_loss_weight": "takes days; tests/training/test_train.py",
    "accelerate launch": "takes several devices; tests/training/parallel/test_many_devices.py, with two processes",
    "python -m venv --system-site-packages peers": "as `pip install`",
    "peers/bin/p": "packages of a registry; tests/benchmarks/test_host.py, with what is installed",
    "python -m benchmarks": "a quarter of an hour; tests/commands/test_bench.py, part by part with --quick",
    "python -m experiments": "hours; tests/experiments, on little text",
    "hf download roneneldan/TinyStories": "the Hub, which tests do without",
    "head -c 2000000 corpora": "as that download",
    "tail -c 200000 corpora": "as that download",
    "attnres plan kimi-k3": "a minute; tests/commands/test_plan.py, on small models",
    "attnres convert stories260K": "tests/eval/test_command.py, on less data",
    "attnres demo --checkpoint stories260K": "tests/training/test_demo.py, on less data",
    "attnres eval retrofit": "tests/eval/test_command.py, on less data",
    "attnres eval healed": "tests/eval/test_command.py, on less data",
    "attnres eval my-k3": "tests/commands/test_kimi_k3.py, with other benchmarks",
}
# Blocks of Python that need other packages or several devices, by their beginning -> the test that runs them.
PYTHON_ELSEWHERE = {
    "from torchao.quantization": "tests/peers/test_quantisers.py, in an environment of its own",
    "from transformers import AutoModelForCausalLM\nfrom transformers.distributed": (
        "takes several devices; tests/training/parallel/test_sequence_parallel.py, with four processes"
    ),
}
_SHORT = ("length=32", "batch_size=4", "micro_batch_size=4", "held_out_sequences=2", "log_every=1")
_FEW = ("--tasks", "arc_challenge", "--data", "data", "--limit", "2")
_LITTLE = ("--tokens", "256", "--length", "64", "--intervention-tokens", "64")
# Arguments to add, with which a command takes seconds.
ADDED = {
    "attnres inspect": _LITTLE,
    "attnres eval qwen3-attnres --baseline": _FEW,
    "attnres eval qwen3-attnres --tasks arc_challenge --out": ("--data", "data"),
    "attnres eval runs/more/model --baseline": _FEW,
    "attnres train heal": ("tokens=512", *_SHORT),
    "attnres train pretrain": ("tokens=512", *_SHORT),
    "attnres train my-recipe.yaml": ("tokens=512", *_SHORT),
    "attnres train finetune model=Qwen": ("steps=2", *_SHORT),
    "attnres train finetune model=qwen3-attnres": ("steps=2", *_SHORT),
    "attnres train finetune model=attnres-demo": ("steps=2", *_SHORT),
    "attnres train finetune model=my-k3": ("steps=2", *_SHORT),
    "attnres train lora": ("steps=2", *_SHORT),
    "attnres train sft": ("steps=2", *_SHORT),
    "attnres train sft model=Kimi-K3 train=images.jsonl": ("steps=1", *_SHORT, "length=600"),
}


def entry(command: str, table: dict) -> str | None:
    """Return the longest key of a table that the command begins with, or `None`."""
    return max((key for key in table if command.startswith(key)), key=len, default=None)
