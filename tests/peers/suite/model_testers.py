"""AttnRes and Kimi Linear as subjects of `transformers`' own model tests, one test class for each.

`transformers_suite.py` places this file among the suite's mixins, as `test_variants.py`, and runs it there.
"""

import unittest

import torch
from transformers import KimiLinearForCausalLM, KimiLinearModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from attnres import AttnResConfig, AttnResForCausalLM, AttnResModel

from . import test_expert_parallel_mixin, test_fsdp_mixin, test_modeling_common, test_tensor_parallel_mixin
from .test_training_mixin import TrainingTesterMixin

# The suite decides by these names which inputs a class takes; those of `transformers` itself are in them.
modeling_auto.MODEL_MAPPING_NAMES[AttnResConfig.model_type] = AttnResModel.__name__
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AttnResConfig.model_type] = AttnResForCausalLM.__name__
# To save time it runs ranks for a few model types only, neither of ours among them. `None`: for every type.
test_tensor_parallel_mixin.TP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_expert_parallel_mixin.EP_DISTRIBUTED_TEST_MODEL_TYPES = None
test_fsdp_mixin.FSDP_DISTRIBUTED_TEST_MODEL_TYPES = None


class ModelTester:
    """What the mixins ask for: a small configuration, inputs for it, their sizes, and the class with a loss.

    Two layers, the most that the suite allows, hold every kind of sublayer: KDA and dense MLP, MLA and experts.
    """

    batch_size = 13
    seq_length = 7
    is_training = True
    num_hidden_layers = 2
    num_attention_heads = 2
    hidden_size = 32

    def __init__(self, causal_lm_class: type[PreTrainedModel], overrides: dict):
        self.causal_lm_class = causal_lm_class
        self.overrides = overrides

    def get_config(self) -> PreTrainedConfig:
        return self.causal_lm_class.config_class(
            vocab_size=99,
            hidden_size=self.hidden_size,
            intermediate_size=37,
            num_hidden_layers=self.num_hidden_layers,
            layer_types=["linear_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse"],
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_attention_heads,
            kv_lora_rank=16,
            qk_nope_head_dim=32,
            qk_rope_head_dim=16,
            v_head_dim=32,
            linear_conv_kernel_dim=2,
            linear_head_dim=16,
            linear_num_heads=4,
            moe_intermediate_size=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.overrides,
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
    config_overrides = {}
    model_tester = None  # abstract in most of the mixins
    # By default only for models whose configuration file carries a copyright line of 2023 or later.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = ModelTester(self.all_model_classes[1], self.config_overrides)
        # The same weights and inputs in every run, and for every model.
        torch.manual_seed(0)
        test_modeling_common.global_rng.seed(0)


class KimiLinear(Suite, unittest.TestCase):
    """The yardstick."""

    all_model_classes = (KimiLinearModel, KimiLinearForCausalLM)


class AttnResSuite(Suite):
    all_model_classes = (AttnResModel, AttnResForCausalLM)

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


class Standard(AttnResSuite, unittest.TestCase):
    config_overrides = {"residual_connection": "standard"}


class Full(AttnResSuite, unittest.TestCase):
    config_overrides = {"attn_res_block_size": 1}


class BlocksOf4(AttnResSuite, unittest.TestCase):
    config_overrides = {"attn_res_block_size": 4}


class BlocksOf3(AttnResSuite, unittest.TestCase):
    config_overrides = {"attn_res_block_size": 3}
