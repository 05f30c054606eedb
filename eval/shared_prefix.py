"""A model for lm-evaluation-harness that computes once what its requests have in common.

`SharedPrefixLM` is the harness's `HFLM` with the same results, except where those of `HFLM` are wrong: see the class.
The examples before the questions run through the model once, and so does a question before its choices: what the cache
holds after them (keys and values, the latents of MLA, the states of linear attention) is copied for every sequence that
goes on from there. A batch that does not fit in memory is halved.

    log p(continuation | context) = sum_i log softmax(logits(context, continuation[:i]))[continuation[i]]
"""

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm
from transformers import Cache, PretrainedConfig, PreTrainedModel

from attnres.conversion.whole import check_source_sizes, load_whole
from attnres.eval.prefix_tree import Node, PromptRow, make_rows, make_tree, pays
from attnres.utils.token_ids import check_token_ids

logger = logging.getLogger(__name__)

# The name of a cache among arguments and outputs: the first from transformers 5.24 on, which deprecates the second.
_CACHE_NAMES = ("cache", "past_key_values")

Answer = tuple[float, bool]  # log-likelihood of the continuation; is it what greedy decoding gives?
Finish = Callable[[dict[int, Answer]], None]  # takes the answers of some requests, by their index


class Abilities(NamedTuple):
    """What a model can do: see `SharedPrefixLM.abilities`."""

    keep_logits: bool = False  # compute the logits of given positions only
    share_prefix: bool = False  # go on from a copy of its cache


