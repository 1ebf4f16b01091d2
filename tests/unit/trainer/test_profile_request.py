"""A request for a trace: what it may say, and how it is kept."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.profile_request import MOST_STEPS, PROFILE_FILE, ProfileRefused, Wanted, parse_profile, read_profile


@given(st.integers(1, 10**6), st.integers(0, MOST_STEPS - 1), st.booleans())
def test_a_request_is_read_as_it_was_written(first: int, more: int, named: bool) -> None:
    text = f"{first}:{first + more}"
    assert parse_profile(f"steps={text}" if named else text) == Wanted(first, first + more)


def test_a_request_passes_through_its_file(tmp_path: Path) -> None:
    assert read_profile(tmp_path) is None
    (tmp_path / PROFILE_FILE).write_bytes(Wanted(10, 15).to_json())
    assert read_profile(tmp_path) == Wanted(10, 15)


@pytest.mark.parametrize("text", ["", "10", "steps=10", "0:5", "5:4", "a:b", "-1:3", "1:2:3", "step=1:2", "1:201"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ProfileRefused, match="steps"):
        parse_profile(text)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"steps": [1]}', '{"steps": [1, "2"]}', '{"steps": [3, 2]}', "\xff"]
)
def test_other_files_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / PROFILE_FILE).write_text(content, encoding="latin-1")
    with pytest.raises(ProfileRefused):
        read_profile(tmp_path)
