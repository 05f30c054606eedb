"""A `Trainer` whose checkpoints are complete or absent, and the space on the disk that they need.

A checkpoint is written under another name and then renamed. `transformers` writes it in place, and resumes from an
incomplete one without an error, with a new optimizer or other random numbers.
"""

import contextlib
import math
import os
import secrets
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.distributed import load_optimizer_distributed, save_optimizer_distributed
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, rotate_checkpoints
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from attnres.parameter_kinds import parameters_by_kind
from attnres.utils.errors import about, is_lost_connection, is_timeout, why_not_written
from attnres.utils.files import check_space

from .recipe import Recipe
from .resuming import cannot_resume_note, check_weights
from .run_folder import PARTIAL

OPTIMIZER = "optimizer"  # the folder of a sharded model's optimizer in a checkpoint


class ResumableTrainer(Trainer):
    """A `Trainer` whose checkpoints are complete or absent, and that resumes from its own checkpoints exactly.

    `Trainer` checks whether training is over only after a step. Resumed from its last checkpoint it makes one more,
    which changes the weights, and the checkpoint of that step replaces an older one. Here
    `train(resume_from_checkpoint=...)` ends at once if all steps have been made.

    `Trainer` also makes settings of its own here, which this class corrects: a single process uses one GPU, and the
    model's `use_cache` stays as it is.

    Args:
        model: The model.
        arguments: The arguments of the run; `_n_gpu` and `use_cache` are changed in place.
        options: Other arguments of `Trainer`, such as the data sets.

    Attributes:
        is_sharded: Whether `transformers` has sharded the model among the processes.
        best_step: The step of the checkpoint that `load_best_model_at_end` has loaded, `None` without one.

    Raises:
        OSError: From `train`: a checkpoint cannot be written. The one before it stays.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, arguments: TrainingArguments, **options: Any):
        self._saving_in: str | None = None  # the folder that a checkpoint is being written into
        self.best_step: int | None = None
        self.is_sharded: bool = getattr(model, "is_distributed_loading_by_transformers", False)
        if self.is_sharded:
            # `Trainer` cannot save a sharded optimizer; `_save_checkpoint` does.
            arguments.save_only_model = True
        if arguments.n_gpu > 1:
            # One process that sees several GPUs would train by `nn.DataParallel`, which multiplies the batch. There is
            # no public way to turn this off, and the property `n_gpu` has found the device by now.
            arguments._n_gpu = 1
        # `Trainer` writes `use_cache` of its arguments, false by default, into the model's configuration, and so into
        # every checkpoint and result. `compute_loss` turns the cache off instead.
        config = getattr(model, "config", None)
        has_use_cache = hasattr(config, "use_cache")
        arguments.use_cache = getattr(config, "use_cache", False)
        super().__init__(model, arguments, **options)
        if config is not None and not has_use_cache:  # as in models of text and images, whose text part alone has it
            vars(config).pop("use_cache", None)
        # A random part of the name of that folder, the same in all processes of this run. So a process that outlives
        # its run cannot write into a checkpoint of the next one.
        self._run_id: str = broadcast_object_list([secrets.token_hex(4)])[0]

    @property
    def total_parameters(self) -> int | None:
        """Return the number of parameters of the whole model if this process has only some layers, else `None`."""
        return None

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *arguments: Any, **options: Any) -> Any:
        """Compute the loss of a batch without a cache, as `Trainer` calls it."""
        return super().compute_loss(model, inputs | {"use_cache": False}, *arguments, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: PreTrainedModel | None = None) -> None:
        if self.has_optimizer_parts:  # the model has been loaded from the checkpoint already
            return
        folder, whole = Path(resume_from_checkpoint), self.model if model is None else model
        has_weights = any((folder / name).exists() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME))
        if has_weights and isinstance(whole, PreTrainedModel) and not self.is_fsdp_enabled:
            check_weights(whole, folder)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """Return the micro-batches of a step, as `Trainer` calls it; none if all steps have been made."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _get_output_dir(self, trial=None) -> str:
        """Return the folder that `Trainer` puts the next checkpoint into."""
        return self._saving_in or super()._get_output_dir(trial)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """Write the weights: for a checkpoint as resuming reads them, else as a whole model in the published layout."""
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        if not isinstance(model, PreTrainedModel):
            return super()._save(output_dir, state_dict)
        is_main, is_checkpoint = self.args.should_save, self._saving_in is not None
        sharding = getattr(model.config, "distributed_config", None)
        if self.is_sharded and not is_checkpoint:
            state_dict = model.gather_sharded_state_dict_for_save(
                model, model.state_dict(), sharding, save_on_this_rank=is_main
            )
            model.config.distributed_config = None  # since the files hold a whole model
        if state_dict is not None:
            # Gathering copies tied weights, and `save_pretrained` does not see that the copies are tied.
            state_dict = {name: state_dict[name] for name in state_dict if name not in model.all_tied_weights_keys}
        in_parts = self.is_sharded and is_checkpoint
        with _untied(model) if in_parts else contextlib.nullcontext():
            # A checkpoint has the model's own names of tensors, since resuming does not read a published layout.
            model.save_pretrained(
                output_dir or self.args.output_dir or "",
                state_dict=state_dict,
                is_main_process=is_main,
                save_original_format=not is_checkpoint,
                distributed_checkpoint=in_parts,
            )
        if sharding is not None:
            model.config.distributed_config = sharding

    def merge_adapter(self) -> None:
        """Merge the trained adapter into the model, which then is saved like any other; all processes call it."""
        from .lora import merge_adapters  # here, since `peft` comes with an extra

        adapted: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        self.model = self.model_wrapped = merge_adapters(adapted)

    def _save_checkpoint(self, model, trial) -> None:
        """Write a checkpoint under another name, and rename it once every process has written its part."""
        run = Path(self.args.output_dir or "")
        self._saving_in = str(run / f"{PARTIAL}{self._run_id}")
        try:
            if self.args.should_save:
                shutil.rmtree(self._saving_in, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if self.is_sharded:
                folder = f"{self._saving_in}/{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
                self._save_optimizer_and_scheduler(folder)
                self._save_rng_state(folder)
            self._name_best(run)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                (folder,) = Path(self._saving_in).iterdir()  # `checkpoint-N`
                if self.state.best_global_step:
                    self.state.save_to_json(str(folder / TRAINER_STATE_NAME))
                shutil.rmtree(run / folder.name, ignore_errors=True)
                # Otherwise a machine that loses its power could leave a checkpoint with empty files.
                _flush(folder)
                folder.rename(run / folder.name)
        except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
            if is_lost_connection(error) or is_timeout(error):
                raise  # another process has failed, and reports why; or it hangs
            last = get_last_checkpoint(str(run))
            raise OSError(
                f"the checkpoint of step {self.state.global_step} could not be written: {why_not_written(error)}. "
                f"The last one is {last or 'none'}."
            ) from error
        finally:
            if self.args.should_save:
                shutil.rmtree(self._saving_in, ignore_errors=True)
            self._saving_in = None
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(run), save_total_limit=self.args.save_total_limit, best_model_checkpoint=best)
        self.accelerator.wait_for_everyone()

    def _name_best(self, run: Path) -> None:
        """Set the path of the best checkpoint, which `Trainer` takes for a part of the folder being written into."""
        if step := self.state.best_global_step:
            path = run / f"{PREFIX_CHECKPOINT_DIR}-{step}"
            if step == self.state.global_step or path.is_dir():
                self.state.best_model_checkpoint = str(path)

    def _load_best_model(self) -> None:
        """Load the checkpoint with the lowest held-out loss, as `Trainer` calls it when training ends.

        Raises:
            FileNotFoundError: Someone has removed it. `Trainer` would only log this, and go on with the last weights.
        """
        # pyrefly: ignore[bad-argument-type]  # `Trainer` calls this only if there is one
        folder = Path(self.state.best_model_checkpoint)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder}, the checkpoint with the lowest held-out loss, was removed during the run. Take another "
                f"checkpoint in {folder.parent} as the result."
            )
        self._load_best_weights(folder)
        self.best_step = self.state.best_global_step

    def _load_best_weights(self, folder: Path) -> None:
        """Load the weights of the best checkpoint, in this folder."""
        super()._load_best_model()

    # Checkpoints of sharded models: each process reads and writes its part.

    @property
    def has_optimizer_parts(self) -> bool:
        """Return whether each process writes its part of the optimizer's state into a checkpoint.

        An adapter is whole in each process, and so is its optimizer's state.
        """
        return self.is_sharded and isinstance(self.model, PreTrainedModel)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.has_optimizer_parts:
            return super()._save_optimizer_and_scheduler(output_dir)
        # pyrefly: ignore[missing-attribute]  # `accelerate` has wrapped it
        save_optimizer_distributed(self.model, self.optimizer.optimizer, f"{output_dir}/{OPTIMIZER}")
        if self.args.should_save:
            # pyrefly: ignore[missing-attribute]  # made before the first step
            torch.save(self.lr_scheduler.state_dict(), f"{output_dir}/{SCHEDULER_NAME}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self._load_states(checkpoint)
        schedule = self.lr_scheduler
        if checkpoint is not None and isinstance(schedule, LambdaLR):  # DeepSpeed has its own
            # The checkpoint has the rates of the next step in a run of its length, and this run may be longer.
            for group, rate, factor in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
                group["lr"] = rate * factor(schedule.last_epoch)
            schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]  # which `Trainer` logs

    def _load_states(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "")
        if not self.has_optimizer_parts or checkpoint is None:
            with about(folder / OPTIMIZER_NAME, cannot_resume_note(folder)):
                return super()._load_optimizer_and_scheduler(checkpoint)
        with about(folder / OPTIMIZER, cannot_resume_note(folder)):
            # pyrefly: ignore[missing-attribute]  # `accelerate` has wrapped it
            load_optimizer_distributed(self.model, self.optimizer.optimizer, str(folder / OPTIMIZER))
        with about(folder / SCHEDULER_NAME, cannot_resume_note(folder)):
            self._load_schedule(folder / SCHEDULER_NAME)

    def _load_schedule(self, path: Path) -> None:
        """Continue the schedule at the step of a checkpoint."""
        # pyrefly: ignore[missing-attribute]  # made before the first step
        self.lr_scheduler.load_state_dict(torch.load(path, weights_only=True))


