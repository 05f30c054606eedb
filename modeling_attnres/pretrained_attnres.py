"""The base of the family's models in `transformers`: loading, saving, dtypes, records, and tables of class names."""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial, wraps
from inspect import Parameter, signature
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.models.auto import modeling_auto
from transformers.utils.output_capturing import OutputRecorder

from .configuration_attnres import ResidualConfig
from .connections_attnres import ATTENTION_CHANGES, CONNECTIONS, MTP
from .loading_attnres import (
    added_by_kind,
    check_added,
    check_files,
    check_shapes,
    explain_broken_shard,
    names_in,
    put_back_changed,
    stored_fields,
    warn_of_change,
)
from .records_attnres import RECORDS, SUMS
from .residual_attnres import AddedModule, ResidualConnection, ResidualNorm, explain_source
from .saving_attnres import complete_save, saved_whole, stage_in

# Model type -> class name. `Trainer`'s label smoothing, pipelines, `transformers serve` and lm-eval look here to tell
# language models from others. An Auto class's `register` does not write to these tables.
_CLASS_NAMES = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}
# Names of a layer's first sublayer. Its input is recorded as the layer's hidden state.
FIRST_SUBLAYER = ("self_attention_res", "parallel_res")
# The modules with the mixins' `forward`. With remote code, all files are in another package.
_MIXINS = [f"{__name__.rpartition('.')[0]}.{name}_attnres" for name in ("decoder", "heads")]


# A class of the family has its backbone's class after the mixin, so a type checker sees what all models have.
_AnyModel = PreTrainedModel if TYPE_CHECKING else object


