"""Chat data: the loss is on the assistant's text and the ends of its turns, with any kind of template."""

import copy
import json
import re

import pytest
from datasets.fingerprint import Hasher
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from attnres.training.data.blocks import DataSpec, load_blocks
from attnres.training.data.chat import IGNORED, encode_chat
from attnres.training.data.typed_tokens import special_tokens_of, text_tokenizer
from attnres.training.text import python_sources, train_tokenizer

CHATML = r"""
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CHATML_MARKED = r"""
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\n' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# The mark ends before the end-of-turn token.
CHATML_MARKED_TEXT = CHATML_MARKED.replace(
    "message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}",
    "message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
)

LLAMA3 = r"""
{{- '<|endoftext|>' }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

# Without a header for the assistant: its turn begins at the end of the user's. Turns must alternate.
INSTRUCT = r"""
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate:\n user, assistant, ...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}{{ message['content'] + '<|eot_id|>' }}{% endif %}
{%- endfor %}"""

# Without control tokens.
PLAIN = r"""
{%- for message in messages %}{{ '### ' + message['role'] + ': ' + message['content'] + '\n\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"""

# Shows thinking in the last message only.
THINKING = r"""
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' and loop.last %}
{{- '<think>' + message['reasoning_content'] + '</think>' }}
{%- endif %}
{{- message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

TOOLS = r"""
{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}{{ '<call>' + (call['function'] | tojson) }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

TOOLS_MARKED = r"""
{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' %}
{%- generation %}{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}{{ '<call>' + (call['function'] | tojson) }}{% endfor %}
{{- '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message['content'] + '<|im_end|>' }}{% endif %}
{{- '\n' }}
{%- endfor %}{{ eos_token }}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

# Template -> the token that ends a turn.
# A mark includes the end of its turn, and the next turn begins with a control token, as for DeepSeek and Mistral.
ROLES_MARKED = (
    "{%- for message in messages %}{% if message['role'] == 'user' %}{{ '<|start_header_id|>' + message['content'] }}"
    "{% else %}{{ '<|end_header_id|>' }}{% generation %}{{ message['content'] + '<|eot_id|>' }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|end_header_id|>' }}{% endif %}"
)
TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "chatml, marked": (CHATML_MARKED, "<|im_end|>"),
    "chatml, text marked": (CHATML_MARKED_TEXT, "<|im_end|>"),
    "llama 3": (LLAMA3, "<|eot_id|>"),
    "instruct": (INSTRUCT, "<|eot_id|>"),
    "roles, marked": (ROLES_MARKED, "<|eot_id|>"),
}
CONTROL = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(python_sources(100_000), 500)
    tokenizer.add_special_tokens({"extra_special_tokens": CONTROL})
    return tokenizer


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    """Set the chat template of a tokenizer, and return the tokenizer."""
    tokenizer.chat_template = template
    return tokenizer


def conversation(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def parts(tokenizer, encoded: dict) -> list[str]:
    """Decode each run of consecutive tokens that have a label."""
    assert len(encoded["input_ids"]) == len(encoded["labels"])
    runs, before = [], IGNORED
    for token, label in zip(encoded["input_ids"], encoded["labels"]):
        assert label in (token, IGNORED)
        if label != IGNORED:
            if before == IGNORED:
                runs.append([])
            runs[-1].append(label)
        before = label
    return [tokenizer.decode(run) for run in runs]


def words_tokenizer(*control: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that joins spaces to the next word, as SentencePiece's do."""
    special = [*CONTROL, *control]
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    backend.train_from_iterator(
        python_sources(100_000),
        trainers.BpeTrainer(
            vocab_size=800, special_tokens=["<unk>", *CONTROL, *control, *alphabet], show_progress=False
        ),
    )
    special = [*CONTROL, *control]
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", extra_special_tokens=special)


# Any text but control tokens: spaces at the ends, characters of several tokens, empty turns.
TEXTS = st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=2, max_size=6).filter(
    lambda turns: not any("<|" in turn for turn in turns)
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(turns=TEXTS)
def test_labels_are_the_assistants_texts_and_the_ends_of_its_turns(tokenizer, name, turns):
    template, end = TEMPLATES[name]
    with_template(tokenizer, template)
    messages = conversation(*turns)
    assume(name != "chatml, text marked" or any(turns[1::2]))
    encoded = encode_chat(tokenizer)({"messages": messages})
    assert encoded["input_ids"] == tokenizer.apply_chat_template(messages)["input_ids"]
    # The template marks no part for an empty answer.
    expected = [answer + end for answer in turns[1::2] if answer or name != "chatml, text marked"]
    assert parts(tokenizer, encoded) == expected


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_MARKED_TEXT])
def test_spaces_are_learned_also_if_the_tokenizer_gives_them_no_offsets(tokenizer, template):
    """The tokenizers of GPT-2 and Llama 3 leave spaces out of the offsets."""
    trimmed = copy.deepcopy(with_template(tokenizer, template))
    begin = ("<|endoftext|>", trimmed.bos_token_id)
    trimmed.backend_tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin]),
        ]
    )
    messages = conversation("a", "  two", "b", "\n\nthree 😀 ", "c", " ")
    encoded = encode_chat(trimmed)({"messages": messages})
    assert encoded["input_ids"] == trimmed.apply_chat_template(messages)["input_ids"]
    assert parts(trimmed, encoded) == [
        "  two<|im_end|>",
        "\n\nthree 😀 <|im_end|>",
        " <|im_end|>",
    ]


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_MARKED_TEXT])
def test_the_parts_are_the_same_for_a_tokenizer_that_joins_spaces_to_the_next_word(template):
    """SentencePiece's tokenizers (Llama 2, Mistral, Gemma) do so."""
    words = words_tokenizer()
    with_template(words, template)
    encoded = encode_chat(words)({"messages": conversation("a b", "import os", "and", "sys 😀\n")})
    assert [part.lstrip() for part in parts(words, encoded)] == ["import os<|im_end|>", "sys 😀\n<|im_end|>"]


