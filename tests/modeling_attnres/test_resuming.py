"""`transformers.Trainer` resumes from its checkpoints with every tensor, even where published names differ."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

ROWS = torch.randint(3, 99, (8, 12), generator=torch.Generator().manual_seed(1))


def train(model: PreTrainedModel, out: Path, resume: Path | None = None) -> dict[str, torch.Tensor]:
    """Train two steps with a checkpoint after each, and return the tensors."""
    options = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    quiet = {"report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(out), use_cpu=True, **options, **quiet)
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume and str(resume))
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["kimi_linear", "mixtral"])
def test_a_resumed_run_ends_with_the_tensors_of_an_uninterrupted_run(backbones, tmp_path, caplog, case):
    expected = train(backbones.build_member(case), tmp_path)
    first = tmp_path / "checkpoint-1"
    torch.manual_seed(5)
    with caplog.at_level(logging.WARNING):
        other = AutoModelForCausalLM.from_config(backbones.member_config(case))
        resumed = train(other, tmp_path / "resumed", first)
    assert [name for name, tensor in expected.items() if not torch.equal(resumed[name], tensor)] == []
    assert not [message for message in caplog.messages if "missing keys" in message or "unexpected keys" in message]

    # A checkpoint also loads as a model; saved elsewhere, it has the names of the published layout.
    (tmp_path / "latest").symlink_to(first)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "latest")
    AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="checkpoint-1").save_pretrained(tmp_path / "by subfolder")
    assert set(load_file(first / "model.safetensors")) <= set(expected)
    loaded.save_pretrained(tmp_path / "again")
    other.save_pretrained(tmp_path / "published")
    names = ("again", "by subfolder", "published")
    again, by_subfolder, published = (set(load_file(tmp_path / name / "model.safetensors")) for name in names)
    assert again == by_subfolder == published and any("block_sparse_moe" in name for name in published)
