"""AttnRes and its backbones as subjects of `transformers`' own model tests, one test class for each.

`transformers_suite.py` places this file among the suite's mixins, as `test_variants.py`, and runs it there.
"""

import inspect
import re
import unittest
from unittest import mock

import torch
from transformers import (
    KimiLinearForCausalLM,
    KimiLinearModel,
    LlamaForCausalLM,
    LlamaModel,
    MixtralForCausalLM,
    MixtralModel,
    PreTrainedConfig,
    PreTrainedModel,
    conversion_mapping,
)
from transformers.models.auto import modeling_auto

import attnres
from attnres import kimi_k3_attnres
from attnres.kimi_k3_layout_attnres import layout_rules
from attnres.kimi_k3_vision_configuration_attnres import vision_rules

from . import test_expert_parallel_mixin, test_fsdp_mixin, test_modeling_common, test_tensor_parallel_mixin
from .test_training_mixin import TrainingTesterMixin

# The suite decides by these names which inputs a class takes; those of `transformers` itself are in them.
for _prefix in ("AttnRes", "AttnResKimiK3", "AttnResLlama", "AttnResMixtral"):
    _model_type = getattr(attnres, f"{_prefix}Config").model_type
    modeling_auto.MODEL_MAPPING_NAMES[_model_type] = f"{_prefix}Model"
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[_model_type] = f"{_prefix}ForCausalLM"
# To save time it runs ranks for a few model types only, neither of ours among them. `None`: for every type.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_expert_parallel_mixin.EP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None