def test_with_a_template_without_control_tokens_the_text_and_its_end_are_learned():
    # Two line breaks are one token at the end of the text, and two before the next turn.
    plain = with_template(train_tokenizer([*python_sources(20_000), *["\n\n"] * 1000], 400), PLAIN)
    assert len(plain("\n\n").input_ids) == 1 and len(plain("\n\n#").input_ids) == 3
    encoded = encode_chat(plain)({"messages": conversation("add 1 and 2", "that is 3", "why", "because")})
    # A token that is merged with the space of the prompt belongs to the answer.
    assert [part.lstrip(" ") for part in parts(plain, encoded)] == ["that is 3\n\n", "because\n\n"]
    about_itself = conversation("which token?", "<|endoftext|> is it.", "sure?", "yes")
    encoded = encode_chat(plain)({"messages": about_itself})
    assert [part.lstrip(" ") for part in parts(plain, encoded)] == ["<|endoftext|> is it.\n\n", "yes\n\n"]


# Control tokens among other text, at the ends too.
TYPED = st.lists(
    st.lists(st.sampled_from([*CONTROL, "<|endoftext|>", "a", " <|", "\n", "😀"]), max_size=5).map("".join),
    min_size=2,
    max_size=4,
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(turns=TYPED)
def test_control_tokens_in_messages_are_text(tokenizer, name, turns):
    template, end = TEMPLATES[name]
    with_template(tokenizer, template)
    assume(name != "chatml, text marked" or any(turns[1::2]))
    encoded = encode_chat(tokenizer)({"messages": conversation(*turns)})
    # Cut the template's own control tokens out of a conversation in which messages have other signs for theirs.
    names = [*CONTROL, "<|endoftext|>"]
    signs = {name: chr(0xE000 + i) for i, name in enumerate(names)}
    pattern = re.compile("|".join(map(re.escape, names)))
    hidden = [pattern.sub(lambda match: signs[match[0]], turn) for turn in turns]
    rendered = tokenizer.apply_chat_template(conversation(*hidden), tokenize=False)
    expected = []
    for piece in re.split(f"({pattern.pattern})", rendered):
        if piece in signs:
            expected.append(tokenizer.convert_tokens_to_ids(piece))
        else:
            for token, sign in signs.items():
                piece = piece.replace(sign, token)
            expected += tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    tokenizer("", split_special_tokens=False)  # the call above leaves its setting in the tokenizer
    assert encoded["input_ids"] == expected
    answers = [answer + end for answer in turns[1::2] if answer or name != "chatml, text marked"]
    assert parts(tokenizer, encoded) == answers


# As Mistral's, whose marks have spaces around them, and Gemma's, which trims messages.
MISTRAL = (
    "{{ '<unk>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '<|eot_id|>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<unk>' }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("template", [MISTRAL, GEMMA])
def test_control_tokens_are_text_to_a_tokenizer_that_joins_spaces_to_the_next_word(template):
    words = with_template(words_tokenizer("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"), template)
    encode, special = encode_chat(words), {*words.all_special_ids}
    turns = [" import [INST] os", "<end_of_turn> and", "[/INST] <|eot_id|>sys", "<unk>import <start_of_turn> "]
    encoded = encode({"messages": conversation(*turns)})
    rendered = words.apply_chat_template(conversation(*turns), tokenize=False)
    assert "".join(words.decode(encoded["input_ids"]).split()) == "".join(rendered.split())
    # The same conversation with ordinary words has the same special tokens, all of them from the template.
    other = encode({"messages": conversation("import os", "and", "sys", "import")})
    of_template = [token for token in other["input_ids"] if token in special]
    assert [token for token in encoded["input_ids"] if token in special] == of_template
    assert (
        text_tokenizer(words, special_tokens_of(words)).encode("import os and 😀 sys").ids
        == words("import os and 😀 sys", add_special_tokens=False)["input_ids"]
    )
    assert len(parts(words, encoded)) == 2


@pytest.mark.parametrize("template", [TOOLS, TOOLS_MARKED])
def test_control_tokens_in_tools_and_calls_are_text(tokenizer, template):
    with_template(tokenizer, template)
    encode, control = encode_chat(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")

    def encoded(word: str) -> list[int]:
        call = {"type": "function", "function": {"name": "add", "arguments": {word: [word]}}}
        messages = [
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": word},
        ]
        tool = {"type": "function", "function": {"name": "add", "description": word, "parameters": {}}}
        return encode({"messages": messages, "tools": [tool]})["input_ids"]

    assert tokenizer.decode(encoded("<|im_end|>")).count("<|im_end|>") == encoded("word").count(control) + 4
    assert encoded("<|im_end|>").count(control) == encoded("word").count(control)


def test_a_template_that_reads_special_tokens_in_messages_is_an_error(tokenizer):
    with_template(tokenizer, CHATML.replace("message['content']", "message['content'].split('<|eot_id|>')[-1]"))
    encode = encode_chat(tokenizer)
    assert parts(tokenizer, encode({"messages": conversation("a", "b <|im_end|>")})) == ["b <|im_end|><|im_end|>"]
    with pytest.raises(ValueError, match="reads special tokens in messages"):
        encode({"messages": conversation("a", "think<|eot_id|>b")})


def test_noncharacters_in_messages_cannot_form_a_special_token(tokenizer):
    """They are the marks by which special tokens of the template are told from their names in messages."""
    encode = encode_chat(with_template(tokenizer, CHATML))
    with pytest.raises(ValueError, match="one of U\\+FDD0 to U\\+FDD2: remove these"):
        encode({"messages": conversation("<|im_end|>\ufdd10\ufdd2", "b")})


def test_a_conversation_with_nothing_to_learn_is_an_error(tokenizer):
    with_template(tokenizer, CHATML_MARKED_TEXT)
    with pytest.raises(ValueError, match="renders no text of the assistant's turns"):
        encode_chat(tokenizer)({"messages": conversation("hi", "")})


def test_system_messages_come_before_and_are_not_learned(tokenizer):
    with_template(tokenizer, CHATML)
    messages = [{"role": "system", "content": "be brief"}, *conversation("hi", "hello"), *conversation("bye")]
    encoded = encode_chat(tokenizer)({"messages": messages})
    assert parts(tokenizer, encoded) == ["hello<|im_end|>"]
    text = tokenizer.decode(encoded["input_ids"])
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>") and text.endswith("bye<|im_end|>\n")


@pytest.mark.parametrize("template", [TOOLS, TOOLS_MARKED])
def test_tools_and_tool_calls_pass_through(tokenizer, template):
    with_template(tokenizer, template)
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "sum"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_calls": None},
        {"role": "assistant", "content": "3.", "tool_calls": None},
    ]
    encode = encode_chat(tokenizer)
    encoded = encode({"messages": messages, "tools": [tool]})
    assert parts(tokenizer, encoded) == ['<call>{"name": "add", "arguments": {"a": 1}}<|im_end|>', "3.<|im_end|>"]
    assert '<|im_start|>tools\n[{"type": "function"' in tokenizer.decode(encoded["input_ids"])
    assert encoded["input_ids"] == tokenizer.apply_chat_template(messages, tools=[tool])["input_ids"]
    as_text = '[{"type": "function", "function": {"name": "add", "parameters": {}}}]'
    assert encode({"messages": messages, "tools": as_text}) == encoded
    assert "tools" not in tokenizer.decode(encode({"messages": messages, "tools": None})["input_ids"])
    with pytest.raises(ValueError, match="`tools` is broken JSON"):
        encode({"messages": messages, "tools": "[{"})


def test_a_template_that_renders_earlier_turns_differently_is_an_error_with_the_remedy(tokenizer):
    with_template(tokenizer, THINKING)
    encode = encode_chat(tokenizer)
    messages = conversation("one", "1", "two", "2")
    for message in messages[1::2]:
        message["reasoning_content"] = "easy"
    with pytest.raises(ValueError, match=r"renders earlier messages differently.*\{% generation %\}") as raised:
        encode({"messages": messages})
    assert "\n" not in str(raised.value)
    # A single turn has no earlier turn that could be rendered differently.
    assert parts(tokenizer, encode({"messages": messages[:2]})) == ["<think>easy</think>1<|im_end|>"]


def test_marked_turns_are_found_although_the_template_drops_earlier_thinking(tokenizer):
    marked = THINKING.replace("{{- message['content'] + '<|im_end|>\\n' }}", MARK)
    assert marked != THINKING
    with_template(tokenizer, marked)
    messages = conversation("one", "1", "two", "2")
    for message in messages[1::2]:
        message["reasoning_content"] = "easy"
    assert parts(tokenizer, encode_chat(tokenizer)({"messages": messages})) == ["1<|im_end|>", "2<|im_end|>"]


MARK = (
    "{%- if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
)


def test_a_mark_without_an_end_of_turn_token_does_not_reach_into_the_next_turn(tokenizer):
    template = CHATML_MARKED_TEXT.replace("{% endgeneration %}{{ '<|im_end|>\\n' }}", "{% endgeneration %}")
    assert template != CHATML_MARKED_TEXT
    with_template(tokenizer, template)
    assert parts(tokenizer, encode_chat(tokenizer)({"messages": conversation("a", "b", "c", "d")})) == ["b", "d"]


def test_a_tokenizer_without_a_template_is_refused_at_once(tokenizer):
    with_template(tokenizer, None)
    with pytest.raises(ValueError, match=r"no chat template: set its `chat_template`"):
        encode_chat(tokenizer)


@pytest.mark.parametrize(
    "messages, reason",
    [
        (None, "`messages` holds no messages"),
        ([], "`messages` holds no messages"),
        ("hello", "`messages` holds no messages"),
        ([{"from": "human", "value": "hi"}], "message 0 of `messages` must be an object with a `role`"),
        ([{"role": "user", "content": [{"type": "video", "path": "a.mp4"}]}], "has a part of type 'video'. Give text"),
        (conversation("hi"), "no assistant turn, only turns of user"),
        ([{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}], "only turns of human, gpt"),
        (conversation("a", "b")[1:], "begins with an assistant turn"),
        (conversation("a") + conversation("b", "c"), "the chat template refuses .*: Roles must alternate: user, "),
        ([*conversation("a"), {"role": "assistant", "content": 3}], "the chat template refuses the conversation"),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error_of_one_line(tokenizer, messages, reason):
    with_template(tokenizer, INSTRUCT)
    with pytest.raises(ValueError, match=reason) as raised:
        encode_chat(tokenizer)({"messages": messages})
    assert "\n" not in str(raised.value)


def test_the_column_may_have_another_name_and_its_absence_is_an_error(tokenizer):
    with_template(tokenizer, CHATML)
    row = {"chat": conversation("hi", "hello")}
    assert parts(tokenizer, encode_chat(tokenizer, "chat")(row)) == ["hello<|im_end|>"]
    with pytest.raises(ValueError, match="`messages` holds no messages"):
        encode_chat(tokenizer)(row)


def test_the_labels_of_blocks_from_a_chat_file_are_the_assistants_text(tokenizer, tmp_path):
    with_template(tokenizer, CHATML)
    rows = [{"messages": conversation(f"question {i}", f"answer {i}")} for i in range(20)]
    rows.insert(3, {"messages": conversation("nobody answers")})
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = DataSpec((str(tmp_path / "chat.jsonl"),), column="messages", bad_rows="skip")
    encode = encode_chat(tokenizer)
    blocks = load_blocks(spec, tokenizer, 16, seed=None, encode=encode, cache=tmp_path / "cache")
    learned = [label for block in blocks["labels"] for label in block.tolist() if label != IGNORED]
    answers = "".join(f"answer {i}<|im_end|>" for i in range(20))
    assert tokenizer.decode(learned) == answers[: len(tokenizer.decode(learned))]
    assert len(tokenizer.decode(learned)) > 0.8 * len(answers)


def test_the_hash_of_an_encoder_does_not_change_when_it_is_used(tokenizer):
    """The cache of blocks identifies an encoder by its hash."""
    with_template(tokenizer, CHATML)
    encode = encode_chat(tokenizer)
    before = Hasher.hash(encode)
    encode({"messages": conversation("hi", "hello")})
    assert Hasher.hash(encode) == before == Hasher.hash(encode_chat(tokenizer))
    with_template(tokenizer, LLAMA3)
    assert Hasher.hash(encode_chat(tokenizer)) != before
