"""The model that lm-evaluation-harness evaluates: it loads the model, takes requests, and runs them in batches.

`prompt_encoder` turns texts into tokens, `shared_prefix` computes likelihoods, and `generation` generates answers.
"""

import logging
import math
import os
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import chain
from typing import Any

import jinja2
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import resolve_max_length
from lm_eval.models.utils_hf import get_dtype
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from attnres.checkpoints.tokenizers import load_tokenizer
from attnres.checkpoints.whole import check_source_sizes, load_whole
from attnres.configuration.counting import count_loaded
from attnres.eval.answer_length import answer_tokens
from attnres.eval.generation import AnswerGenerator
from attnres.eval.prompt_encoder import PromptEncoder, check_special_tokens
from attnres.utils.token_ids import check_token_ids

logger = logging.getLogger(__name__)

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # (texts, context tokens, continuation tokens)
Answer = tuple[float, bool]  # (log-likelihood of the continuation, whether greedy decoding gives it)
Finish = Callable[[dict[int, Answer]], None]  # takes the answers of some requests by their index


class LanguageModel(TemplateLM):
    """A causal language model of `transformers` in the harness.

    Its numbers are those of the harness's own class, `HFLM`, except where `HFLM` is wrong or would not compare two
    models alike (numbers of issues and pull requests are those of EleutherAI/lm-evaluation-harness):

    - No text begins with two BOS tokens. `HFLM` puts one before the first window of `loglikelihood_rolling` where the
      tokenizer has added one too, and scores the second (#3333).
    - Tokens that a tokenizer appends, such as EOS, are left out, because a model continues its prompt.
    - A prompt that is longer than the model's context keeps its BOS token. `HFLM` cuts it off with the beginning
      (#2300).
    - Log-likelihoods are summed in float32, unless `softmax_dtype` names another dtype. `HFLM` sums them in the model's
      dtype (#2921). In bfloat16, numbers above 32 are multiples of 0.25, so that unequal choices tie.
    - A continuation that the tokenizer joins with the end of its context is encoded alone. `HFLM` stops with an
      assertion (#1297, #4055).
    - Text after an EOS token does not count, even if the model's configuration names another one. Otherwise an answer
      would depend on the other rows of its batch (#2723).
    - Likelihoods and logits that are NaN raise an error. With `HFLM` the first choice would be the answer, and a
      generated text a wrong one.
    - Settings of `generation_config.json` that change greedy decoding, such as `repetition_penalty`, are ignored.
      Otherwise two models could be compared under different rules. A task's own settings count.
    - A checkpoint that lacks tensors raises an error. `HFLM` would draw the missing ones at random.

    A batch that does not fit in memory is halved, and a batch size once halved stays so. Processes that `accelerate` or
    `torchrun` has launched share the requests of the harness; each has the whole model.

    Args:
        pretrained: A directory, a Hub id or a model.
        tokenizer: The directory or Hub id of the tokenizer, or a tokenizer. By default that of `pretrained`.
        revision: The branch, tag or commit on the Hub.
        subfolder: The folder of the model in the repository.
        trust_remote_code: Whether code that comes with the model may run.
        peft: The directory or Hub id of an adapter of `peft` to put onto the model.
        dtype: The dtype of the weights, such as `bfloat16`; `auto` for that of the checkpoint.
        softmax_dtype: The dtype in which log-likelihoods are computed and summed.
        mixed_precision_dtype: The dtype of autocast; `None` for none.
        device: The device, such as `cuda:1`. By default a GPU if there is one. Processes that share the requests take
            theirs from `accelerate`.
        parallelize: Whether to spread the layers over all GPUs, as `device_map="auto"` does.
        batch_size: The number of sequences in a batch; `auto` tries `max_batch_size` and less.
        max_batch_size: The batch size that `auto` begins with.
        max_length: The number of tokens that the model reads. By default that of its configuration.
        logits_cache: Whether requests that begin alike share computations.
        add_bos_token: Whether a text begins with BOS. By default the tokenizer decides.
        prefix_token_id: The token that begins a text without context. By default BOS or, without one, EOS.
        chat_template_args: Further arguments of the chat template.
        enable_thinking: The argument of this name of the chat template.
        think_end_token: The token, as text or id, after which an answer begins.
        progress: Called with the number of requests of the current call that are done, instead of drawing a progress
            bar. The attribute may change between calls.
        loading: Further arguments of `from_pretrained`, such as `device_map`, `max_memory` or `attn_implementation`.

    Attributes:
        cut_requests: The number of requests so far that were longer than the model's context.

    Raises:
        ValueError: The tokenizer names neither a BOS nor an EOS token, or `peft` is given with packed experts.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        revision: str = "main",
        subfolder: str = "",
        trust_remote_code: bool = False,
        peft: str | None = None,
        dtype: str | torch.dtype = "auto",
        softmax_dtype: str | torch.dtype | None = None,
        mixed_precision_dtype: str | torch.dtype | None = None,
        device: str | None = None,
        parallelize: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        max_length: int | None = None,
        logits_cache: bool = True,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | int | None = None,
        progress: Callable[[int], None] | None = None,
        **loading: Any,
    ) -> None:
        super().__init__()
        if enable_thinking and think_end_token is None:
            raise ValueError("`enable_thinking` needs `think_end_token`, the token after which an answer begins.")
        hub: dict[str, Any] = {"revision": revision, "subfolder": subfolder, "trust_remote_code": trust_remote_code}
        self._accelerator: Accelerator | None = None
        if isinstance(pretrained, str):
            check_source_sizes(pretrained, revision)  # before the tokenizer, which reads the configuration too
            self._device = self._choose_device(device)
            name = pretrained
        else:
            self._device, name = pretrained.device, str(pretrained.name_or_path)
        self.tokenizer: Any
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            self.tokenizer = tokenizer
        else:
            adds: dict[str, Any] = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
            self.tokenizer = load_tokenizer(tokenizer or name, **hub, **adds)
        # pyrefly: ignore[bad-argument-type]  # annotated as if there might be no tokenizer
        self._encoder = PromptEncoder(self.tokenizer, add_bos_token, prefix_token_id)
        if isinstance(pretrained, str):
            loading.setdefault("device_map", "auto" if parallelize else {"": str(self._device)})
            model = load_whole(AutoModelForCausalLM, pretrained, dtype=get_dtype(dtype), **hub, **loading)
        else:
            model = pretrained
        self.config = model.config
        self.model: Any = (model if peft is None else self._adapted(model, peft)).eval()
        self.revision = revision
        self.softmax_dtype: Any = get_dtype(softmax_dtype or torch.promote_types(self.model.dtype, torch.float32))
        self.mixed_precision_dtype: Any = mixed_precision_dtype and get_dtype(mixed_precision_dtype)
        self.batch_size = max_batch_size if str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = max_length or resolve_max_length(self.config, self.tokenizer)
        self.logits_cache = logits_cache
        self.enable_thinking = enable_thinking
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        self.chat_template_args = {**(chat_template_args or {}), **thinking}
        self._generator = AnswerGenerator(self.model, self.tokenizer, think_end_token)
        self.progress = progress
        self.cut_requests = 0

    # --- Loading and processes -------------------------------------------------------------------------------------

    def _choose_device(self, device: str | None) -> torch.device:
        """Return the device of this process, and join the other processes if there are any."""
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            # A process waits at the end for those that have longer requests.
            patience = InitProcessGroupKwargs(timeout=timedelta(weeks=52))
            self._accelerator = Accelerator(kwargs_handlers=[patience])
            self._rank, self._world_size = self._accelerator.process_index, self._accelerator.num_processes
            return self._accelerator.device
        return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    def _adapted(self, model: PreTrainedModel, adapter: str) -> Any:
        """Put an adapter onto a model, whose embedding gets the tokens that the adapter's tokenizer has added."""
        from peft import PeftModel

        if getattr(model.config.get_text_config(), "packed_experts", False):
            # PEFT would load the adapter without its experts and only warn. The scores would then be wrong.
            raise ValueError(
                "PEFT does not load an adapter onto packed experts: leave out `packed_experts`, or give the model of "
                "`attnres.training.lora.load_adapter` as `pretrained`."
            )
        if model.config.get_text_config().vocab_size != len(self.tokenizer):
            model.resize_token_embeddings(len(self.tokenizer))
        return PeftModel.from_pretrained(model, adapter)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all processes."""
        return tensor if self._accelerator is None else self._accelerator.gather(tensor)

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """Return the objects of all processes to the process `dst`, and None to the others."""
        if self._accelerator is None:
            return [obj]
        gathered = [None] * self.world_size if self.rank == dst else None
        torch.distributed.gather_object(obj, gathered, dst=dst)
        return gathered

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self._accelerator is not None:
            self._accelerator.wait_for_everyone()

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts on the model that the harness writes into its results."""
        return {
            "model_num_parameters": count_loaded(self.model),
            "model_dtype": self.model.dtype,
            "model_revision": self.revision,
            "model_sha": getattr(self.config, "_commit_hash", None) or "",
        }

    # --- Tokens, as the harness asks for them ----------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that begins a text without context."""
        return self._encoder.prefix

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer, by which the harness stores requests."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as one text. A template that refuses a system message gets the others alone."""
        arguments = {"tokenize": False, "add_generation_prompt": add_generation_prompt, **self.chat_template_args}
        render = partial(
            self.tokenizer.apply_chat_template, **arguments, continue_final_message=not add_generation_prompt
        )
        try:
            return render(chat_history)
        except jinja2.TemplateError:
            logger.warning("The chat template refuses this conversation: it is repeated without its system message.")
            return render([message for message in chat_history if message["role"] != "system"])

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text, as [`PromptEncoder.encode`] does."""
        return self._encoder.encode(string, add_special_tokens)

    # --- Likelihoods -----------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """Return the log-likelihood of each continuation, and whether greedy decoding gives it.

        Args:
            requests: Pairs of a context and a continuation, as the harness wraps them.
            disable_tqdm: Whether to draw no progress bar.
        """
        if self.enable_thinking:
            raise ValueError("`enable_thinking` is for tasks that generate answers; this one scores given ones.")
        pairs: list[Any] = [request.args for request in requests]
        encoded = [(pair, *self._encoder.encode_pair(*pair)) for pair in pairs]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

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
            tokens = self._encoder.encode_after_prefix(request.args[0])
            for window in get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(window)))
                owners.append(index)
        sums = [0.0] * len(requests)
        # The number of windows is not that of the caller's requests, so their progress is not reported.
        answers = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm, reports=False)
        for owner, (value, _) in zip(owners, answers):
            sums[owner] += value
        for request, value in zip(requests, sums):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, reports: bool = True
    ) -> list[Answer]:
        """Check requests, let `_score_requests` answer them, and check the answers.

        Args:
            requests: The requests. Contexts and continuations must not be empty.
            disable_tqdm: Whether to draw no progress bar.
            reports: Whether to report progress.

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
        check_token_ids((i for _, *parts in requests for part in parts for i in part), self.model, "a question")
        # The last token is predicted, not read.
        limits = [self.max_length - len(continuation) + 1 for _, _, continuation in requests]
        contexts = self._cut([context for _, context, _ in requests], limits)
        answers: dict[int, Answer] = {}
        with self._reported(len(requests), "loglikelihood", disable_tqdm, reports) as report:

            def finish(scored: dict[int, Answer]) -> None:
                if any(math.isnan(value) for value, _ in scored.values()):
                    # Every comparison with NaN is false, so the harness would take the first choice as the answer.
                    raise RuntimeError(
                        "Log-likelihoods of the model are NaN: its weights are damaged or its dtype overflows."
                    )
                answers.update(scored)
                for index in scored:
                    if (texts := requests[index][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, scored[index])
                report(len(answers))

            pairs = [(context, continuation) for context, (_, _, continuation) in zip(contexts, requests)]
            self._score_requests(pairs, finish)
        return [answers[index] for index in range(len(requests))]

    @abstractmethod
    def _score_requests(self, requests: Sequence[tuple[list[int], list[int]]], finish: Finish) -> None:
        """Compute requests, and pass their answers to `finish` as they come.

        Args:
            requests: The tokens of each context, cut to the model's length, and of its continuation.
            finish: Takes the answers.
        """

    def _cut(self, prompts: Sequence[list[int]], limits: Sequence[int]) -> list[list[int]]:
        """Cut the beginning of prompts that have more tokens than their limits. Count them, and log their number."""
        num_cut = sum(len(prompt) > limit for prompt, limit in zip(prompts, limits))
        self.cut_requests += num_cut
        if num_cut:
            message = "%d of %d requests lose their beginning: the model reads %d tokens."
            # With `progress`, the caller reports the count itself.
            level = logging.INFO if self.progress else logging.WARNING
            logger.log(level, message, num_cut, len(prompts), self.max_length)
        return [self._encoder.cut(prompt, limit) for prompt, limit in zip(prompts, limits)]

    # --- Generation ------------------------------------------------------------------------------------------------

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate the answer to each prompt.

        Args:
            requests: Prompts with their generation arguments, as the harness wraps them.
            disable_tqdm: Whether to draw no progress bar.

        Raises:
            RuntimeError: One sequence alone does not fit in memory, or a logit is NaN.
            ValueError: The tokenizer names no EOS token, or an answer leaves no room for its prompt.
        """
        check_special_tokens(self.tokenizer, self.tokenizer.name_or_path or "the model", generates=True)
        texts: dict[int, str] = {}
        asked: list[Any] = [request.args for request in requests]  # prompts and their generation arguments
        groups: dict[str, list[int]] = {}  # a batch has one set of generation arguments
        for index, (_, arguments) in enumerate(asked):
            groups.setdefault(repr(sorted(arguments.items())), []).append(index)
        whole = [self.tok_encode(prompt) for prompt, _ in asked]
        check_token_ids(chain.from_iterable(whole), self.model, "a question")
        # The answer is reserved first. A prompt has the rest of the context.
        limits = [self.max_length - answer_tokens(arguments) for _, arguments in asked]
        if min(limits, default=1) < 1:
            number = self.max_length - min(limits)
            raise ValueError(f"An answer of {number} tokens leaves no room: the model reads {self.max_length}.")
        prompts = self._cut(whole, limits)
        with self._reported(len(requests), "generate_until", disable_tqdm) as report:

            def run(batch: Sequence[int]) -> None:
                with self._autocast():
                    answers = self._generator.generate([prompts[index] for index in batch], asked[batch[0]][1])
                for index, answer in zip(batch, answers):
                    texts[index] = answer
                    self.cache_hook.add_partial("generate_until", asked[index], answer)
                report(len(texts))

            for group in groups.values():
                # The order of `HFLM`, so that the batches are the same.
                group.sort(key=lambda index: (-len(whole[index]), asked[index][0]))
                self._in_batches(group, run)
        return [texts[index] for index in range(len(requests))]

    @property
    def ignored_settings(self) -> dict[str, Any]:
        """The settings of the model's `generation_config.json` that would change greedy decoding, and are ignored."""
        return self._generator.ignored_settings

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        # pyrefly: ignore[missing-attribute]  # set in `__init__`
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)

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
                is_memory_error = isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
                if len(batch) == 1 or not is_memory_error:
                    raise
            else:
                start += len(batch)
                continue
            # Outside of the `except` clause, because the error keeps alive the tensors of all frames that it passed.
            self.batch_size = min(self.batch_size, len(batch) // 2)
            clear_device_cache(garbage_collection=True)
            logger.warning("Out of memory at batch size %d: going on with %d.", len(batch), self.batch_size)

    @contextmanager
    def _reported(
        self, total: int, kind: str, is_silent: bool, reports: bool = True
    ) -> Generator[Callable[[int], object]]:
        """Yield a function that shows the number of finished requests: by `progress`, a bar, or not at all."""
        if self.progress is not None and reports:
            yield self.progress
            return
        is_disabled = is_silent or not reports or self.rank != 0
        with tqdm(total=total, desc=f"Running {kind} requests", disable=is_disabled) as bar:
            yield lambda done: bar.update(done - bar.n)


__all__ = ["Answer", "Finish", "LanguageModel", "Request"]
