"""Load models whose checkpoint holds all their tensors.

`transformers` draws missing tensors at random and says so in a table of its log. A command that goes on works on
another model than the user means.
"""

from collections.abc import Collection
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attnres.attention_gate_attnres import gate_tensors
from attnres.residual_attnres import residual_tensors
from attnres.wording import counted


def check_whole(model: nn.Module, missing: Collection[str], source: str, *, starts_anew: bool = False) -> None:
    """Raise ValueError if tensors of a model are missing in its checkpoint.

    Args:
        model: The model as it was loaded.
        missing: The names in `missing_keys` of the loading report.
        source: The directory or Hub id, for the message.
        starts_anew: Whether the tensors of its residual connections and attention gates may be missing. They have a
            start that is not random.
    """
    if starts_anew:
        missing = set(missing) - residual_tensors(model).keys() - gate_tensors(model).keys()
    if missing := sorted(missing):
        others = f" and {counted(len(missing) - 1, 'other tensor')}" if len(missing) > 1 else ""
        raise ValueError(f"{source} is incomplete: it lacks `{missing[0]}`{others}. Restore it from its source.")


def load_whole(auto_class: Any, source: str, *, starts_anew: bool = False, **options: Any) -> PreTrainedModel:
    """Load a model by an Auto class, and check that nothing of it is missing.

    Args:
        auto_class: Has `from_pretrained`, as `AutoModelForCausalLM` has.
        source: The directory or Hub id.
        starts_anew: See [`check_whole`].
        options: What else `from_pretrained` takes.

    Raises:
        ValueError: The checkpoint lacks tensors of the model. The message names one.
    """
    model, report = auto_class.from_pretrained(source, **options, output_loading_info=True)
    check_whole(model, report["missing_keys"], source, starts_anew=starts_anew)
    return model


__all__ = ["check_whole", "load_whole"]
