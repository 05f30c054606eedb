"""Score the answers to benchmark questions, with each common beginning of their prompts computed once.

    log p(continuation | context) = sum_i log softmax(logits(context, continuation[:i]))[continuation[i]]

The prompts of a benchmark begin alike: with an instruction and examples, then with a question before its choices. The
cache of a causal model after such a beginning (keys and values, latents of MLA, states of linear attention) depends on
the beginning alone, so that every prompt can continue from a copy of it.

1. `prefix_tree.make_rows` turns requests into rows: one sequence of tokens, with all continuations that it answers.
2. `prefix_tree.make_tree` finds the beginnings that are worth a forward pass. They form a tree.
3. `_score_node` walks the tree from the root. It computes a node's beginning once, as one sequence, from its parent's
   cache.
4. Within a node, the rows of one question (one context, several choices) share that context too. A batch computes the
   contexts of several questions, and each choice continues from a copy of its question's entry in the cache.
5. `_score_rows` computes logits only at the positions that predict a continuation, and sums the log-probabilities.

`abilities` measures with a few tokens whether a model can do this. A model that cannot computes each row whole.
"""

import copy
import inspect
import logging
import math
from collections.abc import Callable, Sequence, Set
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from lm_eval.api.registry import register_model
from torch import Tensor
from transformers import Cache, PretrainedConfig

from attnres.eval.language_model import Answer, Finish, LanguageModel
from attnres.eval.prefix_tree import Node, PromptRow, make_rows, make_tree, pays

logger = logging.getLogger(__name__)

# The name of a cache among arguments and outputs. From version 5.24 on, transformers uses the first name and deprecates
# the second.
_CACHE_NAMES = ("cache", "past_key_values")


class Abilities(NamedTuple):
    """What a model can do, as `SharedPrefixLM.abilities` measures it.

    Attributes:
        keep_logits: Whether it computes the logits of given positions only.
        share_prefix: Whether it continues correctly from a copy of its cache.
    """

    keep_logits: bool = False
    share_prefix: bool = False


