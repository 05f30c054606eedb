"""The names of the package `attnres`, and the registration of the model family with the Auto classes.

This file is only installed: it does not travel with weights.
"""

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, processing_utils
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import backbones_attnres
from .configuration_attnres import BACKBONES, ResidualConfig, Sublayer, Sublayers
from .connections_attnres import CONNECTIONS
from .functional import depth_attention, depth_attention_reference
from .functional_attnres import DEPTH_ATTENTION
from .kimi_k3_attnres import (
    IS_KNOWN,
    AttnResKimiK3ForCausalLM,
    AttnResKimiK3ForSequenceClassification,
    AttnResKimiK3ForTokenClassification,
    AttnResKimiK3Model,
)
from .kimi_k3_configuration_attnres import AttnResKimiK3Config
from .kimi_k3_images_attnres import AttnResKimiK3ImageProcessor
from .kimi_k3_processor_attnres import AttnResKimiK3Processor
from .kimi_k3_vision_attnres import AttnResKimiK3ForConditionalGeneration
from .kimi_k3_vision_configuration_attnres import AttnResKimiK3VisionConfig
from .kimi_linear_configuration_attnres import AttnResConfig
from .kimi_tokenizer import TikTokenTokenizer
from .modeling_attnres import (
    AttnResForCausalLM,
    AttnResForSequenceClassification,
    AttnResForTokenClassification,
    AttnResModel,
    AttnResPreTrainedModel,
)
from .pretrained_attnres import ResidualPreTrainedModel
from .residual_attnres import ResidualConnection, residual_tensors
from .travelling import write_used_code
from .utils.declared import ENTRY_POINTS, IMPORTED, entry_point_modules, load_imported_files, register_connection
from .utils.wording import did_you_mean
from .value_residual_attnres import value_residual_tensors

_PEFT_TABLES = "peft.utils.constants"


def add_backbone(model_type: str, sublayers: Sublayers | Callable[[PreTrainedConfig], Sublayers]) -> None:
    """Add another decoder of `transformers` to the family; `attnres_{model_type}` becomes a model type.

    Args:
        model_type: the backbone's model type, known to `AutoConfig`.
        sublayers: the sublayers of one of its layers; see [`Sublayer`], and `PRE_NORM` and the other usual forms in
            `configuration_attnres`. Or a function that returns them for a configuration.

    Raises:
        ValueError: `AutoConfig` does not know the model type.
    """
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{model_type!r} is not a model type of `transformers`. Register its configuration with AutoConfig."
        )
    BACKBONES[model_type] = sublayers if callable(sublayers) else tuple(sublayers)
    config_class = backbones_attnres.config_on(model_type)
    transformers.AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    if _PEFT_TABLES in sys.modules:
        _enter_in_peft(sys.modules[_PEFT_TABLES])


def _enter_in_peft(constants: ModuleType) -> None:
    """Give the family's model types the entries of their backbones in PEFT's tables of default target modules."""
    for name, table in vars(constants).items():
        if name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(table, dict):
            for backbone in BACKBONES:
                if backbone in table:
                    table.setdefault(backbones_attnres.config_on(backbone).model_type, table[backbone])


class _PeftImport(MetaPathFinder):
    """Calls [`_enter_in_peft`] as soon as PEFT is imported, which this package does not do itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the usual specification of the file with PEFT's tables, with one more step in its execution."""
        if name != _PEFT_TABLES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:  # a PEFT without these tables
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _enter_in_peft(module)

        spec.loader.exec_module = exec_module
        return spec


def register_residual_connection(connection: type[ResidualConnection]) -> type[ResidualConnection]:
    """Add another residual connection to the family: its `name` becomes a value of `residual_connection`.

    It also works as a decorator of the class. The class of a file that [`import_files`] loads, or that an entry point
    names, is registered without it.

    Args:
        connection: a class with `name`, `mix` and `write`; everything else is optional.

    Returns:
        The same class.

    Raises:
        TypeError: it does not derive from [`ResidualConnection`].
        ValueError: its name is not an identifier, or belongs to another connection; or a configuration already has one
            of its fields. To register the same class again is allowed, as when a notebook's cell runs twice.
    """
    if not (isinstance(connection, type) and issubclass(connection, ResidualConnection)):
        raise TypeError(f"{connection!r} must be a class that derives from ResidualConnection.")
    name, title = getattr(connection, "name", None), connection.__qualname__
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"the `name` of {title} is {name!r}, but must be an identifier.")
    known, defaults = CONNECTIONS.get(name), {}
    if known is not None and (known.__module__, known.__qualname__) != (connection.__module__, title):
        raise ValueError(f"there is a residual connection {name!r} already: {known.__qualname__}.")
    for other in CONNECTIONS.values():
        defaults |= {} if other is known else other.fields
    configs = [AttnResConfig, *(backbones_attnres.config_on(name) for name in BACKBONES if name != "kimi_linear")]
    taken = {field for config in configs for field in (*dir(config), *config.attribute_map)}
    taken -= defaults.keys() | (known.fields.keys() if known else set())
    for field, default in connection.fields.items():
        if defaults.get(field, default) != default or field in taken or not field.isidentifier():
            raise ValueError(f"`{field}` of {title} is a field of the configuration already, or not an identifier.")
    CONNECTIONS[name] = connection
    for field, default in connection.fields.items():
        setattr(ResidualConfig, field, default)
    register_connection(connection)  # so that recipes take it
    return connection


