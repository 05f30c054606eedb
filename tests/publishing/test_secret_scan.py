"""Secrets are found in files by the forms that services give them, and their values are never shown."""

import base64
import json
import random
import string
from itertools import pairwise

import pytest

from attnres.publishing.secret_scan import find_secrets

_LETTERS = string.ascii_letters + string.digits


def some(count: int, characters: str = _LETTERS) -> str:
    """Return characters like those of a secret, made at run time so that no scanner finds secrets in this file."""
    return "".join(random.Random(count).choices(characters, k=count))


DIGITS, CAPITALS = string.digits, string.ascii_uppercase
KEY = f"-----BEGIN RSA PRIVATE KEY-----\n{some(64)}\n{some(64)}\n-----END RSA PRIVATE KEY-----\n"
SECRETS = {  # part of the rule's name -> a secret
    "huggingface": "hf_" + some(34, string.ascii_letters),
    "huggingface-organization": "api_org_" + some(34, string.ascii_letters),
    "anthropic": f"sk-ant-api03-{some(93)}AA",
    "openai": f"sk-proj-{some(74)}T3BlbkFJ{some(74)}",
    "aws": f"AKIA{some(16, CAPITALS)}, aws_secret_access_key = '{some(40)}'",
    "github-pat": "ghp_" + some(36),
    "github-fine-grained": "github_pat_" + some(82),
    "gitlab": "glpat-" + some(20),
    "slack-bot": f"xoxb-{some(12, DIGITS)}-{some(12, DIGITS)}-{some(24)}",
    "slack-webhook": f"https://hooks.slack.com/services/T{some(9, CAPITALS)}/B{some(9, CAPITALS)}/{some(24)}",
    "gcp": "AIza" + some(35),
    "azure": f"AccountName=abc;AccountKey={some(86)}==;",
    "weights-and-biases": f"WANDB_API_KEY={some(40, '0123456789abcdef')}",
    "pypi": "pypi-AgEIcHlwaS5vcmc" + some(150),
}


@pytest.mark.parametrize("rule", SECRETS)
def test_a_secret_is_found_with_its_line_and_is_not_shown(tmp_path, rule):
    secret, path = SECRETS[rule], tmp_path / "notes.md"
    notebook = {"cells": [{"cell_type": "code", "source": [f"# {secret}\n"], "outputs": [], "metadata": {}}]}
    for text in (f"# Notes\n\nkey: {secret}\n", f"a\nb\n{secret}", f"\n\n{json.dumps(notebook)}"):
        path.write_text(text)
        (match,) = find_secrets(path)
        assert match.line == 3 and rule in match.kind
        assert str(match) == f"{path}, line 3, holds a secret ({match.kind})"


def test_a_private_key_is_found_in_text_and_in_json(tmp_path):
    """The file of a Google service account holds its key in one line."""
    for text in (f"\n{KEY}", json.dumps({"private_key": KEY}, indent=1)):
        (tmp_path / "account.json").write_text(text)
        (secret,) = find_secrets(tmp_path / "account.json")
        assert secret.line == 2 and "private-key" in secret.kind


def test_a_secret_is_found_in_utf_16_in_base64_and_in_the_header_of_weights(tmp_path):
    token = SECRETS["github-pat"]
    (tmp_path / "windows.txt").write_text(f"a\n{token}", encoding="utf-16")
    (tmp_path / "encoded.txt").write_bytes(b"a\nkey: " + base64.b64encode(f"token={token}".encode()))
    for name in ("windows.txt", "encoded.txt"):
        assert [secret.line for secret in find_secrets(tmp_path / name)] == [2]
    header = json.dumps({"__metadata__": {"token": token}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"numbers")
    assert len([*find_secrets(tmp_path / "model.safetensors")]) == 1


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_the_token_of_the_user_is_found_in_any_form(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("\n\nmy-token", encoding=encoding)
    assert [(secret.line, secret.kind) for secret in find_secrets(tmp_path / "a.txt", "my-token")] == [
        (3, "your Hub token")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "x" * 34,  # a placeholder of documentation
        "HF_TOKEN=hf_your_token_here",
        "AKIA" + "IOSFODNN7" + "EXAMPLE",
        "https://huggingface.co/me/model",
        "-----BEGIN RSA PRIVATE KEY-----",  # a token of a vocabulary
        '"-----BEGIN PRIVATE KEY-----": 5,\n"Ġaaaaaaaaaaaaaaaaaaaaaaaaaa": 6',
        "task-" + some(48),
        some(2000),
        f"{some(64, '0123456789abcdef')}  model.safetensors",  # a hash
    ],
)
def test_placeholders_hashes_and_similar_texts_are_not_reported(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert list(find_secrets(tmp_path / "a.txt")) == []


def test_a_vocabulary_is_not_reported(tmp_path):
    """Its tokens are short, and any two may follow each other."""
    tokens = [
        "hf_",
        "sk-",
        "AKIA",
        "ghp_",
        "-----",
        "BEGIN",
        "PRIVATE",
        "KEY",
        "password",
        "token",
        "=",
        ":",
        "://",
        "@",
    ]
    tokens += [some(1 + number % 12, _LETTERS + "/+_-") + str(number) for number in range(20_000)]
    tokenizer = {"model": {"vocab": {token: number for number, token in enumerate(tokens)}}}
    tokenizer["model"]["merges"] = [list(pair) for pair in pairwise(tokens)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert list(find_secrets(tmp_path / "tokenizer.json")) == []


def test_no_file_of_this_project_is_reported(pytestconfig):
    """Its code and pages are like the files of models."""
    files = [path for ending in ("*.py", "*.md", "*.json") for path in (pytestconfig.rootpath).glob(f"[!.]*/{ending}")]
    assert len(files) > 100
    assert [secret for path in files for secret in find_secrets(path)] == []