@register_model("attnres")
class SharedPrefixLM(LanguageModel):
    """A model in the harness that computes common beginnings of prompts once.

    Its arguments are those of [`LanguageModel`][attnres.eval.language_model.LanguageModel]. With `logits_cache=False`,
    each request is computed on its own.
    """

    def _score_requests(self, requests: Sequence[tuple[list[int], list[int]]], finish: Finish) -> None:
        """Compute requests along the tree of their beginnings, and pass answers to `finish` as they come."""
        if not self.logits_cache:
            rows = [
                PromptRow((context + continuation)[:-1], len(context) - 1, [(index, continuation)])
                for index, (context, continuation) in enumerate(requests)
            ]
            return self._score_node(Node([], rows), share_questions=False, cache=None, finish=finish)
        rows = make_rows(requests)
        # The longest row that may continue from a cache; -1 if none may.
        limit = _fixed_positions_length(self.config) if rows and self.abilities.share_prefix else -1
        tree = make_tree([row for row in rows if len(row.tokens) <= limit])
        self._score_node(tree, share_questions=True, cache=None, finish=finish)
        whole = Node([], [row for row in rows if len(row.tokens) > limit])
        self._score_node(whole, share_questions=False, cache=None, finish=finish)

    def _score_node(self, node: Node, share_questions: bool, cache: Cache | None, finish: Finish) -> None:
        """Score the rows of a node and of all nodes below it.

        Args:
            node: The node.
            share_questions: Whether the choices of a question share its context.
            cache: The cache after the node's prefix, of batch size 1; `None` for an empty prefix.
            finish: Takes the answers.
        """
        depth = len(node.prefix)

        def score_rows(rows: Sequence[PromptRow]) -> None:
            finish(self._score_rows(rows, [0] * len(rows), depth, cache))

        def score_questions(questions: Sequence[list[PromptRow]]) -> None:
            rows = [row for choices in questions for row in choices]
            # Questions come sorted, the longest first, so a batch holds nearly equal lengths. All contexts are cut to
            # the length of the last, so that they need no padding. `score_choices` computes the rest of each.
            length = questions[-1][0].first
            if not pays((len(rows) - len(questions)) * (length - depth)):
                return self._in_batches(rows, score_rows)
            contexts = self._extend([choices[0].tokens[depth:length] for choices in questions], cache)
            entry_of = {id(row): entry for entry, choices in enumerate(questions) for row in choices}

            def score_choices(rows: Sequence[PromptRow]) -> None:
                finish(self._score_rows(rows, [entry_of[id(row)] for row in rows], length, contexts))

            self._in_batches(rows, score_choices)

        questions, single_rows = [], []
        for _, group in groupby(node.rows, key=lambda row: row.context):
            choices = list(group)
            if share_questions and len(choices) > 1:
                questions.append(choices)
            else:
                single_rows += choices
        # The longest first, so that a lack of memory shows at once and rows of like lengths share a batch.
        self._in_batches(sorted(questions, key=lambda choices: -choices[0].first), score_questions)
        self._in_batches(sorted(single_rows, key=lambda row: -len(row.tokens)), score_rows)
        for child in node.children:

            def score_child(children: Sequence[Node]) -> None:
                (child,) = children
                child_cache = self._extend([child.prefix[depth:]], cache)
                self._score_node(child, share_questions, child_cache, finish)

            # A batch of one, so that `_in_batches` handles a lack of memory here too.
            self._in_batches([child], score_child)

    def _extend(self, tokens: Sequence[list[int]], cache: Cache | None) -> Cache:
        """Return a cache with one entry for each row of `tokens`: the entry of `cache`, continued by that row.

        Args:
            tokens: Rows of equal length.
            cache: A cache of batch size 1, which stays unchanged; `None` for an empty one.
        """
        last_positions = [[len(row) - 1] for row in tokens]
        entries = _copy_entries(cache, [0] * len(tokens))
        # pyrefly: ignore[bad-return]  # with `use_cache` there is a cache
        return self._forward(tokens, last_positions, self.abilities, entries, use_cache=True)[1]

    def _score_rows(
        self, rows: Sequence[PromptRow], entries: Sequence[int], depth: int, cache: Cache | None
    ) -> dict[int, Answer]:
        """Compute the answers to all requests of some rows.

        Args:
            rows: The rows.
            entries: For each row, the entry of the cache's batch from which it continues.
            depth: How many tokens of each row the cache holds.
            cache: The cache; `None` if `depth` is 0.

        Returns:
            The answers by the index of their request.
        """
        tokens = [row.tokens[depth:] for row in rows]
        positions = [list(range(row.first - depth, len(row.tokens) - depth)) for row in rows]
        copies = _copy_entries(cache, entries)
        logits, _ = self._forward(tokens, positions, self.abilities, copies, use_cache=cache is not None)
        log_probs = F.log_softmax(logits, dim=-1, dtype=self.softmax_dtype)  # [rows, positions, vocabulary]
        greedy = logits.argmax(dim=-1).tolist()
        indices, sums, is_greedy = [], [], []
        for i, row in enumerate(rows):
            for index, continuation in row.continuations:
                targets = torch.tensor(continuation, device=log_probs.device)
                sums.append(log_probs[i, torch.arange(len(continuation)), targets].sum())
                is_greedy.append(greedy[i][: len(continuation)] == continuation)
                indices.append(index)
        # One transfer from the device for all sums.
        return dict(zip(indices, zip(torch.stack(sums).tolist(), is_greedy)))

    @torch.no_grad()
    def _forward(
        self,
        tokens: Sequence[list[int]],
        positions: Sequence[list[int]],
        abilities: Abilities,
        cache: Cache | None = None,
        use_cache: bool = False,
    ) -> tuple[Tensor, Cache | None]:
        """Run the model.

        Args:
            tokens: Rows of token ids. Shorter rows are padded on the right, where a causal model does not look.
            positions: The positions of each row whose logits are needed. Shorter lists are padded with their last.
            abilities: The abilities to use. Only `keep_logits` matters here.
            cache: The cache that the rows continue; it is changed.
            use_cache: Whether to return a cache.

        Returns:
            Logits `[rows, positions, vocabulary]`, and the cache.
        """
        width = max(len(row) for row in tokens)
        num_positions = max(len(row) for row in positions)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in tokens], device=self.device)
        keep = torch.tensor([row + row[-1:] * (num_positions - len(row)) for row in positions], device=self.device)
        arguments = {"logits_to_keep": keep} if abilities.keep_logits else {}
        if use_cache:
            arguments |= {self._cache_name: cache, "use_cache": True}
        elif "use_cache" in self._argument_names:
            arguments |= {"use_cache": False}
        with self._autocast():
            outputs = self.model(ids, **arguments)
        logits = outputs.logits
        if not abilities.keep_logits:
            # Counted from the end, because the virtual tokens of prompt tuning come first and have logits too.
            logits = torch.take_along_dim(logits[:, -width:], keep[..., None].to(logits.device), dim=1)
        # A model with remote code may return the cache under another name than that of its argument.
        return logits, next((outputs[name] for name in _CACHE_NAMES if name in outputs), None)

    @cached_property
    def _argument_names(self) -> Set[str]:
        """The names of the arguments that the model takes. For an adapter, those of the model inside it."""
        forward = getattr(self.model, "get_base_model", lambda: self.model)().forward
        return inspect.signature(forward).parameters.keys()

    @property
    def _cache_name(self) -> str | None:
        """The name of the argument that takes a cache; `None` if the model takes none."""
        return next((name for name in _CACHE_NAMES if name in self._argument_names), None)

    @cached_property
    def abilities(self) -> Abilities:
        """Measure the model's abilities with a few tokens: each must give the logits of a plain forward pass.

        The model's name and the type of its cache do not show this. For example, some layers of linear attention
        compute several tokens at once as if nothing came before them.
        """
        vocab_size = self.config.get_text_config().vocab_size
        tokens = torch.randint(vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
        tokens[1, :7] = tokens[0, :7]
        end = [list(range(7, 12))] * 2
        expected, _ = self._forward(tokens.tolist(), end, Abilities())  # [2, 5, vocabulary]

        def agrees(compute: Callable[[], Tensor]) -> bool:
            try:
                error = (compute() - expected).float().abs().mean() / expected.float().std()
            except Exception as error:  # a model that cannot do it may raise anything
                logger.debug("%s: %s: %s", type(self.model).__name__, type(error).__name__, error)
                return False
            # Half the digits of the dtype must agree. If a model ignores a part of the sequence, the error is larger.
            return error.item() <= torch.finfo(expected.dtype).eps ** 0.5

        abilities = Abilities(
            keep_logits="logits_to_keep" in self._argument_names
            and agrees(lambda: self._forward(tokens.tolist(), end, Abilities(keep_logits=True))[0])
        )

        def continue_from_copies() -> Tensor:
            _, cache = self._forward(tokens[:1, :7].tolist(), [[6]], abilities, use_cache=True)
            # A single token, then several, from one cache. If the first changed it, the second would be wrong.
            copies = _copy_entries(cache, [0, 0])
            single, _ = self._forward(tokens[:, 7:8].tolist(), [[0]] * 2, abilities, copies, use_cache=True)
            copies = _copy_entries(cache, [0, 0])
            several, _ = self._forward(tokens[:, 7:].tolist(), [list(range(5))] * 2, abilities, copies, use_cache=True)
            return torch.cat([single, several[:, 1:]], dim=1)

        takes_cache = self._cache_name is not None and "use_cache" in self._argument_names
        share_prefix = takes_cache and agrees(continue_from_copies)
        if not share_prefix:
            logger.warning(
                "%s cannot go on from a copy of its cache: prefixes are not shared.", type(self.model).__name__
            )
        return abilities._replace(share_prefix=share_prefix)


def _copy_entries(cache: Cache | None, entries: Sequence[int]) -> Cache | None:
    """Return a cache whose batch holds copies of the given `entries` of `cache`, which stays unchanged."""
    if cache is None:
        return None
    copies = copy.deepcopy(cache)
    # The method of beam search, which reorders every kind of layer. `batch_select_indices` omits linear attention.
    copies.reorder_cache(torch.tensor(entries))  # pyrefly: ignore[bad-argument-type]  # any tensor of integers
    return copies


def _fixed_positions_length(config: PretrainedConfig) -> float:
    """Return the length of a sequence up to which a position's encoding does not depend on that length.

    Some kinds of RoPE change the encoding of all positions in longer sequences. A longer row therefore cannot continue
    from the cache of a shorter one. For all other kinds, the length is `math.inf`.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # The parameters may stand one level deeper, for each type of layer.
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    lengths = [
        kind.get("original_max_position_embeddings", config.get_text_config().max_position_embeddings)
        for kind in kinds
        if kind.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(lengths, default=math.inf)


__all__ = ["Abilities", "SharedPrefixLM"]