# Published variants that are settings of a connection -> their fields. `retrofit`, `convert --residual` and the recipe
# key `retrofit` take these names; a configuration from scratch takes the fields: `load(NAME, **PRESETS["delta"])`.
PRESETS: dict[str, dict[str, Any]] = {
    # MHAR (arXiv 2607.27230), best with 4 to 8 heads.
    "multi_head": {"residual_connection": "attn_res", "attn_res_heads": 4},
    # Delta (arXiv 2605.18855): depth attention, times a scalar that starts at zero, beside an unchanged stream.
    "delta": {"residual_connection": "attn_res", "attn_res_gated": True, "attn_res_scale": "mean"},
}


def peft_modules_to_save(model: nn.Module) -> list[str]:
    """List the modules with the tensors of residual connections and value residuals, for PEFT's `modules_to_save`.

    PEFT freezes every tensor that is not a target, and `all-linear` does not target these: they are vectors. Listed in
    `modules_to_save`, they are trained whole and saved with the adapter.

    ```python
    >>> config = LoraConfig(target_modules="all-linear", modules_to_save=attnres.peft_modules_to_save(model))
    ```

    Args:
        model: a model of the family.

    Returns:
        Names of modules in their parent, such as `mlp_res_proj`; an empty list for a standard model.
    """
    return sorted({name.split(".")[-2] for name in residual_tensors(model) | value_residual_tensors(model)})


def _upload_with_card(model: ResidualPreTrainedModel, folder: str, repo: str, *args: Any, **kwargs: Any) -> Any:
    """Upload a saved model as `transformers` does, but with our model card in place of its template."""
    # Imported at the call, since these files must not depend on `conversion`, which depends on them.
    cards = importlib.import_module("attnres.publishing.cards")
    cards.replace_template(cards.CardSubject(model.config, Path(folder), repo))
    return transformers.PreTrainedModel._upload_modified_files(model, folder, repo, *args, **kwargs)


def _save_with_used_code(
    config: ResidualConfig, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any
) -> None:
    """Save a configuration as `transformers` does, with the code of the connection and the attention that it names."""
    transformers.PreTrainedConfig.save_pretrained(config, save_directory, **kwargs)
    write_used_code(config, Path(save_directory))
    if push_to_hub:  # only now is the folder complete
        config.push_to_hub(kwargs.pop("repo_id", Path(save_directory).name), **kwargs)


# As below: code that travels writes no files. A saved copy lists what it uses already.
# pyrefly: ignore[bad-assignment]  # its other arguments go on to `transformers`
ResidualConfig.save_pretrained = _save_with_used_code
# `push_to_hub` calls this method, and has no other place for a card. It is set here, and not defined in the class,
# because the class travels with weights and the cards do not.
ResidualPreTrainedModel._upload_modified_files = _upload_with_card
transformers.AutoConfig.register(AttnResConfig.model_type, AttnResConfig, exist_ok=True)
for _auto_class, _name in AttnResPreTrainedModel.auto_classes.items():
    getattr(transformers, _auto_class).register(AttnResConfig, globals()[_name], exist_ok=True)
if not IS_KNOWN:  # otherwise the Auto classes keep those of `transformers`
    transformers.AutoConfig.register(AttnResKimiK3Config.model_type, AttnResKimiK3Config, exist_ok=True)
for _auto_class, _name in AttnResKimiK3ForConditionalGeneration.auto_classes.items():
    getattr(transformers, _auto_class).register(AttnResKimiK3Config, globals()[_name], exist_ok=True)