@contextlib.contextmanager
def _untied(model: PreTrainedModel) -> Generator[None]:
    """Give tied parameters memory of their own for a while.

    `transformers` writes all parameters of a sharded checkpoint, and `safetensors` refuses those that share memory, as
    they do in a resumed run.
    """
    model.state_dict()  # FSDP2 puts the parts of parameters into the modules before it reads them
    tied = []
    for name in model.all_tied_weights_keys:
        owner, _, leaf = name.rpartition(".")
        parameters = model.get_submodule(owner)._parameters
        if (parameter := parameters[leaf]) is None:
            continue
        tied.append((parameters, leaf, parameter))
        parameters[leaf] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
    try:
        yield
    finally:
        for parameters, leaf, parameter in tied:
            parameters[leaf] = parameter


def _flush(folder: Path) -> None:
    """Make sure that the files of a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def check_disk(trainer: ResumableTrainer, recipe: Recipe, steps_made: int = 0) -> None:
    """Raise if the disk has too little free space for the files of a run.

    Args:
        trainer: The trainer, which has not begun.
        recipe: The recipe of the run.
        steps_made: The step of the checkpoint that the run resumes from.

    Raises:
        OSError: There is too little space. The message says how much is needed.
    """
    out, checkpoint = Path(recipe.out), checkpoint_bytes(trainer, recipe)
    stored = len([*out.glob("checkpoint-*")])
    saves = math.ceil(trainer.args.max_steps / trainer.args.save_steps) - steps_made // trainer.args.save_steps
    # A checkpoint is whole before an older one is removed, and the model is written beside the checkpoints that stay.
    most, last = (min(recipe.keep + spare, stored + saves) - stored for spare in (1, 0))
    needed = max(most * checkpoint, last * checkpoint + model_bytes(trainer, recipe))
    try:
        check_space(out, int(needed))
    except OSError as error:
        raise OSError(f"{error} Free some, or choose another `out`, or write fewer checkpoints by `keep`.") from error


def checkpoint_bytes(trainer: ResumableTrainer, recipe: Recipe) -> int:
    """Return the size of a checkpoint without its small files: the weights, and the moments of the optimizer."""
    kinds = parameters_by_kind(trainer.model)
    # AdamW keeps two moments of each parameter, and Muon one of each matrix.
    moments = {kind: 1 if recipe.optimizer == "muon" and kind == "matrices" else 2 for kind in kinds}
    states = sum(moments[kind] * parameter.nbytes for kind, part in kinds.items() for parameter in part)
    return int(_saved_bytes(trainer, recipe) + states * _processes_share(trainer))


def model_bytes(trainer: ResumableTrainer, recipe: Recipe) -> int:
    """Return the size of the results: the model or adapter and, with `merge`, the merged model."""
    merged = sum(p.nbytes for p in trainer.model.parameters() if not p.requires_grad) if recipe.merge else 0
    return _saved_bytes(trainer, recipe) + merged


def _saved_bytes(trainer: ResumableTrainer, recipe: Recipe) -> int:
    """Return the size of the weights that a checkpoint holds: those of the model, or only those of its adapter."""
    is_adapter = recipe.lora is not None
    size = sum(p.nbytes for p in trainer.model.parameters() if p.requires_grad or not is_adapter)
    return int(size * _processes_share(trainer))


def _processes_share(trainer: ResumableTrainer) -> float:
    """Return by how much the whole model is larger than the model of this process, which may have only some layers."""
    total = trainer.total_parameters
    return 1.0 if total is None else total / sum(parameter.numel() for parameter in trainer.model.parameters())


__all__ = ["ResumableTrainer", "check_disk", "checkpoint_bytes", "model_bytes"]
