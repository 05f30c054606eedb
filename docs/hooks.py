"""Add pages of other folders and references from the code to the site, beside the pages of this folder.

Every page has the links that are right in the repository. On the site, `docs/` is the root, and pages of other folders
lie under the names of their folders. A link to a file that is not on the site leads to the repository, or becomes plain
text while the repository has no address.
"""

import os
import posixpath
import re
import shutil
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from address import BRANCH, addresses  # mkdocs lets a hook import the modules beside it
from entries import directives_of
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_PACKAGES = TemporaryDirectory(prefix="attnres-docs-")
# Pages that lie in other folders, beside the code that writes their tables, with the files that they show or link to.
OTHERS = (
    "analysis/RESULTS.md",
    "analysis/images/*.png",
    "benchmarks/*.md",
    "benchmarks/results/*.png",
    "configuration/README.md",
    "configuration/*/*.json",
    "configuration/*/*.yaml",
    "eval/results/README.md",
    "eval/results/*.csv",
    "eval/results/*.xz",
    "eval/results/*/*.md",
    "eval/results/*/*.png",
    "eval/tasks/README.md",
    "experiments/*.md",
    "experiments/results/*",
    "experiments/declared/*.yaml",
)
HOME = "index.md"  # the README
# Asks for a table of another page, which stands there between `<!-- NAME -->` and `<!-- end -->`.
_TABLE = re.compile(r"<!-- table: (?P<page>[^,]+), (?P<name>.+) -->")
# A warning in GitHub's form, a quotation that begins with this mark.
_WARNING = re.compile(r"^> \[!WARNING\]\n((?:>.*\n?)+)", re.MULTILINE)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
_CELL = re.compile(r"<td(?P<attributes>[^>]*)>(?P<content>.*?)</td>", re.DOTALL)
# Numbers that are read together, and with their unit: `[1.02, 1.05]`, `4.20 ± 0.01`, `64 x 1 x 1`, `<= 1.5` and `2 GB`.
_NUMBERS = re.compile(
    r"\[[-+]?\d[\d.]*, [-+]?\d[\d.]*\]"
    r"|\d[\d.,]*(?: (?:±|x|/|to) [-+]?\d[\d.,]*)+"
    r"|\d (?:[kKMGT]i?B|ms|us)\b"
    r"|&[lg]t;= \d[\d.]*"
)


def on_startup(**_: object) -> None:
    """Copy the packages to a folder in which they lie as they are imported.

    mkdocstrings reads the sources there and runs none.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for name, folder in project["tool"]["setuptools"]["package-dir"].items():
        shutil.copytree(ROOT / folder, Path(_PACKAGES.name, *name.split(".")), dirs_exist_ok=True)
    sys.path.insert(0, _PACKAGES.name)


def on_config(config: MkDocsConfig) -> None:
    """Set the addresses of the project, and let `mkdocs serve` also watch the pages of other folders."""
    repository, site = addresses()
    if repository:
        config.repo_url, config.repo_name = repository, "/".join(repository.split("/")[-2:])
    if site:
        config.site_url = f"{site}/"  # links of the site map and to the home page are relative to it
    config.watch.extend(sorted({str(ROOT / pattern.partition("/")[0]) for pattern in (*OTHERS, "README.md")}))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of other folders."""
    for path in sorted(path for pattern in OTHERS for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    files.append(File.generated(config, HOME, abs_src_path=str(ROOT / "README.md")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in tables of other pages, and make links those of the site."""
    here = page.file.src_uri
    folder = Path(page.file.abs_src_path).parent

    def table(request: re.Match) -> str:
        path, name = request["page"], request["name"]
        _, mark, rest = (folder / path).read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
        if not mark:
            raise PluginError(f"{here}: table {name!r} not found in {path}. It must stand after `<!-- {name} -->`.")
        return rest.partition("<!-- end -->")[0]

    def in_repository(linked: str, link: re.Match) -> str:
        if not config.repo_url or link["image"]:
            return link["text"]
        kind = "tree" if (ROOT / linked).is_dir() else "blob"
        return f"[{link['text']}]({config.repo_url}/{kind}/{BRANCH}/{linked}{link['anchor'] or ''})"

    def on_the_site(link: re.Match) -> str:
        linked = os.path.relpath(folder / link["path"], ROOT).replace(os.sep, "/")
        target = HOME if linked == "README.md" else linked.removeprefix("docs/")
        if (ROOT / linked).exists() and files.get_file_from_path(target) is None:
            target = f"{target}/README.md"  # a link to a folder
            if files.get_file_from_path(target) is None:
                return in_repository(linked, link)
        path = posixpath.relpath(target, posixpath.dirname(here) or ".")
        return f"{link['image']}[{link['text']}]({path}{link['anchor'] or ''})"

    markdown = directives_of(markdown)
    markdown = _WARNING.sub(lambda box: "!!! warning\n\n" + box[1].replace("> ", "    "), markdown)
    return _LINK.sub(on_the_site, _TABLE.sub(table, markdown))


def on_page_content(html: str, **_: object) -> str:
    """Remove the brackets around names of the package in docstrings, and say where cells of tables must not break."""
    return _CELL.sub(_unbroken, re.sub(r"\[(<code>[^<]+</code>)\]", r"\1", html))


def _unbroken(cell: re.Match) -> str:
    """Return a cell whose numbers do not break, and which is not narrow if it holds a sentence."""
    content = _NUMBERS.sub(lambda numbers: numbers[0].replace(" ", "&nbsp;"), cell["content"])
    prose = ' class="prose"' if len(re.sub("<[^>]*>", "", cell["content"])) > 28 else ""
    return f"<td{cell['attributes']}{prose}>{content}</td>"