@register_model("attnres")
class SharedPrefixLM(HFLM):
    """`HFLM` that shares prefixes, and halves its batches when memory runs out.

    Where it differs from `HFLM` on purpose:

    - No text begins with two BOS tokens. `HFLM` puts one before the first window of `loglikelihood_rolling` where the
      tokenizer has added one too, and scores the second.
    - What a tokenizer appends, such as an EOS token, is left out: a model goes on from its prompt.
    - A continuation that the tokenizer joins with the end of its context is encoded alone. `HFLM` ends there.
    - Text after an EOS token does not count, also where the model's configuration names another one, so that an answer
      does not depend on the others of its batch.
    - Likelihoods that are NaN end the call, instead of making the first choice the answer.

    A batch size of `"auto"` is tried from `max_batch_size` down. A batch size once halved stays so. With
    `logits_cache=False`, and for encoder-decoder models, each request is computed on its own, by `HFLM`.

    Args:
        pretrained: as in `HFLM`: a directory, a Hub id or a model.
        progress: called with the number of requests of the current call that are done, instead of a progress bar; an
            attribute that may change between calls.
        hflm_arguments: the other arguments of `HFLM`.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        progress: Callable[[int], None] | None = None,
        **hflm_arguments,
    ) -> None:
        super().__init__(pretrained, **hflm_arguments)
        self.progress = progress
        self.cut_requests = 0  # so far, those longer than the model's context
        if self.batch_size == "auto":
            self.batch_size_per_gpu = self.max_batch_size

    def _get_config(self, pretrained: str, **options) -> None:
        """Read the configuration as `HFLM` does, once its numbers are known to fit the weights."""
        if options.get("gguf_file") is None:
            check_source_sizes(pretrained, options.get("revision"))
        super()._get_config(pretrained, **options)

    def _create_model(self, pretrained: str, *arguments, **options) -> None:
        """Load the model as `HFLM` does. Raise ValueError if its checkpoint lacks tensors, which would be random."""
        loads = self.AUTO_MODEL_CLASS

        class Whole:
            """What `HFLM` asks of an Auto class."""

            from_pretrained = staticmethod(partial(load_whole, loads))

        # `HFLM` has no hook between loading and the first use, and does not ask for the loading report.
        self.AUTO_MODEL_CLASS = Whole
        try:
            super()._create_model(pretrained, *arguments, **options)
        finally:
            self.AUTO_MODEL_CLASS = loads

    @cached_property
    def _appended(self) -> int:
        """The number of tokens that the tokenizer puts after a text."""
        if self.backend != "causal":  # an encoder reads its EOS token
            return 0
        bare, whole = (self.tokenizer.encode("a", add_special_tokens=special) for special in (False, True))
        starts = (i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
        return len(whole) - len(bare) - next(starts, len(whole) - len(bare))

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **arguments,
    ) -> list[int]:
        """As in `HFLM`, with at most one BOS token and without what the tokenizer appends."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None and bos and string.startswith(bos):
            add_special_tokens = False  # a chat template wrote it
        tokens = super().tok_encode(string, add_special_tokens, **arguments)
        if self._appended and add_special_tokens is not False:
            tokens = tokens[: -self._appended]
        return tokens[-left_truncate_len:] if left_truncate_len else tokens

    def tok_batch_encode(
        self, strings: list[str], padding_side: str = "left", left_truncate_len: int | None = None, **arguments
    ) -> tuple[Tensor, Tensor]:
        """As in `HFLM`, without what the tokenizer appends; on the left only, where all rows end together."""
        bos = self.tokenizer.bos_token
        appended = 0 if padding_side != "left" or (bos and strings[0].startswith(bos)) else self._appended
        length = left_truncate_len + appended if left_truncate_len else left_truncate_len
        ids, mask = super().tok_batch_encode(strings, padding_side, length, **arguments)
        return (ids[:, :-appended], mask[:, :-appended]) if appended else (ids, mask)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As in `HFLM`; neither part is empty if its text is not."""
        context_tokens, continuation_tokens = super()._encode_pair(context, continuation)
        if not context_tokens:  # nothing but spaces, which belong to the continuation
            context_tokens = [self.prefix_token_id]
        if not continuation_tokens:  # one token covers the end of the context and all of the continuation
            spaces = context[len(context.rstrip()) :]
            continuation_tokens = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return context_tokens, continuation_tokens

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows that hold each token once, the first after one BOS token.

            log p(text) = sum_i log p(token_i | prefix token, token_1, ..., token_{i-1})

        in which the first window begins with the prefix token (BOS or, without one, EOS), and each later window with
        the last token of the one before.
        """
        windows, owners = [], []
        for index, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            if tokens[:1] == [self.prefix_token_id]:  # the text has it itself
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

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """As in `HFLM`."""
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or self.progress is not None)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As in `HFLM`, in the same batches unless memory runs out.

        Raises:
            RuntimeError: one sequence alone does not fit in memory.
        """
        texts: dict[int, str] = {}
        groups: dict[str, list[int]] = {}  # a batch has one set of generation arguments
        for index, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        prompts = [self.tok_encode(request.args[0]) for request in requests]
        check_token_ids(chain.from_iterable(prompts), self.model, "a question")
        lengths = [len(prompt) for prompt in prompts]
        rooms = [self.max_length - request.args[1].get("max_gen_toks", self.max_gen_toks) for request in requests]
        self._count_cut(sum(length > room for length, room in zip(lengths, rooms)), len(requests))
        generate = partial(super().generate_until, disable_tqdm=True)
        with self._report(len(requests), "generate_until", disable_tqdm) as report:

            def run(batch: Sequence[int]) -> None:
                texts.update(zip(batch, generate([requests[index] for index in batch])))
                report(len(texts))

            for group in groups.values():
                group.sort(key=lambda index: (-lengths[index], requests[index].args[0]))
                with _explained(lengths[group[0]]):
                    self._in_batches(group, run)
        return [texts[index] for index in range(len(requests))]

    def _model_generate(self, context: Tensor, **arguments) -> Tensor:
        """As in `HFLM`, without what a row goes on with after an EOS token of the tokenizer.

        The model stops by the EOS token of its own configuration. If that is another one, a row whose batch is not
        finished goes on, and `HFLM` leaves the EOS token out of the text, so that nothing is cut there.
        """
        tokens = super()._model_generate(context=context, **arguments)
        if (eos := self.tokenizer.eos_token_id) is None:
            return tokens
        start = context.shape[1] if self.backend == "causal" else 1  # after the prompt, or the decoder's first token
        ended = (tokens[:, start:] == eos).cumsum(dim=1) > 0
        # Repeat EOS after the first one. It is stripped from the text or cut off.
        tokens[:, start:].masked_fill_(ended, eos)
        return tokens

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        """The answers to requests (texts, context, continuation).

        Raises:
            RuntimeError: one sequence alone does not fit in memory; a part of a request is empty or longer than the
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
        lengths = [len(context) + len(continuation) - 1 for _, context, continuation in requests]
        check_token_ids((i for _, *parts in requests for part in parts for i in part), self.model, "a question")
        longest = min(max(lengths, default=0), self.max_length)
        self._count_cut(sum(length > self.max_length for length in lengths), len(requests))
        # The harness gives a batch size of its own for the windows of a long text: parts of a call, not reported.
        inner = override_bs is not None
        with self._report(len(requests), "loglikelihood", disable_tqdm, inner) as report, _explained(longest):

            def finish(scored: dict[int, Answer]) -> None:
                if any(math.isnan(value) for value, _ in scored.values()):
                    # Compared with each other they would all be wrong, and the first choice would win.
                    raise RuntimeError(
                        "The model computes log-likelihoods that are NaN: its weights are damaged or its dtype "
                        "overflows."
                    )
                answers.update(scored)
                for index in scored:
                    if (texts := requests[index][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, scored[index])
                report(len(answers))

            if self.backend == "causal" and self.logits_cache:
                rows = make_rows([(context, continuation) for _, context, continuation in requests], self.max_length)
                limit = _fixed_positions(self.config)
                shareable = [row for row in rows if len(row.tokens) <= limit and self.abilities.share_prefix]
                others = [row for row in rows if len(row.tokens) > limit or not self.abilities.share_prefix]
                self._score_node(make_tree(shareable), True, None, finish)
                self._score_node(Node([], others), False, None, finish)
            else:
                stock = partial(super()._loglikelihood_tokens, disable_tqdm=True)

                def run(batch: Sequence[int]) -> None:
                    finish(dict(zip(batch, stock([requests[i] for i in batch], override_bs=len(batch)))))

                self._in_batches(sorted(range(len(requests)), key=lambda i: -lengths[i]), run)
        return [answers[index] for index in range(len(requests))]

    def _count_cut(self, cut: int, total: int) -> None:
        """Say of how many requests the model does not see the beginning."""
        self.cut_requests += cut
        if cut:
            message = "%d of %d requests lose their beginning: the model reads %d tokens."
            logger.log(logging.INFO if self.progress else logging.WARNING, message, cut, total, self.max_length)

    def _score_node(self, node: Node, share: bool, cache: Cache | None, finish: Finish) -> None:
        """Score the rows of a node and of the nodes below it; the `cache` holds its prefix, at batch size 1."""
        depth = len(node.prefix)

        def score(rows: Sequence[PromptRow]) -> None:
            finish(self._score_rows(rows, [0] * len(rows), depth, cache))

        def score_questions(questions: Sequence[list[PromptRow]]) -> None:
            rows = [row for choices in questions for row in choices]
            # Cut to the length of the shortest, which is nearly that of the others, they need no padding.
            length = questions[-1][0].first
            if not pays((len(rows) - len(questions)) * (length - depth)):
                return self._in_batches(rows, score)
            shared = self._read([choices[0].tokens[depth:length] for choices in questions], cache)
            parents = {id(row): parent for parent, choices in enumerate(questions) for row in choices}

            def score_choices(rows: Sequence[PromptRow]) -> None:
                finish(self._score_rows(rows, [parents[id(row)] for row in rows], length, shared))

            self._in_batches(rows, score_choices)

        questions, alone = [], []
        for _, group in groupby(node.rows, key=lambda row: row.context):
            choices = list(group)
            if share and len(choices) > 1:
                questions.append(choices)
            else:
                alone += choices
        self._in_batches(sorted(questions, key=lambda choices: -choices[0].first), score_questions)
        self._in_batches(sorted(alone, key=lambda row: -len(row.tokens)), score)
        for child in node.children:

            def score_child(children: Sequence[Node]) -> None:
                (child,) = children
                self._score_node(child, share, self._read([child.prefix[depth:]], cache), finish)

            self._in_batches([child], score_child)

    def _read(self, tokens: list[list[int]], cache: Cache | None) -> Cache:
        """The cache after the `tokens`, rows of equal length that all go on from the `cache`, of batch size 1."""
        last = [[len(row) - 1] for row in tokens]
        return self._forward(tokens, last, self.abilities, _copies(cache, [0] * len(tokens)), use_cache=True)[1]

    def _score_rows(
        self, rows: Sequence[PromptRow], parents: list[int], depth: int, cache: Cache | None
    ) -> dict[int, Answer]:
        """The answers to all requests of `rows`; each goes on after `depth` tokens, from its parent in the `cache`."""
        tokens = [row.tokens[depth:] for row in rows]
        positions = [list(range(row.first - depth, len(row.tokens) - depth)) for row in rows]
        logits, _ = self._forward(
            tokens, positions, self.abilities, _copies(cache, parents), use_cache=cache is not None
        )
        # The dtype of the harness's computation, so that also rounding is the same.
        log_probs = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)  # [rows, positions, vocabulary]
        greedy = logits.argmax(dim=-1).tolist()
        indices, sums, matches = [], [], []
        for i, row in enumerate(rows):
            for index, continuation in row.continuations:
                targets = torch.tensor(continuation, device=log_probs.device)
                sums.append(log_probs[i, torch.arange(len(continuation)), targets].sum())
                matches.append(greedy[i][: len(continuation)] == continuation)
                indices.append(index)
        return dict(zip(indices, zip(torch.stack(sums).tolist(), matches)))

    @torch.no_grad()
    def _forward(
        self,
        tokens: Sequence[list[int]],
        positions: Sequence[list[int]],
        abilities: Abilities,
        cache: Cache | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, Cache | None]:
        """Logits `[rows, positions, vocabulary]` at the `positions` of each row, and the cache after it.

        Rows are padded on the right, where a causal model does not look; positions with the last of each row.
        """
        width = max(len(row) for row in tokens)
        kept = max(len(row) for row in positions)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=self.device)
        keep = torch.tensor([row + row[-1:] * (kept - len(row)) for row in positions], device=self.device)
        arguments = {"logits_to_keep": keep} if abilities.keep_logits else {}
        if use_cache:
            arguments |= {self._cache_name: cache, "use_cache": True}
        elif "use_cache" in self._accepted:
            arguments |= {"use_cache": False}
        dtype = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None):
            outputs = self.model(ids, **arguments)
        logits = outputs.logits
        if not abilities.keep_logits:
            # A prompt that was tuned comes before the tokens, and has logits too.
            logits = torch.take_along_dim(logits[:, -width:], keep[..., None].to(logits.device), dim=1)
        # A model with code of its own may return the cache under the other name than it takes it.
        return logits, next((outputs[name] for name in _CACHE_NAMES if name in outputs), None)

    @cached_property
    def _accepted(self) -> Set[str]:
        """The names of the arguments that the model takes, or the model inside an adapter."""
        forward = getattr(self.model, "get_base_model", lambda: self.model)().forward
        return inspect.signature(forward).parameters.keys()

    @property
    def _cache_name(self) -> str | None:
        """The name of the argument that takes a cache; `None` where there is none."""
        return next((name for name in _CACHE_NAMES if name in self._accepted), None)

    @cached_property
    def abilities(self) -> Abilities:
        """What the model can do, found out with a few tokens: it must compute the same in either way.

        Not by its name or by the type of its cache: some layers, for example, compute several tokens at once as if
        nothing came before them.
        """
        vocab_size = self.config.get_text_config().vocab_size
        tokens = torch.randint(vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
        tokens[1, :7] = tokens[0, :7]
        end = [list(range(7, 12))] * 2
        expected, _ = self._forward(tokens.tolist(), end, Abilities())

        def agrees(compute: Callable[[], Tensor]) -> bool:
            try:
                error = (compute() - expected).float().abs().mean() / expected.float().std()
            except Exception as error:  # whatever a model raises that cannot do it
                logger.debug("%s: %s: %s", type(self.model).__name__, type(error).__name__, error)
                return False
            # Half the digits of the dtype. Whoever leaves out a part of the sequence is further away.
            return error.item() <= torch.finfo(expected.dtype).eps ** 0.5

        abilities = Abilities(
            keep_logits="logits_to_keep" in self._accepted
            and agrees(lambda: self._forward(tokens.tolist(), end, Abilities(keep_logits=True))[0])
        )

        def go_on() -> Tensor:
            _, cache = self._forward(tokens[:1, :7].tolist(), [[6]], abilities, use_cache=True)
            # A single token, then several, from one cache: the first must not change what the second goes on from.
            one, _ = self._forward(tokens[:, 7:8].tolist(), [[0]] * 2, abilities, _copies(cache, [0, 0]), True)
            more, _ = self._forward(
                tokens[:, 7:].tolist(), [list(range(5))] * 2, abilities, _copies(cache, [0, 0]), True
            )
            return torch.cat([one, more[:, 1:]], dim=1)

        share = self._cache_name is not None and "use_cache" in self._accepted and agrees(go_on)
        if not share:
            logger.warning(
                "%s cannot go on from a copy of its cache: prefixes are not shared.", type(self.model).__name__
            )
        return abilities._replace(share_prefix=share)

    def _in_batches(self, items: Sequence, run: Callable[[Sequence], None]) -> None:
        """`run` all items in batches. What does not fit in memory is run again in halves.

        Raises:
            RuntimeError: of the device, if one item alone does not fit.
        """
        start = 0
        while start < len(items):
            batch = items[start : start + self.batch_size]
            try:
                run(batch)
            except RuntimeError as error:
                if len(batch) == 1 or not _out_of_memory(error):
                    raise
            else:
                start += len(batch)
                continue
            # Out of the `except` clause: the error holds on to the tensors of the frames that it came through.
            self.batch_size_per_gpu = min(self.batch_size, len(batch) // 2)
            clear_device_cache(garbage_collection=True)
            logger.warning("Out of memory at batch size %d: going on with %d.", len(batch), self.batch_size)

    @contextmanager
    def _report(self, total: int, kind: str, silent: bool, inner: bool = False) -> Iterator[Callable[[int], None]]:
        """Gives a function that takes how many requests are done, and shows it."""
        if self.progress is not None and not inner:
            yield self.progress
            return
        with tqdm(total=total, desc=f"Running {kind} requests", disable=silent or inner or self.rank != 0) as bar:
            yield lambda done: bar.update(done - bar.n)


def _copies(cache: Cache | None, parents: list[int]) -> Cache | None:
    """A cache of its own for each sequence: copy of the entry `parents[i]` of the `cache`, which stays as it is."""
    if cache is None:
        return None
    copies = copy.deepcopy(cache)
    # What beam search does to every kind of layer; `batch_select_indices` leaves out linear attention.
    copies.reorder_cache(torch.tensor(parents))
    return copies


def _fixed_positions(config: PretrainedConfig) -> float:
    """Up to which length of a sequence its positions are encoded in the same way, whatever its length."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = [
        rope,
        *(value for value in rope.values() if isinstance(value, dict)),
    ]  # there may be some for each layer type
    lengths = [
        kind.get("original_max_position_embeddings", config.get_text_config().max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(lengths, default=math.inf)


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)


@contextmanager
def _explained(longest: int) -> Iterator[None]:
    """An error for lack of memory says so in one line."""
    try:
        yield
    except RuntimeError as error:
        if not _out_of_memory(error):
            raise
        raise RuntimeError(
            f"Out of memory at batch size 1; the longest sequence has {longest} tokens: try a smaller dtype or length."
        ) from None
