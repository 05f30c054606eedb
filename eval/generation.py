"""Generate the answers of a model greedily, whatever its own settings of generation are."""

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.models.utils_hf import stop_sequences_criteria
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from attnres.eval.answer_length import DEFAULT_ANSWER

# The settings in a `generation_config.json` that change what greedy decoding gives: factors and counts, which change
# nothing if they are 1, and others, which change nothing if they are 0 or empty.
_FACTORS = (
    *("encoder_repetition_penalty", "guidance_scale", "num_beam_groups", "num_beams", "num_return_sequences"),
    "repetition_penalty",
)
_NOT_GREEDY = (
    *_FACTORS,
    *("bad_words_ids", "begin_suppress_tokens", "constraints", "dola_layers", "encoder_no_repeat_ngram_size"),
    *("exponential_decay_length_penalty", "force_words_ids", "forced_eos_token_id", "max_new_tokens", "max_time"),
    *("min_length", "min_new_tokens", "no_repeat_ngram_size", "penalty_alpha", "remove_invalid_values"),
    *("sequence_bias", "stop_strings", "suppress_tokens", "token_healing", "watermarking_config"),
)


class AnswerGenerator:
    """Generate answers by a model's own `generate`.

    Args:
        model: The model, or an adapter on a model.
        tokenizer: Its tokenizer.
        think_end_token: The token, as text or id, after which an answer begins.
    """

    def __init__(self, model: Any, tokenizer: Any, think_end_token: str | int | None = None) -> None:
        self._model = model
        # For an adapter, the model inside it has the settings of generation.
        self._inner: PreTrainedModel = getattr(model, "get_base_model", lambda: model)()
        self._tokenizer = tokenizer
        # An id may come as text from a command line.
        self._think_end = int(str(think_end_token)) if str(think_end_token).isdigit() else think_end_token

    @property
    def ignored_settings(self) -> dict[str, Any]:
        """The settings of the model's `generation_config.json` that would change greedy decoding, and are ignored."""
        settings = self._inner.generation_config.to_dict()
        return {
            name: settings[name]
            for name in _NOT_GREEDY
            if settings.get(name) and not (name in _FACTORS and settings[name] == 1)
        }

    def generate(self, prompts: Sequence[list[int]], arguments: dict[str, Any]) -> list[str]:
        """Return the answers to a batch of prompts.

        Args:
            prompts: The tokens of each prompt.
            arguments: The task's generation arguments.

        Raises:
            RuntimeError: A logit is NaN or infinite.
        """
        options: dict[str, Any] = dict(normalize_gen_kwargs(arguments, DEFAULT_ANSWER))
        eos = self._tokenizer.eos_token_id
        stops = handle_stop_sequences(options.pop("until"), eos=self._tokenizer.decode(eos))
        width = max(len(prompt) for prompt in prompts)
        num_answer = options.pop("max_gen_toks")
        max_length = options.pop("max_length", width + num_answer)
        if options["do_sample"] is False:
            options.pop("temperature", None)  # `generate` warns of it
        pad = eos if self._tokenizer.pad_token_id is None else self._tokenizer.pad_token_id
        rows = [[pad] * (width - len(prompt)) + prompt for prompt in prompts]
        masks = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        watch, device = _LargestLogit(), self._inner.device
        with self._greedy_settings():
            tokens = self._model.generate(
                input_ids=torch.tensor(rows, device=device),
                attention_mask=torch.tensor(masks, device=device),
                max_length=max_length,
                stopping_criteria=stop_sequences_criteria(self._tokenizer, stops, width, len(prompts)),
                logits_processor=LogitsProcessorList([watch]),
                pad_token_id=pad,
                use_cache=True,
                **options,
            )
        if watch.largest is not None and not watch.largest.isfinite():
            # The largest of NaN logits is an arbitrary token, so the text would count as a wrong answer.
            raise RuntimeError(
                "Logits of the model are NaN or infinite: its weights are damaged or its dtype overflows."
            )
        answers = []
        for row in tokens[:, width:].tolist():
            # The model stops at the EOS token of its configuration. If the tokenizer has another one, a row goes on
            # after it until its batch is finished.
            row = row[: row.index(eos)] if eos in row else row
            answers.append(self._decode_answer(row, stops))
        return answers

    def _decode_answer(self, tokens: list[int], stops: list[str]) -> str:
        """Return the text of an answer up to the first stop sequence, without what the model thought before it."""
        end = self._think_end
        if isinstance(end, int):
            places = [place for place, token in enumerate(tokens) if token == end]
            text = self._tokenizer.decode(tokens[places[-1] + 1 :] if places else tokens, skip_special_tokens=True)
            return postprocess_generated_text(text.lstrip(), stops, None)
        return postprocess_generated_text(self._tokenizer.decode(tokens, skip_special_tokens=True), stops, end)

    @contextmanager
    def _greedy_settings(self) -> Generator[None]:
        """Remove the settings in `_NOT_GREEDY` from the model within the block.

        An argument of `generate` cannot do this: there, None means the model's own setting.
        """
        model = self._inner
        before: GenerationConfig = model.generation_config
        model.generation_config = copy.deepcopy(before)
        for name in _NOT_GREEDY:
            if getattr(before, name, None) is not None:
                setattr(model.generation_config, name, None)
        try:
            yield
        finally:
            model.generation_config = before


class _LargestLogit(LogitsProcessor):
    """Keep the largest logit of a generation. It is NaN if any logit was.

    This adds one reduction to each step, and no transfer from the device.

    Attributes:
        largest: The largest logit so far, a scalar; `None` before the first step.
    """

    def __init__(self) -> None:
        self.largest: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        largest = scores.amax()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        return scores


__all__ = ["AnswerGenerator"]
