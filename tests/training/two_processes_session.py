"""Sessions of two processes for `test_two_processes.py`: `two_processes_session.py NAME FOLDER`.

The model and the batches come from `FOLDER/start.pt`; each process writes its
results to `FOLDER/{rank}.pt`.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import Trainer, TrainingArguments

from attnres import AttnResForCausalLM
from attnres.training.callbacks import ExpertBalance, Monitor, routers
from attnres.training.optimizer import build_optimizer
from attnres.training.recipe import Recipe
from attnres.training.trainer import AttnResTrainer

sys.path.insert(0, str(Path(__file__).parents[2]))  # the script is run by its path

from tests.training.running import uneven_rows


def balance(model: AttnResForCausalLM, blocks: torch.Tensor, folder: Path) -> dict:
    """Make one step of a `Trainer` on all blocks, with two micro-batches in each process."""
    time.perf_counter = lambda: 0.5 * trainer.state.global_step if trainer else 0.0
    trainer = None
    arguments = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=len(blocks) // 4,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=0.0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    callbacks = [ExpertBalance(0.25), Monitor()]
    rows = [{"input_ids": block, "labels": block} for block in blocks]
    trainer = Trainer(model, arguments, train_dataset=rows, callbacks=callbacks)
    trainer.train()
    biases = torch.stack([router.e_score_correction_bias for router in routers(model)])
    return {"biases": biases, "metrics": trainer.state.log_history[0], "slice": callbacks[1]._slice()}


def held_out(model: AttnResForCausalLM, blocks: torch.Tensor, folder: Path) -> dict:
    """Measure the held-out loss of rows that the processes cannot share equally."""
    arguments = TrainingArguments(
        folder, per_device_eval_batch_size=2, remove_unused_columns=False, report_to="none", use_cpu=True
    )
    recipe = Recipe("model", ["a.txt"], str(folder), steps=1)
    return {"loss": AttnResTrainer(model, recipe, arguments, eval_dataset=uneven_rows()).evaluate()["eval_loss"]}


def fsdp2(model: AttnResForCausalLM, blocks: torch.Tensor, folder: Path) -> dict:
    """Make three steps of Muon under FSDP2, each process on half of the batch; save and load before the third."""
    settings = {"name": "muon", "learning_rate": 0.02, "residual_lr_factor": 0.5, "muon_per_head": True}
    optimizer = build_optimizer(model, **settings)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in (*model.model.layers, model):
        fully_shard(module)
    sharded = dict(model.named_parameters())
    for group in optimizer.param_groups:  # as accelerate does it
        group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
    half = blocks.chunk(2)[torch.distributed.get_rank()]
    for step in range(3):
        if step == 2:
            torch.distributed.checkpoint.save(
                get_optimizer_state_dict(model, optimizer), checkpoint_id=folder / "state"
            )
            optimizer = build_optimizer(model, **settings)
            saved = get_optimizer_state_dict(model, optimizer)
            torch.distributed.checkpoint.load(saved, checkpoint_id=folder / "state")
            set_optimizer_state_dict(model, optimizer, saved)
        model(half, labels=half).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    experts = model.model.layers[1].mlp.experts.down_proj
    weights = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    return {"weights": weights, "local_experts": len(experts.to_local())}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    name, folder = sys.argv[1], Path(sys.argv[2])
    start = torch.load(folder / "start.pt", weights_only=False)
    model = AttnResForCausalLM(start["config"]).train()
    model.load_state_dict(start["weights"])
    result = {"balance": balance, "fsdp2": fsdp2, "held_out": held_out}[name](model, start["blocks"], folder)
    torch.save(result, folder / f"{torch.distributed.get_rank()}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
