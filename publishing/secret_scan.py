"""Search files for secrets before they are published: tokens and keys in the forms of the usual services.

A password has no such form, so the search finds many leaks, but not all.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# (kind, prefix, pattern of the rest). A literal prefix is quick to search for. It must begin a word: no letter, digit,
# `_` or `-` comes before it.
_TOKENS = (
    ("a Hugging Face token", "hf_", r"[A-Za-z0-9]{30,}"),
    ("a Hugging Face organization token", "api_org_", r"[A-Za-z0-9]{30,}"),
    ("an Anthropic key", "sk-ant-", r"[A-Za-z0-9_-]{20,}"),
    ("an OpenAI key", "sk-", r"(?:(?:proj|svcacct|admin|None)-[A-Za-z0-9_-]{20,}|[A-Za-z0-9]{32,})"),
    ("an AWS access key", "AKIA", r"[A-Z2-7]{16}(?![A-Za-z0-9_-])"),
    ("an AWS access key", "ASIA", r"[A-Z2-7]{16}(?![A-Za-z0-9_-])"),
    ("a GitHub token", "github_pat_", r"[A-Za-z0-9_]{40,}"),
    *(("a GitHub token", f"gh{kind}_", r"[A-Za-z0-9]{36,}") for kind in "pousr"),
    ("a GitLab token", "glpat-", r"[A-Za-z0-9_-]{20,}"),
    *(("a Slack token", f"xox{kind}-", r"[A-Za-z0-9-]{10,}") for kind in "abeoprs"),
    ("a Slack token", "xapp-", r"\d-[A-Za-z0-9-]{20,}"),
    ("a Google API key", "AIza", r"[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    ("a Google token", "ya29.", r"[A-Za-z0-9_-]{30,}"),
    ("a Google client secret", "GOCSPX-", r"[A-Za-z0-9_-]{20,}"),
    ("a PyPI token", "pypi-", r"[A-Za-z0-9_-]{50,}"),
    ("an npm token", "npm_", r"[A-Za-z0-9]{36}(?![A-Za-z0-9])"),
    *(("a Stripe key", f"{kind}_live_", r"[A-Za-z0-9]{20,}") for kind in ("sk", "rk")),
    ("a SendGrid key", "SG.", r"[A-Za-z0-9_-]{20,}\.[A-Za-z0-9_-]{40,}"),
    ("a Databricks token", "dapi", r"[0-9a-f]{32}(?![A-Za-z0-9])"),
    ("a JSON Web Token", "eyJ", r"[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{20,}"),
)
# (kind, pattern of the whole)
_OTHERS = (
    (
        "an AWS secret key",
        r"(?:aws|AWS)_?(?:[sS]ecret|SECRET)\w*[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])",
    ),
    ("a Slack webhook", r"hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9/_-]{20,}"),
    ("an Azure storage key", r"AccountKey=[A-Za-z0-9+/]{80,}"),
    ("a Weights & Biases key", r"WANDB_API_KEY[\"']?\]?\s*[:=]\s*[\"']?[0-9a-f]{40}"),
    # The heading and the first characters of the key, because a vocabulary may hold the heading alone. In JSON, a line
    # ends in `\n`, which is two characters.
    (
        "a private key",
        r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----"
        r"(?:\s|\\r|\\n|[A-Za-z-]{1,30}: [^\n]{0,80})*[A-Za-z0-9+/=]{16}",
    ),
    ("a password in an address", r"https?://[A-Za-z0-9_.~%-]+:[A-Za-z0-9_.~%!*+-]{12,}@[A-Za-z0-9.-]+"),
)


def _at_word_start(prefix: str) -> str:
    """Return a pattern that matches `prefix` only at the start of a word; `re` finds a leading literal fastest."""
    return f"{re.escape(prefix)}(?<![A-Za-z0-9_-]{re.escape(prefix)})"


_FORMS = (
    *((kind, re.compile((_at_word_start(prefix) + form).encode())) for kind, prefix, form in _TOKENS),
    *((kind, re.compile(form.encode())) for kind, form in _OTHERS),
)
# A string with this many distinct characters or fewer is a placeholder in documentation, such as `hf_xxxxxxxx`.
_PLACEHOLDER_CHARACTERS = 8
_EXAMPLES = re.compile(rb"(?i)example|placeholder|your[_-]?(?:token|key|password)|x{8}|\*{4}|1234567890")
_SAFETENSORS = ".safetensors"
_MAX_HEADER = 100 * 10**6  # bytes, the limit of safetensors


@dataclass(frozen=True)
class Secret:
    """The place and the kind of a secret in a file. Its value is not kept, because it must not reach a message.

    Attributes:
        path: The file.
        line: The line, counted from 1.
        kind: The kind, such as "a GitHub token".
    """

    path: Path
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}, holds {self.kind}"


def find_secrets(path: Path, token: str | None = None) -> Iterator[Secret]:
    """Find the secrets in a file. In a file of weights only the header is searched, since the rest is numbers.

    Args:
        path: The file.
        token: The user's Hub token. It is found in any form.

    Yields:
        The secrets, in their order in the file.
    """
    content = _text(path)
    user_tokens = {place: "your Hub token" for place in _places(content, token)}
    others = {match.start(): kind for kind, match in _matches(content) if _is_likely(match[0])}
    for place, kind in sorted((others | user_tokens).items()):
        yield Secret(path, content.count(b"\n", 0, place) + 1, kind)


def _text(path: Path) -> bytes:
    """Return the bytes of a file that may be text, without NUL bytes: then ASCII text in UTF-16 reads like UTF-8."""
    with path.open("rb") as file:
        if path.suffix != _SAFETENSORS:
            return file.read().replace(b"\0", b"")
        return file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER))


def _places(content: bytes, token: str | None) -> Iterator[int]:
    """Yield the offsets of a token in the content."""
    place = content.find(token.encode()) if token else -1
    while place >= 0:
        yield place
        place = content.find(token.encode(), place + 1)


def _matches(content: bytes) -> Iterator[tuple[str, re.Match[bytes]]]:
    """Yield the kind and the match of every text that has the form of a secret."""
    return ((kind, match) for kind, form in _FORMS for match in form.finditer(content))


def _is_likely(secret: bytes) -> bool:
    """Return whether a match is a secret, and not a placeholder in documentation."""
    return len(set(secret)) > _PLACEHOLDER_CHARACTERS and not _EXAMPLES.search(secret)


__all__ = ["find_secrets"]
