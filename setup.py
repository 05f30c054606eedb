"""Make the links of the README lead somewhere from the package's page, which has none of the repository's files.

They lead to `Repository` of `[project.urls]`. Without it links become plain text, and images are left out.
`pyproject.toml` has everything else.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
URLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
REPOSITORY = URLS.get("Repository", "").rstrip("/")

README = (ROOT / "README.md").read_text(encoding="utf-8")
RELATIVE = r"(?!\w+:|#)"
LINK, IMAGE = rf"\[([^\]]*)\]\({RELATIVE}([^)\s]+)\)", rf'<img src="{RELATIVE}([^"]+)"([^>]*>)'
README = re.sub(LINK, rf"[\1]({REPOSITORY}/blob/main/\2)" if REPOSITORY else r"\1", README)
README = re.sub(IMAGE, rf'<img src="{REPOSITORY}/raw/main/\1"\2' if REPOSITORY else "", README)
setup(long_description=README, long_description_content_type="text/markdown")
