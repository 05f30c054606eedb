"""Encode texts and conversations by the code that Kimi K3 was released with, which `llmcompressor` carries.

    python kimi_release_session.py INPUT OUT

INPUT is a JSON file with `folder` (a release), `texts`, and `conversations`: lists of messages with options of the chat
format. OUT gets the `ids` of each text, and the `rendered` text and `chat_ids` of each conversation, None if the code
refuses it.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken


def main(source: Path, out: Path) -> None:
    # The package itself asks for others, but the released files stand alone.
    (package,) = find_spec("llmcompressor").submodule_search_locations
    sys.path.insert(0, f"{package}/modeling/kimi_k3")
    from encoding_k3 import build_chat_segments
    from tokenization_kimi import TikTokenTokenizer

    given = json.loads(source.read_text())
    config = json.loads(Path(given["folder"], "tokenizer_config.json").read_text())
    tokens = {int(i): AddedToken(**token) for i, token in config.pop("added_tokens_decoder").items()}
    fields = {name: config[name] for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    tokenizer = TikTokenTokenizer(f"{given['folder']}/tiktoken.model", added_tokens_decoder=tokens, **fields)

    def segments_of(messages: list, options: dict) -> list | None:
        try:
            return build_chat_segments(messages, **{"thinking_effort": "max"} | options)
        except (KeyError, TypeError, ValueError, AssertionError):
            return None

    chats = [segments_of(*conversation) for conversation in given["conversations"]]
    seen = {
        "ids": [tokenizer.encode(text) for text in given["texts"]],
        "rendered": [None if chat is None else "".join(segment.text for segment in chat) for chat in chats],
        "chat_ids": [None if chat is None else tokenizer._encode_chat_segments(chat) for chat in chats],
    }
    out.write_text(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
