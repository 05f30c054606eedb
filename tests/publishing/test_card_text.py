"""Parts of a model card that this package wrote are rewritten, and text that a person wrote stays."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnres.publishing.card_text import (
    ORDER,
    append_to_part,
    digest,
    find_part,
    mark_upload,
    merge_cards,
    put_part,
    remove_upload_mark,
    text_by_hand,
)

names = st.sampled_from(ORDER)
# Lines of a person or of this package that are not marks.
texts = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=30).map(str.strip)
contents = texts.filter(bool)
heads = st.sampled_from(["", "---\nlicense: mit\n---\n"])


def written(parts: list[tuple[str, str]], text: str = "") -> str:
    for name, content in parts:
        text = put_part(text, name, content)
    return text


@given(st.lists(st.tuples(names, contents)), st.tuples(names, contents))
def test_a_part_holds_the_content_that_was_put_last(parts, last):
    text = written([*parts, last])
    assert find_part(text, last[0]).content == last[1]
    assert text_by_hand(text) == ""
    assert put_part(text, *last) == text


@given(st.lists(st.tuples(names, contents), min_size=1))
def test_parts_stand_in_their_order_once(parts):
    text = written(parts)
    places = [text.find(f"<!-- attnres:{name} ") for name in ORDER if find_part(text, name) is not None]
    assert places == sorted(places)
    assert text.count("<!-- attnres:") == len({name for name, _ in parts})


@given(st.lists(st.tuples(names, contents), min_size=1), contents, contents, st.data())
def test_an_edited_part_and_the_text_around_it_stay(parts, edit, later, data):
    name = data.draw(st.sampled_from([name for name, _ in parts]))
    text = written(parts)
    old = find_part(text, name).content
    if digest(old) == digest(edit):
        return
    text = text.replace(f"-->\n{old}\n<!-- /attnres:{name}", f"-->\n{edit}\n<!-- /attnres:{name}") + "\nMine.\n"
    assert find_part(text, name).is_edited
    again = written([(other, later) for other in ORDER], text)
    assert find_part(again, name).content == edit
    assert again.rstrip().endswith("Mine.")
    assert edit in text_by_hand(again)


@given(st.lists(st.tuples(names, contents), min_size=1))
def test_putting_an_empty_content_removes_the_part(parts):
    text = written([*parts, *((name, "") for name, _ in parts)])
    assert "attnres" not in text.replace("".join(content for _, content in parts), "")


def test_a_card_of_others_keeps_its_title_and_gets_the_other_parts_below():
    text = written([("summary", "# Ours"), ("use", "## Use")], "# Theirs\n\nText.\n")
    assert find_part(text, "summary") is None
    assert text.startswith("# Theirs\n\nText.\n\n<!-- attnres:use")


@given(st.lists(st.tuples(names, contents)), heads)
def test_the_mark_of_an_upload_is_not_part_of_the_card(parts, head):
    text = head + written(parts)
    assert remove_upload_mark(mark_upload(text, text, text)).strip() == text.strip()
    assert mark_upload(mark_upload(text, text, text), text, text) == mark_upload(text, text, text)
    assert text_by_hand(mark_upload(text, text, text)) == ""


OURS = "---\nlicense: mit\n---\n\n" + written([("summary", "# Model"), ("use", "## Use")])
EDITED = OURS + "\nBy hand.\n"


@pytest.mark.parametrize(
    ("local", "pushed", "edit", "expected"),
    [
        (OURS, OURS, None, "local"),
        (EDITED, OURS, None, "local"),  # edited here alone
        (OURS, OURS, lambda card: card + "\nOn the Hub.\n", "uploaded"),  # edited there alone
        (OURS, OURS, lambda card: card.replace("mit", "apache-2.0"), "uploaded"),
        (EDITED, EDITED, lambda card: card + "\nOn the Hub.\n", "uploaded"),  # not edited here since the upload
        (EDITED, EDITED, lambda card: card.replace("\n", "\r\n"), "local"),
        (EDITED, OURS, lambda card: card + "\nOn the Hub.\n", "refused"),
        (EDITED, OURS, lambda card: "# A card of others\n", "refused"),
        (OURS, OURS, lambda card: "# A card of others\n", "uploaded"),
    ],
)
def test_merging_two_cards_loses_no_edit_of_a_person(local, pushed, edit, expected):
    uploaded = mark_upload(pushed, pushed, pushed)
    uploaded = edit(uploaded) if edit else uploaded
    if expected == "refused":
        with pytest.raises(ValueError, match=r"edited on the Hub, and .* --overwrite-card"):
            merge_cards(local, uploaded)
        assert merge_cards(local, uploaded, overwrite=True) == local
    else:
        assert merge_cards(local, uploaded) == (local if expected == "local" else remove_upload_mark(uploaded))


def test_a_first_upload_takes_the_local_card():
    assert merge_cards(EDITED, None) == EDITED


@pytest.mark.parametrize("edit", ["", "TODO", "Many\n\nlines"])
def test_a_step_is_added_where_a_person_has_written(edit):
    text = f"TODO before\n\n{put_part('', 'origin', 'Made.')}\nTODO after\n".replace("Made.", edit)
    added = append_to_part(text, "origin", "**Trained.**")
    assert added.count("**Trained.**") == 1
    assert find_part(added, "origin").content.strip() == f"{edit}\n\n**Trained.**".strip()
    assert find_part(added, "origin").is_edited
    assert text_by_hand(added).startswith("TODO before") and text_by_hand(added).endswith("TODO after")


def test_marks_without_their_ends_are_text_and_cost_linear_time():
    def seconds(marks: int) -> float:
        """Return the least processor time of three calls."""
        broken = "<!-- attnres:use 000000000000 -->\n" * marks
        times = []
        for _ in range(3):
            start = time.process_time()
            assert find_part(broken, "use") is None
            assert put_part(broken, "use", "## Use").startswith(broken.strip())
            times.append(time.process_time() - start)
        return min(times)

    # Eight times as many parts take eight times as long. With a search from each part to the end, they would take 64
    # times as long.
    assert seconds(16_000) < 24 * seconds(2_000)
