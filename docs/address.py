"""Write the addresses of the project into the files that show them.

    python docs/address.py    # or `make address`

`[project.urls]` in `pyproject.toml` sets them: `Repository`, where the code lies, and `Documentation`, the site. The
site and the package's metadata read that table. `README.md`, `CITATION.cff` and the notebooks cannot read it, so this
script writes them. Without the table it removes the addresses.
"""

import json
import re
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
BRANCH = "main"
_COLAB = "https://colab.research.google.com/github"
# The lines of a notebook's first cell of code that name the checkout on Colab, without an address and with one.
_UPLOADED = """\
    CHECKOUT = "./attnres"  # a checkout of the repository: clone it into this folder first, or upload it
    assert Path(CHECKOUT, "pyproject.toml").exists(), f"{CHECKOUT} holds no checkout of the repository"
"""
_CLONED = """\
    CHECKOUT = "./attnres"
    if not Path(CHECKOUT, "pyproject.toml").exists():
        !git clone --quiet %s {CHECKOUT}
"""


def addresses() -> tuple[str, str]:
    """Return the addresses of the repository and of the site, without a slash at the end. An unset one is empty."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    return urls.get("Repository", "").rstrip("/"), urls.get("Documentation", "").rstrip("/")


def readme(text: str, repository: str, site: str) -> str:
    """Return the README with its line of links, and the address in its entry for BibTeX."""
    links = [f"[Documentation]({site})"] if site else []
    if repository:
        links += [f"[Repository]({repository})", f"[Issues]({repository}/issues)"]
        links += [f"`git clone {repository}`"]
    line = f"{' · '.join(links)}\n" if links else ""
    text = re.sub(r"(<!-- address -->\n)(?:.+\n)?(<!-- end -->)", lambda marks: f"{marks[1]}{line}{marks[2]}", text)
    url = f"  url = {{{repository}}},\n" if repository else ""
    return re.sub(r"(@software\{.*\n)(?:  url = .*\n)?", lambda entry: entry[1] + url, text)


def citation(text: str, repository: str, site: str) -> str:
    """Return `CITATION.cff` with both addresses."""
    text = re.sub(r"^(?:repository-code|url): .*\n", "", text, flags=re.MULTILINE)
    lines = (f"repository-code: {repository}\n" if repository else "") + (f"url: {site}\n" if site else "")
    return re.sub(r"^type: software\n", lambda line: line[0] + lines, text, flags=re.MULTILINE)


def notebook(text: str, repository: str, name: str) -> str:
    """Return a notebook with its link to Colab, where its first cell of code then clones the repository."""
    content = json.loads(text)
    title, *prose = "".join(content["cells"][0]["source"]).split("\n\n")
    prose = [paragraph for paragraph in prose if not paragraph.startswith(f"[Open in Colab]({_COLAB}")]
    place = urlsplit(repository)
    if place.netloc == "github.com":  # Colab opens no other addresses
        prose.insert(0, f"[Open in Colab]({_COLAB}{place.path}/blob/{BRANCH}/notebooks/{name})")
    content["cells"][0]["source"] = "\n\n".join([title, *prose]).splitlines(keepends=True)
    code = next(cell for cell in content["cells"] if cell["cell_type"] == "code")
    source = "".join(code["source"])
    cloned = re.escape(_CLONED).replace("%s", r"\S+")
    lines = _CLONED % repository if repository else _UPLOADED
    code["source"] = re.sub(f"{re.escape(_UPLOADED)}|{cloned}", lambda _: lines, source).splitlines(keepends=True)
    return json.dumps(content, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def main() -> None:
    """Write all files that show the addresses, and print which of them changed."""
    repository, site = addresses()
    changes = {ROOT / "README.md": lambda text: readme(text, repository, site)}
    changes[ROOT / "CITATION.cff"] = lambda text: citation(text, repository, site)
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        changes[path] = lambda text, name=path.name: notebook(text, repository, name)
    for path, change in changes.items():
        before = path.read_text(encoding="utf-8")
        if (after := change(before)) != before:
            path.write_text(after, encoding="utf-8")
            print(f"Written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
