"""Make the table of how each residual connection starts and runs, for `tables.py`.

Most cells are declared in the class of the connection, or found by building a small model. Where a connection was
tested is written here, and `tests/pages/test_connection_facts.py` compares it with the tests.
"""

import json
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer

from attnres import CONNECTIONS
from attnres.residual_attnres import ResidualConnection, residual_tensors
from attnres.utils.packaged import configurations

# Connections that tests run in pipelines of several processes, and with a sequence that is sharded among them.
PIPELINES = {"attn_res", "denseformer", "gated_residual", "mhc", "standard"}
SEQUENCES = {"attn_res", "denseformer", "mhc"}


def run_rows(names: Iterator[str]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table, for the connections of these names.

    Args:
        names: names of connections.
    """
    evidence = json.loads((configurations() / "evidence.json").read_text(encoding="utf-8"))
    for name in names:
        model = _build(name)
        connection = model.base_model.get_submodule("output_attn_res_proj")
        trained = residual_tensors(model)
        decaying = {n.rpartition(".")[2] for n in Trainer.get_decay_parameter_names(None, model) if n in trained}
        yield (
            f"`{name}`",
            (CONNECTIONS[name].own_start or "the paper's") if trained else "no tensors",
            ", ".join(f"`{tensor}`" for tensor in sorted(decaying)) or "-",
            "tested" if name in PIPELINES else "yes",
            "tested" if name in SEQUENCES else "yes",
            ", ".join(_sums(connection)) or "-",
            "yes" if name in evidence or name == "standard" else "no",
        )


TITLES = (
    "name",
    "start from scratch",
    "decays with `Trainer` alone",
    "in pipelines",
    "sharded sequence",
    "sums kept",
    "compared here",
)


def _build(name: str) -> PreTrainedModel:
    """Build a small Llama with a connection."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    fields = {"residual_connection": name, "num_hidden_layers": 2}
    if name == "laurel":
        fields["laurel_rank"] = 2
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("attnres_llama", **sizes, **fields))


def _sums(connection: ResidualConnection) -> Iterator[str]:
    """Yield the names of the sums that a connection keeps."""
    state = torch.zeros(1, 1, 8)
    for name, compute in (("partial", connection.partial_sum), ("running", connection.running_sum)):
        if compute(state) is not None:
            yield name


__all__ = ["PIPELINES", "SEQUENCES", "TITLES", "run_rows"]
