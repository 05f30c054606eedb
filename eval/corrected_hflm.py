"""Correct the faults of `HFLM`, the model class of lm-evaluation-harness, that change numbers or end a run.

`CorrectedHFLM` treats special tokens as a model sees them in use, refuses incomplete checkpoints and NaN, and halves
its batches when memory runs out. `shared_prefix` builds on it and makes likelihoods fast.

Private methods of `HFLM` are overridden where no public method does the step, such as the encoding of a pair.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from attnres.checkpoints.whole import check_source_sizes, load_whole
from attnres.eval.answer_length import answer_tokens
from attnres.eval.special_tokens import check_special_tokens, count_appended, cut_left
from attnres.utils.token_ids import check_token_ids

logger = logging.getLogger(__name__)

_BROKEN = "The model computes {}: its weights are damaged or its dtype overflows."

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (texts, context tokens, continuation tokens)
Answer = tuple[float, bool]  # (log-likelihood of the continuation, whether greedy decoding gives it)
Finish = Callable[[dict[int, Answer]], None]  # takes the answers of some requests by their index

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


class CorrectedHFLM(HFLM):
    """A model in the harness that differs from `HFLM` where `HFLM` is wrong.

    - No text begins with two BOS tokens. `HFLM` puts one before the first window of `loglikelihood_rolling` where the
      tokenizer has added one too, and scores the second.
    - Tokens that a tokenizer appends, such as EOS, are left out, because a model continues its prompt.
    - A prompt that is longer than the model's context keeps its BOS token. `HFLM` cuts it off with the beginning.
    - Log-likelihoods are summed in float32, unless `softmax_dtype` names another dtype. `HFLM` sums them in the model's
      dtype. In bfloat16, numbers above 32 are multiples of 0.25, so that unequal choices tie.
    - A continuation that the tokenizer joins with the end of its context is encoded alone. `HFLM` stops with an
      assertion.
    - Text after an EOS token does not count, even if the model's configuration names another one. Otherwise an answer
      would depend on the other rows of its batch.
    - Likelihoods and logits that are NaN raise an error. With `HFLM` the first choice would be the answer, and a
      generated text a wrong one.
    - Settings of `generation_config.json` that change greedy decoding, such as `repetition_penalty`, are ignored.
      Otherwise two models could be compared under different rules. A task's own settings count.
    - A checkpoint that lacks tensors raises an error. `HFLM` would draw the missing ones at random.

    A batch that does not fit in memory is halved, and a batch size once halved stays so. A batch size of `"auto"` is
    tried from `max_batch_size` down.

    Args:
        pretrained: As in `HFLM`: a directory, a Hub id or a model.
        progress: Called with the number of requests of the current call that are done, instead of drawing a progress
            bar. The attribute may change between calls.
        hflm_arguments: The other arguments of `HFLM`.

    Attributes:
        cut_requests: The number of requests so far that were longer than the model's context.

    Raises:
        ValueError: The tokenizer names neither a BOS nor an EOS token.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        progress: Callable[[int], None] | None = None,
        **hflm_arguments,
    ) -> None:
        super().__init__(pretrained, **hflm_arguments)
        check_special_tokens(self.tokenizer, self.tokenizer.name_or_path or "the model")
        self.progress = progress
        self.cut_requests = 0
        if self.softmax_dtype is None:
            self.softmax_dtype = torch.promote_types(self.model.dtype, torch.float32)
        if self.batch_size == "auto":
            self.batch_size_per_gpu = self.max_batch_size

    # --- Loading ---------------------------------------------------------------------------------------------------

    def _get_config(self, pretrained: str, **options) -> None:
        """Check that the sizes in the configuration fit the weights, then read it as `HFLM` does."""
        if options.get("gguf_file") is None:
            check_source_sizes(pretrained, options.get("revision"))
        super()._get_config(pretrained, **options)

    def _create_model(self, pretrained: str, *arguments, **options) -> None:
        """Load the model as `HFLM` does. Raise ValueError if its checkpoint lacks tensors."""
        auto_class = self.AUTO_MODEL_CLASS

        class WholeModel:
            """The part of an Auto class that `HFLM` uses."""

            from_pretrained = staticmethod(partial(load_whole, auto_class))

        # `HFLM` discards the loading report, which lists missing tensors, and has no hook between loading and the first
        # use. But it loads by the class in this attribute, so a stand-in can check the report.
        self.AUTO_MODEL_CLASS = WholeModel
        try:
            super()._create_model(pretrained, *arguments, **options)
        finally:
            self.AUTO_MODEL_CLASS = auto_class

    # --- Tokens ----------------------------------------------------------------------------------------------------

    @cached_property
    def _num_appended(self) -> int:
        """The number of tokens that the tokenizer appends to a text. An encoder reads them, so 0 for an encoder."""
        return count_appended(self.tokenizer) if self.backend == "causal" else 0

    def _cut(self, tokens: list[int], length: int) -> list[int]:
        """Return the last `length` tokens of a text, which keeps the BOS or prefix token that it begins with."""
        return cut_left(tokens, length, self._start_tokens)

    @cached_property
    def _start_tokens(self) -> list[int]:
        """The tokens that a text may begin with: the prefix token and BOS."""
        return [token for token in (self.prefix_token_id, self.tokenizer.bos_token_id) if token is not None]

    @cached_property
    def _start_texts(self) -> tuple[str, ...]:
        """The same tokens as text."""
        texts = (self.tokenizer.bos_token, self.tokenizer.decode(self.prefix_token_id))
        return tuple(filter(None, texts))

    def _prompt_limit(self, num_answer: int) -> int:
        """Return the number of tokens that a prompt may have beside an answer. An encoder reads no answer."""
        return self.max_length - (num_answer if self.backend == "causal" else 0)

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **arguments,
    ) -> list[int]:
        """Encode a text as `HFLM` does, with at most one BOS token and without tokens that the tokenizer appends.

        Args:
            string: The text.
            add_special_tokens: As in `HFLM`; by default, the tokenizer decides.
            left_truncate_len: How many tokens are kept, from the end and with BOS.
            arguments: Further arguments of `HFLM`.
        """
        if add_special_tokens is None:
            # Decide here, as `HFLM` would, whether the tokenizer adds tokens. If a chat template wrote the BOS token,
            # it adds none.
            add_special_tokens = False if string.startswith(self._start_texts) else self.add_bos_token
        tokens = super().tok_encode(string, add_special_tokens, **arguments)
        if self._num_appended and add_special_tokens is not False:
            tokens = tokens[: -self._num_appended]
        return self._cut(tokens, left_truncate_len) if left_truncate_len else tokens

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **arguments
    ) -> tuple[Tensor, Tensor]:
        """Encode texts as `HFLM` does, without tokens that the tokenizer appends.

        Args:
            strings: The texts.
            padding_side: Where the padding goes. On the right, where rows end in different columns, appended tokens
                stay.
            left_truncate_len: How many tokens are kept, from the end and with BOS.
            arguments: Further arguments of `HFLM`.

        Returns:
            Token ids and attention mask `[batch, seq]`.
        """
        bos = self.tokenizer.bos_token
        adds_tokens = self.add_bos_token is not False and not (bos and strings[0].startswith(bos))
        ids, mask = super().tok_batch_encode(strings, padding_side, **arguments)
        if padding_side == "left" and adds_tokens and self._num_appended:
            ids, mask = ids[:, : -self._num_appended], mask[:, : -self._num_appended]
        if left_truncate_len and (excess := ids.shape[1] - left_truncate_len) > 0:
            first = mask.argmax(dim=1, keepdim=True)  # the column of each row's first token
            starts = ids.gather(1, first)
            keeps_start = (first < excess) & torch.isin(starts, torch.tensor(self._start_tokens))
            ids, mask = ids[:, excess:], mask[:, excess:]
            ids = torch.cat([torch.where(keeps_start, starts, ids[:, :1]), ids[:, 1:]], dim=1)
        return ids, mask

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode a pair as `HFLM` does. A part is empty only if its text is empty."""
        context_tokens, continuation_tokens = super()._encode_pair(context, continuation)
        if not context_tokens:  # the context is all spaces, which `HFLM` moves to the continuation
            context_tokens = [self.prefix_token_id]
        if not continuation_tokens:  # one token covers the end of the context and the whole continuation
            spaces = context[len(context.rstrip()) :]
            continuation_tokens = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return context_tokens, continuation_tokens

    # --- Likelihoods -----------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """Return log-likelihoods as `HFLM` does. Its bar is drawn only without `progress`."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.progress is not None)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text.

            log p(text) = sum_i log p(token_i | prefix token, token_1, ..., token_{i-1})

        A text longer than the model's context is read in windows that score each token once. The first window begins
        with the prefix token (BOS or, without one, EOS), each later window with the last token of the one before.

        Args:
            requests: The texts, as the harness wraps them.
            disable_tqdm: Whether to draw no progress bar.
        """
        windows, owners = [], []  # `owners`: the index of each window's text
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            if tokens[:1] == [self.prefix_token_id]:  # the text contains it
                tokens = tokens[1:]
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        sums = [0.0] * len(requests)
        answers = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm, override_bs=self.batch_size)
        for owner, (value, _) in zip(owners, answers):
            sums[owner] += value
        for request, value in zip(requests, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """Check requests, let `_score_requests` answer them, and check the answers.

        Args:
            requests: The requests. Contexts and continuations must not be empty.
            disable_tqdm: Whether to draw no progress bar.
            override_bs: `None`, except for the windows of `loglikelihood_rolling`, which report no progress. The batch
                size does not depend on it.

        Returns:
            The answers, in the order of the requests.

        Raises:
            RuntimeError: One sequence alone does not fit in memory; a part of a request is empty or longer than the
                model reads; or an answer is NaN.
        """
        for texts, context, continuation in requests:
            if not context or not 0 < len(continuation) <= self.max_length:
                length = len(continuation) if context else 0
                text = f": {texts[1][:60]!r}" if texts else ""
                raise RuntimeError(
                    f"A continuation must have 1 to {self.max_length} tokens, after a context that is not empty, but "
                    f"one has {length}{text}. Look for an empty or very long choice in the data."
                )
        answers: dict[int, Answer] = {}
        check_token_ids((i for _, *parts in requests for part in parts for i in part), self.model, "a question")
        # The last token is predicted, not read.
        lengths = [len(context) + len(continuation) - 1 for _, context, continuation in requests]
        limits = [self._prompt_limit(len(continuation) - 1) for _, _, continuation in requests]
        self._count_cut(sum(len(context) > limit for (_, context, _), limit in zip(requests, limits)), len(requests))
        fitting = [(texts, self._cut(context, limit), end) for (texts, context, end), limit in zip(requests, limits)]
        # `loglikelihood_rolling` passes a batch size. The number of its windows is not that of the caller's requests.
        is_inner = override_bs is not None
        longest = min(max(lengths, default=0), self.max_length)
        with (
            self._reported(len(requests), "loglikelihood", disable_tqdm, is_inner) as report,
            _explained_memory_error(longest),
        ):

            def finish(scored: dict[int, Answer]) -> None:
                if any(math.isnan(value) for value, _ in scored.values()):
                    # Every comparison with NaN is false, so the harness would take the first choice as the answer.
                    raise RuntimeError(_BROKEN.format("log-likelihoods that are NaN"))
                answers.update(scored)
                for index in scored:
                    if (texts := requests[index][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, scored[index])
                report(len(answers))

            self._score_requests(fitting, finish)
        return [answers[index] for index in range(len(requests))]

    def _score_requests(self, requests: Sequence[Request], finish: Finish) -> None:
        """Compute each request by itself with `HFLM`, the longest first, and pass answers to `finish` as they come.

        The context of each request has been cut to the model's length.
        """
        score = partial(super()._loglikelihood_tokens, disable_tqdm=True)

        def run(batch: Sequence[int]) -> None:
            finish(dict(zip(batch, score([requests[i] for i in batch], override_bs=len(batch)))))

        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        self._in_batches(sorted(range(len(requests)), key=lambda i: -lengths[i]), run)

    def _count_cut(self, num_cut: int, num_requests: int) -> None:
        """Count and log the requests whose beginning the model does not see."""
        self.cut_requests += num_cut
        if num_cut:
            message = "%d of %d requests lose their beginning: the model reads %d tokens."
            # With `progress`, the caller reports the count itself.
            level = logging.INFO if self.progress else logging.WARNING
            logger.log(level, message, num_cut, num_requests, self.max_length)

    # --- Generation ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate as `HFLM` does, in the same batches unless memory runs out.

        Args:
            requests: Prompts with their generation arguments, as the harness wraps them.
            disable_tqdm: Whether to draw no progress bar.

        Raises:
            RuntimeError: One sequence alone does not fit in memory, or a logit is NaN.
            ValueError: The tokenizer names no EOS token.
        """
        check_special_tokens(self.tokenizer, self.tokenizer.name_or_path or "the model", generates=True)
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}  # a batch has one set of generation arguments
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        check_token_ids(chain.from_iterable(prompts), self.model, "a question")
        lengths = [len(prompt) for prompt in prompts]
        # The answer is reserved first. A prompt has the rest of the context.
        limits = [self._prompt_limit(answer_tokens(request.args[1])) for request in requests]
        self._count_cut(sum(length > limit for length, limit in zip(lengths, limits)), len(requests))
        generate = partial(super().generate_until, disable_tqdm=True)
        with self._reported(len(requests), "generate_until", disable_tqdm) as report:

            def run(batch: Sequence[int]) -> None:
                texts.update(zip(batch, generate([requests[index] for index in batch])))
                report(len(texts))

            for group in groups.values():
                # The order of `HFLM`, so that the batches are the same.
                group.sort(key=lambda index: (-lengths[index], requests[index].args[0]))
                with _explained_memory_error(lengths[group[0]]):
                    self._in_batches(group, run)
        return [texts[index] for index in range(len(requests))]

    @property
    def ignored_settings(self) -> dict[str, Any]:
        """The settings of the model's `generation_config.json` that would change greedy decoding, and are ignored."""
        settings = self._generating_model.generation_config.to_dict()
        return {
            name: settings[name]
            for name in _NOT_GREEDY
            if settings.get(name) and not (name in _FACTORS and settings[name] == 1)
        }

    @property
    def _generating_model(self) -> PreTrainedModel:
        """The model that has the settings of generation. For an adapter, the model inside it."""
        return getattr(self.model, "get_base_model", lambda: self.model)()

    @contextmanager
    def _greedy_settings(self) -> Iterator[None]:
        """Remove the settings in `_NOT_GREEDY` from the model within the block.

        An argument of `generate` cannot do this: there, None means the model's own setting.
        """
        model = self._generating_model
        before: GenerationConfig = model.generation_config
        model.generation_config = copy.deepcopy(before)
        for name in _NOT_GREEDY:
            if getattr(before, name, None) is not None:
                setattr(model.generation_config, name, None)
        try:
            yield
        finally:
            model.generation_config = before

    def _model_generate(self, context: Tensor, **arguments) -> Tensor:
        """Generate as `HFLM` does, and remove the text after the tokenizer's EOS token.

        The model stops at the EOS token of its configuration. If the tokenizer has another one, a row goes on after it
        until its batch is finished. `HFLM` decodes without special tokens, so it could not cut the text there.

        Raises:
            RuntimeError: A logit is NaN or infinite.
        """
        watch = _LargestLogit()
        arguments["logits_processor"] = LogitsProcessorList([watch])
        with self._greedy_settings():
            tokens = super()._model_generate(context=context, **arguments)  # [batch, prompt and answer]
        if watch.largest is not None and not watch.largest.isfinite():
            # The largest of NaN logits is an arbitrary token, so the text would count as a wrong answer.
            raise RuntimeError(_BROKEN.format("logits that are NaN or infinite"))
        if (eos := self.tokenizer.eos_token_id) is None:
            return tokens
        start = context.shape[1] if self.backend == "causal" else 1  # after the prompt, or the decoder's first token
        is_ended = (tokens[:, start:] == eos).cumsum(dim=1) > 0
        # EOS is stripped from the text or cut off, so repeating it leaves nothing after the first one.
        tokens[:, start:].masked_fill_(is_ended, eos)
        return tokens

    # --- Batches ---------------------------------------------------------------------------------------------------

    def _in_batches(self, items: Sequence, run: Callable[[Sequence], None]) -> None:
        """Call `run` on all items in batches. A batch that does not fit in memory is run again in halves.

        Raises:
            RuntimeError: The device's error, if one item alone does not fit.
        """
        start = 0
        while start < len(items):
            batch = items[start : start + self.batch_size]
            try:
                run(batch)
            except RuntimeError as error:
                if len(batch) == 1 or not _is_memory_error(error):
                    raise
            else:
                start += len(batch)
                continue
            # Outside of the `except` clause, because the error keeps alive the tensors of all frames that it passed.
            self.batch_size_per_gpu = min(self.batch_size, len(batch) // 2)
            clear_device_cache(garbage_collection=True)
            logger.warning("Out of memory at batch size %d: going on with %d.", len(batch), self.batch_size)

    @contextmanager
    def _reported(
        self, total: int, kind: str, is_silent: bool, is_inner: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """Yield a function that shows the number of finished requests: by `progress`, a bar, or not at all."""
        if self.progress is not None and not is_inner:
            yield self.progress
            return
        is_disabled = is_silent or is_inner or self.rank != 0
        with tqdm(total=total, desc=f"Running {kind} requests", disable=is_disabled) as bar:
            yield lambda done: bar.update(done - bar.n)


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


def _is_memory_error(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


@contextmanager
def _explained_memory_error(longest: int) -> Iterator[None]:
    """Raise errors for lack of memory again as one line with the length of the longest sequence."""
    try:
        yield
    except RuntimeError as error:
        if not _is_memory_error(error):
            raise
        raise RuntimeError(
            f"Out of memory at batch size 1; the longest sequence has {longest} tokens: try a smaller dtype or length."
        ) from None


__all__ = ["Answer", "CorrectedHFLM", "Finish", "Request"]