class ResidualPreTrainedModel(_AnyModel):
    """Mixin of a backbone's `PreTrainedModel`: loading, saving, dtypes, and records of hidden states."""

    config: ResidualConfig
    config_class: type[ResidualConfig]
    base_model: "ResidualPreTrainedModel"  # the decoder
    built_with: dict[str, Any]  # what the decoder's connections were made with, from [`added_fields`]
    argument_names: tuple[str, ...]  # names of the positional arguments of `forward`
    get_input_embeddings: Callable[[], nn.Embedding]
    auto_classes: dict[str, str]  # Auto class -> name of the model class, in the same file

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        if not issubclass(cls, PreTrainedModel):
            return  # a mixin, such as `ResidualModel`
        bases = (c for c in cls.__mro__ if issubclass(c, PreTrainedModel))
        backbone = next(c for c in bases if not issubclass(c, ResidualPreTrainedModel))
        cls.__doc__ = cls.__doc__ or f"[`{backbone.__name__}`] with attention residuals or another of `CONNECTIONS`."
        # By default `transformers` would search the file of the class for the experts' decorator.
        cls._can_set_experts_implementation = backbone._can_set_experts_implementation
        _show_backbone_signature(cls)
        # A connection returns the input (0), the depth weights (1) and the state (2). `hidden_states` has the input of
        # each layer and of the final norm; `transformers` replaces the last one by the norm's output.
        record = partial(OutputRecorder, ResidualConnection, capture_initial_hidden_state=False)
        layers = [f"{name}_proj" for name in (*FIRST_SUBLAYER, "output_attn_res")]
        reads, states = ([record(index=index, layer_name=name) for name in layers] for index in (0, 2))
        own = {"hidden_states": reads, "depth_attentions": record(index=1), **dict.fromkeys(SUMS, states)}
        cls._can_record_outputs = (getattr(cls, "_can_record_outputs", None) or {}) | own
        # FSDP2 derives a class from the model's, and so may a user. It goes into the tables that hold its base.
        bases = {base.__name__ for base in cls.__mro__[1:]}
        for names in _CLASS_NAMES.values():
            if not bases.isdisjoint(name for name in names.values() if isinstance(name, str)):
                _add_class_name(names, cls)

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Save the class's code with its models, and name the class where the tools of `transformers` look."""
        super().register_for_auto_class(auto_class)
        name = auto_class if isinstance(auto_class, str) else auto_class.__name__
        if name in _CLASS_NAMES:
            _add_class_name(_CLASS_NAMES[name], cls)

    def post_init(self) -> None:
        """Initialise as `transformers` does, and keep some tensors of a 16-bit model in float32."""
        for name in ("_no_split_modules", "_keep_in_fp32_modules_strict"):
            vars(self).pop(name, None)  # the backbone's `__init__` has set them from its own classes
        super().post_init()
        in_float32 = [name for c in ATTENTION_CHANGES if c.is_on(self.config) for name in c.float32_modules]
        if CONNECTIONS[self.config.residual_connection].form(self.config).float32:
            in_float32.append("*_res_proj")
        if in_float32:
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), *in_float32}
        # A model that is made in 16 bits has all tensors in 16 bits. `from_pretrained` keeps the dtypes that it finds.
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        kept = self.tensors_kept_in_float32()
        for tensor in kept.values():
            tensor.data = tensor.data.to(torch.promote_types(tensor.dtype, dtype))  # float64 keeps its digits
        # Before transformers 5.23 the plan cannot be set, and FSDP2 groups whole layers.
        has_plan = getattr(getattr(type(self), "fsdp_plan", None), "fset", None) is not None
        if kept and has_plan and self.fsdp_plan and torch.get_default_dtype() != dtype:
            # FSDP2 needs one dtype in a group, but `transformers` groups a module with a tensor in float32 together
            # with its children in 16 bits. So each of these children gets a separate group.
            owners = {name.rpartition(".")[0] for name, _ in self.named_parameters() if name in kept}
            children = (f"{owner}.{name}" for owner in owners for name, _ in self.get_submodule(owner).named_children())
            apart = {re.sub(r"\.\d+\.", ".*.", name): "free_full_weight" for name in children}
            self.fsdp_plan = apart | self.fsdp_plan

    def requested(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the records that the arguments of a pass, or else the configuration, ask for: name -> value."""
        fields = {name: f"output_{name}" for name in ("hidden_states", *RECORDS)}
        values = {name: arguments.get(key, getattr(self.config, key, False)) for name, key in fields.items()}
        return {name: value for name, value in values.items() if value}

    def tensors_kept_in_float32(self) -> dict[str, Tensor]:
        """Return the tensors that `_keep_in_fp32_modules_strict` names, by name."""
        patterns = [name.replace(".", r"\.").replace("*", ".*") for name in self._keep_in_fp32_modules_strict or ()]
        if not patterns:
            return {}
        pattern = re.compile(rf"(^|\.)({'|'.join(patterns)})(\.|$)")
        named = chain(self.named_parameters(), self.named_buffers())
        return {name: tensor for name, tensor in named if tensor.is_floating_point() and pattern.search(name)}

    def _apply(self, fn: Callable[[Tensor], Tensor], *args, **kwargs):
        """Apply a function to all tensors; `model.to(torch.bfloat16)` and `model.half()` call this.

        It moves the tensors that stay in float32, but does not cast them to 16 bits.
        """
        kept = [*self.tensors_kept_in_float32().values()]
        kept += [tensor.grad for tensor in kept if tensor.grad is not None]
        kept_ids = {id(tensor) for tensor in kept}  # `fn` is called with tensors, and not with their names

        def cast(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            if id(tensor) in kept_ids and result.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(device=result.device, dtype=torch.float32)
            return result

        return super()._apply(cast, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, AddedModule):
            module.reset_parameters()
        elif isinstance(module, ResidualNorm):
            init.ones_(module.weight)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs):
        """Load a checkpoint of the family or of a backbone. From a backbone's, connections have their initial values.

        Args:
            pretrained_model_name_or_path: a folder or Hub id, of a model or of an adapter, whose base is checked.
            args: as in `transformers`.
            kwargs: as in `transformers`.

        Raises:
            ValueError: the checkpoint holds only some of the added tensors, or values that are not finite.
            RuntimeError: the configuration implies another shape for a tensor.
            OSError: a file is truncated or damaged; or an interrupted save into the folder has just been completed.
        """
        source, options = pretrained_model_name_or_path, kwargs.copy()
        # An Auto class has read `config.json` and the code before this method is called.
        if source is not None and complete_save(Path(source, kwargs.get("subfolder") or "")) and "config" in kwargs:
            raise OSError(
                f"a save into {source} was interrupted, and is complete now. Load it again: the configuration that was "
                "read may belong to the older model."
            )
        kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        with explain_source(source), explain_broken_shard(source, kwargs.get("subfolder", "")):
            # pyrefly: ignore[not-iterable]  # with `output_loading_info`
            model, info = super().from_pretrained(source, *args, **kwargs)
        loads, tensors = [(source, info)], added_by_kind(model)
        loaded = vars(model).pop("_loaded", None)
        if loaded is not None and getattr(model, "_hf_peft_config_loaded", False):
            # The source is an adapter, or has one beside its weights, and `info` is the adapter's. An Auto class passes
            # the base as the source, and the adapter in a private argument.
            of_base, tensors = loaded
            adapter = (options.get("adapter_kwargs") or {}).get("_adapter_model_path", source)
            loads = [(adapter, info), (model.config.name_or_path, of_base)]
        if not options.get("ignore_mismatched_sizes"):  # `transformers` ignored them, see above
            for name, load_info in loads:
                check_shapes(load_info["mismatched_keys"], name)
        source, load_info = loads[-1]
        for added in tensors:
            check_added(model, added, load_info["missing_keys"], source)
        if source is not None:
            # By the class of the model: a config.json may hold the fields in another form than the configuration does.
            stored = cls.config_class.fields_of_file(stored_fields(source, **options))
            warn_of_change(model, stored, source, load_info)
        if MTP is not None:
            MTP.freeze(model)  # `transformers` makes new parameters of what it loads
        if _by_own_names(source or "", kwargs.get("subfolder", "")):
            # No renaming applied to these names, and a save would apply none either. Without the attribute, a save
            # derives the renamings from the model type.
            vars(model).pop("_weight_conversions", None)
        return (model, info) if options.get("output_loading_info") else model

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: list[str] | None, load_config: Any, **kwargs: Any
    ) -> Any:
        """Check that no tensor lies in two files, and which layers there are, then load as `transformers` does.

        The name is private, but only there are the files known, which may have been downloaded.
        """
        files = checkpoint_files or [] if state_dict is None else []
        check_files(names := {file: names_in(file, load_config.weights_only) for file in files})
        if MTP is not None and MTP.is_on(model.config) and not getattr(model, "_hf_peft_config_loaded", False):
            MTP.fit(model, chain(state_dict or (), *names.values()))
        return PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, **kwargs)

    @staticmethod
    def _finalize_model_loading(model: PreTrainedModel, load_config: Any, loading_info: Any) -> Any:
        """Finish a load as `transformers` does, and keep its result for the checks of `from_pretrained`.

        The name is private, but nothing else shows what was loaded where an adapter is loaded next.
        """
        loading_info = PreTrainedModel._finalize_model_loading(model, load_config, loading_info)
        vars(model)["_loaded"] = loading_info.to_dict(), added_by_kind(model)
        return loading_info

    def save_pretrained(self, save_directory: str | Path, *args, **kwargs):
        """Save as `transformers` does, with the family's code; replace an older save in the folder as a whole.

        The arguments are those of `transformers`.

        Raises:
            OSError: no weights were written, or a file could not be moved.
        """
        put_back_changed(self.config, self.base_model.built_with)
        # FSDP2 derives the model's class from the family's, and so may a user. `transformers` saves the name and the
        # code of the class, so it must see the one that was registered for this.
        cls = type(self)
        own = next((c for c in cls.__mro__ if vars(c).get("_auto_class") is not None), cls)
        named = cls.__module__, cls.__name__
        kwargs.setdefault("save_original_format", not _by_own_names(save_directory))
        self.config.auto_map = auto_map(own)
        save = super().save_pretrained
        call = signature(save).bind(save_directory, *args, **kwargs).arguments
        call |= call.pop("kwargs", {})
        spread = torch.distributed.is_available() and torch.distributed.is_initialized()
        is_main = (not spread or torch.distributed.get_rank() == 0) and call.get("is_main_process", True)
        try:
            cls.__module__, cls.__name__ = own.__module__, own.__name__
            # Adapters do not replace the weights beside them. Of a distributed checkpoint, each process writes a part.
            if getattr(self, "_hf_peft_config_loaded", False) or call.get("distributed_checkpoint"):
                save(**call)
                return
            local = call | {"push_to_hub": False}
            if call.get("state_dict") is not None:
                local["state_dict"] = dict(call["state_dict"])  # `transformers` empties the dictionary that it saves
            with saved_whole(save_directory, call.get("variant")) if is_main else nullcontext(save_directory) as stage:
                save(**local | {"save_directory": stage})
            if call.get("push_to_hub"):
                # `transformers` uploads the folder that it writes to. So write again, to a stage for the upload: a
                # failed upload then loses nothing. Every process takes part, because they gather the weights together.
                call.setdefault("repo_id", os.path.basename(os.fspath(save_directory)))
                with stage_in(save_directory) if is_main else nullcontext(save_directory) as stage:
                    save(**call | {"save_directory": stage})
        finally:
            cls.__module__, cls.__name__ = named


def _by_own_names(*path: str | Path) -> bool:
    """Return whether a folder is saved under the model's own tensor names, and not in the published layout.

    `Trainer` resumes from its folders `checkpoint-7` without the conversion of `from_pretrained`.
    """
    return bool(re.fullmatch(r"checkpoint-\d+", Path(*path).resolve().name))


def auto_map(model_class: type[ResidualPreTrainedModel]) -> dict[str, str]:
    """Return the entry `auto_map` of `config.json`: Auto class -> class in the saved code, as `file.Class`."""
    config_class = model_class.config_class
    model_file, config_file = (cls.__module__.rpartition(".")[2] for cls in (model_class, config_class))
    classes = model_class.auto_classes
    if model_class.__name__ not in classes.values():  # a class that a user has derived, alone in its file
        classes = {} if model_class._auto_class is None else {model_class._auto_class: model_class.__name__}
    heads = {auto_class: f"{model_file}.{name}" for auto_class, name in classes.items()}
    return {"AutoConfig": f"{config_file}.{config_class.__name__}"} | heads


def _add_class_name(names: dict[str, Any], model_class: type[ResidualPreTrainedModel]) -> None:
    """Add a class to a table of `_CLASS_NAMES`, under its model type if that is free."""
    name, model_type = model_class.__name__, model_class.config_class.model_type
    if names.setdefault(model_type, name) != name:
        names[f"{model_type}/{name}"] = name  # tools search the values too


def _show_backbone_signature(model_class: type[ResidualPreTrainedModel]) -> None:
    """Give `forward` the signature of the backbone's `forward`, because `generate` and `Trainer` read it."""
    family_forward, *inherited = (vars(c)["forward"] for c in model_class.__mro__ if "forward" in vars(c))
    if family_forward.__module__ in _MIXINS:
        backbone_forward = next(forward for forward in inherited if forward.__module__ not in _MIXINS)

        @wraps(backbone_forward)
        def forward(self, *args, **kwargs):
            return family_forward(self, *args, **kwargs)

        forward.__doc__ = (
            f"As [`{backbone_forward.__qualname__}`]; `output_depth_attentions` adds `depth_attentions`: the weights "
            "`[sources, batch, seq]` with which each sublayer and the output read. `output_prefix_sums` and "
            "`output_running_sums` add the sums `[batch, seq, hidden]` before each layer and before the output: of the "
            "outputs in the current block, and of all outputs."
        )
        shown = signature(backbone_forward)
        own = [Parameter(f"output_{name}", Parameter.KEYWORD_ONLY, default=None) for name in RECORDS]
        before = [p for p in shown.parameters.values() if p.kind != Parameter.VAR_KEYWORD]
        after = [p for p in shown.parameters.values() if p.kind == Parameter.VAR_KEYWORD]
        # `generate` passes on the arguments that the signature has.
        # pyrefly: ignore[missing-attribute]
        forward.__signature__ = shown.replace(parameters=[*before, *own, *after])
        model_class.forward = forward
        # Names of positional arguments. They are kept here because `inspect` cannot read them in a traced call.
        model_class.argument_names = tuple(shown.parameters)[1:]


__all__ = ["FIRST_SUBLAYER", "ResidualPreTrainedModel", "auto_map"]
