"""What a release is made of: sdist and wheel, the citation, the workflow, the issue forms."""

import subprocess
import sys
import tarfile
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

import attnres

from .peers.environments import environment

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_sdist_and_wheel_pass_the_checks_of_the_index_and_hold_the_same(tmp_path):
    """Built from a clone, as a release is; the wheel by way of the sdist."""
    run("git", "clone", "--quiet", ROOT, tmp_path / "clone", cwd=tmp_path)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", ".", cwd=tmp_path / "clone")
    (wheel,), (sdist,) = (tmp_path / "dist").glob("*.whl"), (tmp_path / "dist").glob("*.tar.gz")
    checked = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", wheel, sdist, cwd=tmp_path)
    assert checked.count("PASSED") == 2
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= packed
    run("git", "clone", "--quiet", ROOT, tmp_path / "direct", cwd=tmp_path)
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ".", cwd=tmp_path / "direct")
    assert set(ZipFile(wheel).namelist()) == set(ZipFile(next(tmp_path.glob("*.whl"))).namelist())


@pytest.mark.slow
def test_the_citation_is_one_that_github_reads():
    python = environment("citation", "cffconvert==2.0.0", "jsonschema==3.2.0", "setuptools==79.0.1")
    convert = python.with_name("cffconvert")
    run(convert, "--validate", "--infile", "CITATION.cff", cwd=ROOT)
    assert "{AttnRes for Transformers}" in run(convert, "--format", "bibtex", "--infile", "CITATION.cff", cwd=ROOT)


def test_citation_and_changelog_are_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == attnres.__version__
    for field in ("title", "version", "license"):
        assert f"  {field} = {{{citation[field]}}}" in (ROOT / "README.md").read_text()
    assert f"## {attnres.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_does_what_ci_does_on_the_oldest_and_a_newer_python_and_checks_style_alone():
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    assert jobs["run"]["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert jobs["run"]["steps"][-1]["run"] == "bash .ci/run"
    assert jobs["lint"]["steps"][-1]["run"] == "make lint"


def test_hooks_of_a_commit_use_the_pinned_ruff():
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("ruff=="))
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = [hook for hook in repository["hooks"] if hook["entry"].startswith("ruff")]
    assert [hook["additional_dependencies"] for hook in hooks] == [[pinned]] * 2


@pytest.mark.parametrize("form", sorted((GITHUB / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_asks_for(form):
    content = yaml.safe_load(form.read_text())
    assert content["name"] and content["description"]
    assert len({item["id"] for item in content["body"]}) == len(content["body"])
    assert all(item["type"] == "textarea" and item["attributes"]["label"] for item in content["body"])