# The same class for both kinds: it does without torchvision.
_image_classes = dict.fromkeys(("pil", "torchvision"), AttnResKimiK3ImageProcessor)
# From its file: without torchvision, `transformers` 5.17 has another object under this name, which raises.
AutoImageProcessor.register(AttnResKimiK3Config, image_processor_classes=_image_classes, exist_ok=True)
transformers.AutoProcessor.register(AttnResKimiK3Config, AttnResKimiK3Processor, exist_ok=True)
transformers.AutoTokenizer.register(AttnResKimiK3Config, TikTokenTokenizer, exist_ok=True)
for _backbone, _sublayers in BACKBONES.items():
    if _backbone != AttnResConfig.backbone:
        add_backbone(_backbone, _sublayers)
if _PEFT_TABLES not in sys.modules:
    sys.meta_path.insert(0, _PeftImport())


def __getattr__(name: str) -> type:
    """Return a class on another backbone, such as `AttnResLlamaForCausalLM`, on first use."""
    try:
        return getattr(backbones_attnres, name)
    except AttributeError:
        raise AttributeError(f"module {__package__!r} has no attribute {name!r}.{_remedy(name)}") from None


def _remedy(name: str) -> str:
    """Return the end of a message on an unknown name: where it is, or a similar name."""
    if name.startswith("_") or not name.isidentifier():  # tools ask every module for such names
        return ""
    if find_spec(f"{__package__}.{name}"):
        return f" It is a module: `import {__package__}.{name}` first."
    with suppress(ImportError):
        # Imported at the call, since these files must not depend on `conversion`, which depends on them.
        if name in getattr(importlib.import_module("attnres.conversion"), "__all__", ()):
            return f" It is in another module: `from attnres.conversion import {name}`."
    on_backbones = (f"AttnRes{MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(backbone, '')}" for backbone in BACKBONES)
    return did_you_mean(name, [*__all__, *on_backbones], otherwise_all=False)


def describe_connection(config: Any) -> str:
    """Return the residual connection of a model's configuration in a few words, for cards and reports."""
    return CONNECTIONS[config.residual_connection].describe(config)


def _load_connections(name: str, path: Path | None = None) -> None:
    """Import a module, and register the residual connections that it declares.

    Args:
        name: the module's import name.
        path: its file, if it was given by path and not by an installed package.
    """
    if path is None:
        module = importlib.import_module(name)
    else:
        package = sys.modules.setdefault(IMPORTED, ModuleType(IMPORTED))
        # By its search path, files import others beside them (`from .helpers import ...`).
        package.__path__ = [*dict.fromkeys([*getattr(package, "__path__", ()), str(path.parent)])]
        module = importlib.import_module(name)
    for value in [*vars(module).values()]:
        is_connection = isinstance(value, type) and issubclass(value, ResidualConnection)
        if is_connection and value.__module__ == name and "name" in vars(value):
            register_residual_connection(value)


def _add_to_transformers(new_class: type) -> None:
    """Make a class an attribute of `transformers`, where tools look up the `architectures` of a configuration."""
    # `processing_utils` replaces the module `transformers` in `sys.modules`: earlier importers hold another object.
    for module in (transformers, processing_utils.transformers_module):
        setattr(module, new_class.__name__, new_class)


for _config, _base in (
    (AttnResConfig, AttnResPreTrainedModel),
    (AttnResKimiK3Config, AttnResKimiK3ForConditionalGeneration),
):
    for _class in (_config, *(globals()[_name] for _name in _base.auto_classes.values())):
        _add_to_transformers(_class)
# The classes on a backbone are made with its first configuration, before a tool can read its `architectures`.
backbones_attnres.on_new_class.append(_add_to_transformers)


for _module in entry_point_modules():
    try:
        _load_connections(_module)
    except Exception as _error:  # another package's mistake must not keep this one from being imported
        warnings.warn(f"the entry point {_module} of {ENTRY_POINTS!r} was not loaded: {_error}", stacklevel=2)
load_imported_files(_load_connections)


__all__ = [
    "BACKBONES",
    "CONNECTIONS",
    "DEPTH_ATTENTION",
    "PRESETS",
    "AttnResConfig",
    "AttnResForCausalLM",
    "AttnResForSequenceClassification",
    "AttnResForTokenClassification",
    "AttnResKimiK3Config",
    "AttnResKimiK3ForCausalLM",
    "AttnResKimiK3ForConditionalGeneration",
    "AttnResKimiK3ForSequenceClassification",
    "AttnResKimiK3ForTokenClassification",
    "AttnResKimiK3ImageProcessor",
    "AttnResKimiK3Model",
    "AttnResKimiK3Processor",
    "AttnResKimiK3VisionConfig",
    "AttnResModel",
    "AttnResPreTrainedModel",
    "ResidualConfig",
    "ResidualConnection",
    "Sublayer",
    "add_backbone",
    "depth_attention",
    "depth_attention_reference",
    "peft_modules_to_save",
    "register_residual_connection",
]
