"""Make small checkpoints on disk, change them, and run `attnres convert` in this process."""

import contextlib
import io
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from attnres.commands.main import main

FIELDS = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,  # 6 sublayers
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.mlp_res_proj.weight"
IDS = torch.randint(3, FIELDS["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(1))


def standard_model(model_type: str = "llama", **fields) -> PreTrainedModel:
    """Return a standard model whose every term moves the logits, always with the same weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**FIELDS, **fields})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            else:
                parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    return model


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer with one token for each byte, so that every text has tokens."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate([*characters, "<unk>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a directory's safetensors files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def change_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Give tensors other values, or remove those whose value is None. An index keeps their names."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if changes.keys() & tensors.keys():
            tensors |= {name: tensor for name, tensor in changes.items() if name in tensors}
            save_file({n: t for n, t in tensors.items() if t is not None}, path, metadata={"format": "pt"})


def change_json(path: Path, *removed: str, **changes) -> dict:
    """Change and remove fields of a JSON file, and return its new content."""
    fields = {name: value for name, value in (json.loads(path.read_text()) | changes).items() if name not in removed}
    path.write_text(json.dumps(fields))
    return fields


def forget(folder: Path, name: str) -> Path:
    """Remove a tensor from the index of a directory, and return the file that holds it."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"].pop(name)
    (folder / INDEX).write_text(json.dumps(index))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a directory with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def logits_of(folder: Path) -> torch.Tensor:
    """Return the logits of the model in a directory for `IDS`."""
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder).eval()(IDS).logits


def assert_same_function(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that logits are equal up to rounding, and not all small."""
    assert expected.abs().max() >= 2, "the comparison needs logits of some size"
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@dataclass
class Run:
    """The exit status and output of a run of the command line."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The line on stderr of a run that failed."""
        lines = self.err.strip().splitlines()
        assert self.code == 1, f"exit {self.code}: {self.err}"
        assert len(lines) == 1 and lines[0].startswith("attnres: "), self.err
        return lines[0].removeprefix("attnres: ")


def run_attnres(*arguments: str | Path) -> Run:
    """Run `attnres ARGUMENTS` in this process."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with (
            mock.patch.object(sys, "argv", ["attnres", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Run(code, out.getvalue(), err.getvalue())


def convert(*arguments: str | Path) -> Run:
    """Run `attnres convert ARGUMENTS` in this process."""
    return run_attnres("convert", *arguments)


def convert_well(*arguments: str | Path) -> Run:
    """Run `attnres convert ARGUMENTS`, and assert that it succeeds."""
    run = convert(*arguments)
    assert run.code == 0, run.err
    return run