# What a configuration has beside the sizes in `ModelTester`. In Kimi Linear two layers, the most that the suite allows,
# hold every kind of sublayer: KDA and dense MLP, MLA and experts.
KIMI_LINEAR = {
    "intermediate_size": 37,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "linear_conv_kernel_dim": 2,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "moe_intermediate_size": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
# Kimi K3 has Kimi Linear's kinds of sublayers, and its own features: all of them are on. Two blocks, of one layer each.
KIMI_K3 = KIMI_LINEAR | {
    "attn_res_block_size": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "gate_lower_bound": -5.0,
    "use_full_rank_gate": True,
    "mla_use_output_gate": True,
    "q_lora_rank": 16,
    "n_shared_experts": 2,
    "routed_expert_hidden_size": 24,
    "latent_moe_use_norm": True,
}
LLAMA = {"intermediate_size": 37, "num_key_value_heads": 2}
# The product over experts wants rows of a multiple of 16 bytes, in half precision too.
MIXTRAL = {"intermediate_size": 40, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}


class ModelTester:
    """What the mixins ask for: a small configuration, inputs for it, their sizes, and the class with a loss."""

    batch_size = 13
    seq_length = 7
    is_training = True
    num_hidden_layers = 2
    num_attention_heads = 2
    hidden_size = 32

    def __init__(self, causal_lm_class: type[PreTrainedModel], fields: dict):
        self.causal_lm_class = causal_lm_class
        self.fields = fields

    def get_config(self) -> PreTrainedConfig:
        return self.causal_lm_class.config_class(
            vocab_size=99,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.fields,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        shape = [self.batch_size, self.seq_length]
        return config, {
            "input_ids": test_modeling_common.ids_tensor(shape, config.vocab_size),
            "attention_mask": test_modeling_common.random_attention_mask(shape),
        }


class Suite(
    test_modeling_common.ModelTesterMixin,
    TrainingTesterMixin,
    test_tensor_parallel_mixin.TensorParallelTesterMixin,
    test_expert_parallel_mixin.ExpertParallelTesterMixin,
    test_fsdp_mixin.FSDPTesterMixin,
):
    """Every mixin of the sdist that concerns a language model; a subclass says which model."""

    all_model_classes: tuple[type[PreTrainedModel], type[PreTrainedModel]]
    config_fields: dict
    model_tester = None  # abstract in most of the mixins
    # By default only for models whose configuration file carries a copyright line of 2023 or later.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = ModelTester(self.all_model_classes[1], self.config_fields)
        # The same weights and inputs in every run, and for every model.
        torch.manual_seed(0)
        test_modeling_common.global_rng.seed(0)


class AttnResSuite(Suite):
    def test_moe_models_record_router_logits(self):
        """The suite looks for experts in the file of the class: for ours, in that of its backbone."""
        getmodule = inspect.getmodule
        bases = self.all_model_classes[0].__mro__
        backbone = next(base for base in bases if base.__module__.startswith("transformers.models."))
        ours = dict.fromkeys(self.all_model_classes, backbone)
        with mock.patch.object(inspect, "getmodule", lambda thing, *rest: getmodule(ours.get(thing, thing), *rest)):
            super().test_moe_models_record_router_logits()

    def test_can_capture_specific_layers_hidden_states(self):
        """In place of the suite's test, which passes over models that record hidden states from two kinds of place."""
        for model_class in self.all_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            model = model_class(config).eval()
            with torch.no_grad():
                every = model(**inputs, output_hidden_states=True).hidden_states
                first_and_last = model(**inputs, output_hidden_states=[0, -1]).hidden_states
                middle = model(**inputs, output_hidden_states=1).hidden_states
            assert len(every) == 3
            for selected, expected in (
                (first_and_last, (every[0], None, every[2])),
                (middle, (None, every[1], None)),
            ):
                torch.testing.assert_close(selected, expected)


class KimiLinear(Suite, unittest.TestCase):
    """The yardstick of the variants on Kimi Linear."""

    all_model_classes = (KimiLinearModel, KimiLinearForCausalLM)
    config_fields = KIMI_LINEAR


class OnKimiLinear(AttnResSuite):
    all_model_classes = (attnres.AttnResModel, attnres.AttnResForCausalLM)


class Standard(OnKimiLinear, unittest.TestCase):
    config_fields = KIMI_LINEAR | {"residual_connection": "standard"}


class Full(OnKimiLinear, unittest.TestCase):
    config_fields = KIMI_LINEAR | {"attn_res_block_size": 1}


class BlocksOf4(OnKimiLinear, unittest.TestCase):
    config_fields = KIMI_LINEAR | {"attn_res_block_size": 4}


class BlocksOf3(OnKimiLinear, unittest.TestCase):
    config_fields = KIMI_LINEAR | {"attn_res_block_size": 3}


# Kimi K3 refuses a checkpoint that lacks a tensor. Tests of what becomes of missing tensors need the check to be off.
accept_missing_tensors = mock.patch.object(kimi_k3_attnres, "read_release", lambda config, tensors, *has: tensors)


class KimiK3(AttnResSuite, unittest.TestCase):
    all_model_classes = (attnres.AttnResKimiK3Model, attnres.AttnResKimiK3ForCausalLM)
    config_fields = KIMI_K3

    def setUp(self):
        super().setUp()
        # The suite gives configurations fields of many models. Kimi K3 refuses those that it does not know.
        check = attnres.AttnResConfig.check_fields  # of the fields that all members have
        patch = mock.patch.object(attnres.AttnResKimiK3Config, "check_fields", check)
        patch.start()
        self.addCleanup(patch.stop)

    def test_reverse_loading_mapping(self):
        # The rules of loading take packed experts and a vision part too, of which these models have no tensor.
        register, kind = (
            conversion_mapping.register_checkpoint_conversion_mapping,
            attnres.AttnResKimiK3Config.model_type,
        )
        of_text = layout_rules()[len(vision_rules()) :]
        plain = [rule for rule in of_text if not re.search("packed|scale", str(rule.source_patterns))]
        register(kind, plain, overwrite=True)
        self.addCleanup(register, kind, layout_rules(), overwrite=True)
        super().test_reverse_loading_mapping()

    @accept_missing_tensors
    def test_can_init_all_missing_weights(self):
        super().test_can_init_all_missing_weights()

    @accept_missing_tensors
    def test_correct_missing_keys(self):
        super().test_correct_missing_keys()

    @accept_missing_tensors
    def test_model_weights_reload_no_missing_tied_weights(self):
        super().test_model_weights_reload_no_missing_tied_weights()

    @accept_missing_tensors
    def test_base_model_prefix_loads_base_weights(self):
        super().test_base_model_prefix_loads_base_weights()


class Llama(Suite, unittest.TestCase):
    """The yardstick of the variant on Llama."""

    all_model_classes = (LlamaModel, LlamaForCausalLM)
    config_fields = LLAMA


class AttnResOnLlama(AttnResSuite):
    all_model_classes = (attnres.AttnResLlamaModel, attnres.AttnResLlamaForCausalLM)


class OnLlama(AttnResOnLlama, unittest.TestCase):
    config_fields = LLAMA | {"attn_res_block_size": 3}


def _with_each_connection(suite: type[Suite], backbone: str, fields: dict) -> None:
    """A test class for each residual connection that has none yet, such as `HighwayOnLlama`."""
    for connection in attnres.CONNECTIONS.keys() - {"attn_res"}:
        name = f"{connection.title().replace('_', '')}On{backbone}"
        members = {"config_fields": fields | {"residual_connection": connection}, "__module__": __name__}
        globals()[name] = type(name, (suite, unittest.TestCase), members)


_with_each_connection(OnKimiLinear, "KimiLinear", KIMI_LINEAR)
_with_each_connection(AttnResOnLlama, "Llama", LLAMA)


class Mixtral(Suite, unittest.TestCase):
    """The yardstick of the variant on Mixtral."""

    all_model_classes = (MixtralModel, MixtralForCausalLM)
    config_fields = MIXTRAL


class OnMixtral(AttnResSuite, unittest.TestCase):
    all_model_classes = (attnres.AttnResMixtralModel, attnres.AttnResMixtralForCausalLM)
    config_fields = MIXTRAL | {"attn_res_block_size": 3}
