"""Mixins of a backbone's heads: models with a loss, language models, and sequence classifiers."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import ModelOutput, SequenceClassifierOutputWithPast
from transformers.utils import can_return_tuple

from .configuration_attnres import ResidualConfig
from .connections_attnres import MTP
from .decoder_attnres import ResidualModel
from .pretrained_attnres import ResidualPreTrainedModel
from .records_attnres import RECORDS, Receiver

# The backbone's class follows the mixins, so a type checker sees what all models have.
_AnyModel = PreTrainedModel if TYPE_CHECKING else object


class ResidualHead(ResidualPreTrainedModel):
    """Mixin of a backbone's model with a head, such as `LlamaForCausalLM`."""

    model_class: type[ResidualModel]
    base_model: ResidualModel

    def __init__(self, config: ResidualConfig):
        config.check_fields()
        super().__init__(config)
        # The backbone has made its decoder of a fixed class. The family's decoder takes over its modules, because its
        # own `__init__` would initialise all weights twice. `PreTrainedModel.__init__` alone is needed: `transformers`
        # registers the recorded outputs of a class there.
        decoder = self.model_class.__new__(self.model_class)
        PreTrainedModel.__init__(decoder, config)
        vars(decoder).update(vars(self.base_model))
        decoder.connect()
        setattr(self, self.base_model_prefix, decoder)
        self.post_init()

    @can_return_tuple
    def forward(self, *args, **kwargs) -> ModelOutput:
        """Run the model; see the backbone's own `forward` for arguments and result."""
        records = self.requested(kwargs)
        given = dict(zip(self.argument_names, args))  # labels and mask, too, may be given by position
        predicts_ahead = MTP is not None and self.config.mtp_loss_weight and MTP.has_loss(self, given | kwargs)
        if records or predicts_ahead:  # only on demand, because the loss function gets the receiver too
            kwargs.setdefault("receiver", Receiver())  # a generator of drafts passes its own
        # `Trainer` expects a loss that is divided by the number of labels in all accumulated batches. The loss of a
        # language model is. The other heads ignore that number, and return the mean over their batch.
        total = None if self.can_generate() else kwargs.pop("num_items_in_batch", None)
        outputs = super().forward(*args, **kwargs | {"return_dict": True})
        if MTP is not None and predicts_ahead:
            outputs = MTP.add_loss(self, outputs, given | kwargs)
        if total is not None and outputs.get("loss") is not None:
            share = ((given | kwargs)["labels"].ne(-100).sum() / total).to(outputs.loss.device)
            # A batch without labels has the mean NaN; its share of all labels is zero.
            outputs["loss"] = torch.where(share > 0, outputs.loss * share, 0.0)
        for name in RECORDS:
            if name in records:
                outputs[name] = kwargs["receiver"].outputs[name]
            else:
                setattr(outputs, name, None)
        return outputs


class ResidualLanguageModel(ResidualHead):
    """Mixin of a backbone's language model, such as `LlamaForCausalLM`."""

    get_output_embeddings: Callable[[], nn.Linear]

    _steps: list[dict[str, Any]] | None = None  # records of the steps of `generate`, if it was asked for some

    # With its name and signature: tools of `transformers` look for a `generate` that is not of `GenerationMixin`.
    @wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs) -> Any:
        """Generate text as `transformers` does; see there for arguments and result.

        With `return_dict_in_generate=True` and an argument such as `output_prefix_sums=True`, the result has the
        records of every step in a tuple, as it has `hidden_states`.

        Raises:
            ValueError: also if assisted generation gets `inputs_embeds`, or is to return records.
        """
        config, names = self.base_model.config, [name for name in RECORDS if kwargs.get(f"output_{name}")]
        layers, steps = config.num_hidden_layers, self._steps
        if names:
            self._steps = []
        try:
            # pyrefly: ignore[not-callable]  # the backbone's model is a `GenerationMixin`
            result = super().generate(*args, **kwargs)
            if isinstance(result, ModelOutput):
                for name in names:
                    result[name] = tuple(step[name] for step in self._steps or ())
            return result
        finally:
            # For `assistant_early_exit`, `transformers` lowers the number, and does not restore it after an error.
            config.num_hidden_layers, self._steps = layers, steps

    def _update_model_kwargs_for_generation(self, outputs: ModelOutput, *args, **kwargs) -> dict[str, Any]:
        """Prepare the next step as `transformers` does, which calls this after each step, and keep the records."""
        if self._steps is not None:
            self._steps.append({name: outputs[name] for name in RECORDS if name in outputs})
        # pyrefly: ignore[not-callable]  # the backbone's model is a `GenerationMixin`
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)

    def _get_candidate_generator(self, generation_config: Any, *args, **kwargs) -> Any:
        """Return the generator of drafts. For `use_mtp`, `transformers` would read the layer from the checkpoint."""
        if MTP is None or not getattr(generation_config, "use_mtp", None):
            # pyrefly: ignore[not-callable]  # the backbone's model is a `GenerationMixin`
            return super()._get_candidate_generator(generation_config, *args, **kwargs)
        return MTP.candidates(self, generation_config, kwargs["logits_processor"])

    def _assisted_decoding(self, *args, **kwargs) -> Any:
        """Decode with drafts as `transformers` does, but refuse records, which would include rejected drafts."""
        if self._steps is not None:
            raise ValueError("assisted generation returns no record but `hidden_states`: call the model on its tokens.")
        if kwargs.get("inputs_embeds") is not None:  # the first pass would read them alone, without the drafts
            raise ValueError("assisted generation needs tokens: pass `input_ids` and no `inputs_embeds`.")
        # pyrefly: ignore[not-callable]  # the backbone's model is a `GenerationMixin`
        return super()._assisted_decoding(*args, **kwargs)


class PooledByMask(GenericForSequenceClassification, _AnyModel):
    """Mixin of a sequence classifier that pools `inputs_embeds` at the last token that is not padding.

    `transformers` finds padding by token id. For `inputs_embeds` it pools the last position, which is padding in a row
    that is padded on the right.
    """

    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, *args, **kwargs):
        """Run the classifier; see `transformers`' own `forward` for arguments and result."""
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is None or not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
            return super().forward(input_ids, attention_mask, *args, **kwargs)
        labels = kwargs.pop("labels", None)
        outputs = self.base_model(input_ids, attention_mask, *args, **kwargs)
        batch_size, length = embeddings.shape[:2]
        is_token = attention_mask[:, -length:] != 0  # (batch, length); with a cache, the mask covers earlier tokens too
        # The product is largest at the last real token.
        last = (torch.arange(length, device=is_token.device) * is_token).argmax(-1).to(embeddings.device)
        hidden = outputs.last_hidden_state[torch.arange(batch_size, device=embeddings.device), last]
        logits = self.score(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        kept = {name: outputs.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, **kept)


__all__ = ["PooledByMask", "ResidualHead", "ResidualLanguageModel"]
