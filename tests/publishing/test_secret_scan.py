"""Secrets are found in files by the forms that services give them, and their values are never shown."""

import json
import random
import string

import pytest

from attnres.publishing.secret_scan import find_secrets

_LETTERS = string.ascii_letters + string.digits


def some(count: int, characters: str = _LETTERS) -> str:
    """Return characters like those of a secret, made at run time so that no scanner finds secrets in this file."""
    return "".join(random.Random(count).choices(characters, k=count))


SECRETS = {
    "a Hugging Face token": ["hf_" + some(34)],
    "a Hugging Face organization token": ["api_org_" + some(34)],
    "an Anthropic key": ["sk-ant-api03-" + some(80)],
    "an OpenAI key": ["sk-" + some(48), "sk-proj-" + some(60), "sk-svcacct-" + some(60)],
    "an AWS access key": ["AKIA" + some(16, string.ascii_uppercase), "ASIA" + some(16, string.ascii_uppercase)],
    "an AWS secret key": [f'aws_secret_access_key = "{some(40)}"', f"AWS_SECRET_ACCESS_KEY={some(40)}"],
    "a GitHub token": ["ghp_" + some(36), "gho_" + some(36), "ghs_" + some(36), "github_pat_" + some(82)],
    "a GitLab token": ["glpat-" + some(20)],
    "a Slack token": ["xoxb-" + some(40), "xoxp-" + some(50), "xapp-1-" + some(40)],
    "a Slack webhook": ["https://hooks.slack.com/services/" + f"T{some(9)}/B{some(9)}/{some(24)}"],
    "a Google API key": ["AIza" + some(35)],
    "a Google token": ["ya29." + some(60)],
    "a Google client secret": ["GOCSPX-" + some(28)],
    "an Azure storage key": [f"AccountName=a;AccountKey={some(86)}==;"],
    "a Weights & Biases key": [f'os.environ["WANDB_API_KEY"] = "{some(40, "0123456789abcdef")}"'],
    "a PyPI token": ["pypi-" + some(150)],
    "an npm token": ["npm_" + some(36)],
    "a Stripe key": ["sk_live_" + some(24), "rk_live_" + some(24)],
    "a SendGrid key": [f"SG.{some(22)}.{some(43)}"],
    "a Databricks token": ["dapi" + some(32, "0123456789abcdef")],
    "a JSON Web Token": [f"eyJ{some(20)}.eyJ{some(40)}.{some(43)}"],
    "a private key": [
        f"-----BEGIN {kind}PRIVATE KEY{block}-----\n{head}{some(64)}\n"
        for kind, block, head in (
            ("", "", ""),
            ("RSA ", "", "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES-128-CBC,00\n\n"),
            ("OPENSSH ", "", ""),
            ("PGP ", " BLOCK", "Version: 1\n\n"),
        )
    ],
    "a password in an address": [f"https://me:{some(20)}@git.internal.com/x.git"],
}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_found_by_its_form_with_its_line_and_is_not_shown(tmp_path, kind):
    path = tmp_path / "notes.md"
    for secret in SECRETS[kind]:
        for text in (f"# Notes\n\nkey: {secret}\n", f"a\nb\n{secret}", f'1\n2\n{{"key": "{secret}"}}'):
            path.write_text(text)
            (match,) = find_secrets(path)
            assert (match.line, match.kind) == (3, kind)
            assert str(match) == f"{path}, line 3, holds {kind}"


def test_a_key_in_json_is_found(tmp_path):
    """The file of a Google service account holds its key in one line."""
    path = tmp_path / "account.json"
    path.write_text(json.dumps({"private_key": SECRETS["a private key"][0]}, indent=1))
    assert [(secret.line, secret.kind) for secret in find_secrets(path)] == [(2, "a private key")]


def test_a_secret_is_found_in_utf_16_and_in_the_header_of_weights(tmp_path):
    (tmp_path / "windows.txt").write_text(f"a\n{SECRETS['a GitHub token'][0]}", encoding="utf-16")
    assert [secret.line for secret in find_secrets(tmp_path / "windows.txt")] == [2]
    header = json.dumps({"__metadata__": {"token": SECRETS["a Hugging Face token"][0]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"numbers")
    assert [secret.kind for secret in find_secrets(tmp_path / "model.safetensors")] == ["a Hugging Face token"]


def test_the_token_of_the_user_is_found_in_any_form(tmp_path):
    (tmp_path / "a.txt").write_text("\n\nmy-token")
    assert [(secret.line, secret.kind) for secret in find_secrets(tmp_path / "a.txt", "my-token")] == [
        (3, "your Hub token")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "x" * 34,  # a placeholder of documentation
        "hf_...",
        "HF_TOKEN=hf_your_token_here",
        "AKIA" + "IOSFODNN7" + "EXAMPLE",
        "https://user:password@host/",
        "https://huggingface.co/me/model",
        "-----BEGIN RSA PRIVATE KEY-----",  # a token of a vocabulary
        '"-----BEGIN PRIVATE KEY-----": 5,\n"Ġaaaaaaaaaaaaaaaaaaaaaaaaaa": 6',
        "task-" + some(48),  # not a word that begins with `sk-`
        "c" + "hf_" + some(34),
        some(2000),
        "rrxoxb-" + some(40),
    ],
)
def test_placeholders_and_similar_texts_are_not_reported(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert list(find_secrets(tmp_path / "a.txt")) == []


def test_no_file_of_this_project_is_reported(pytestconfig):
    """Its code and pages are like the files of models."""
    files = [path for ending in ("*.py", "*.md", "*.json") for path in (pytestconfig.rootpath).glob(f"[!.]*/{ending}")]
    assert len(files) > 100
    assert [secret for path in files for secret in find_secrets(path)] == []
