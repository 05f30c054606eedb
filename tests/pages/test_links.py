"""Tests that every link of a page leads to a file. The strict build of the site checks its own links."""

import pytest

from .reading import PAGES, ROOT, links_of, name_of


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_to_a_file_leads_somewhere(page):
    links = [link.partition("#")[0] for link in links_of(page)]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_links_are_found():
    assert len(links_of(ROOT / "README.md")) > 20
    assert sum(len(links_of(page)) for page in PAGES) > 200
