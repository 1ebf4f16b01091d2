"""Text of user code on its way into events, documents and databases: nothing of it breaks a line or a document."""

import json

from hypothesis import given
from hypothesis import strategies as st

from trainer.blobs import canonical_json
from trainer.events import one_line, storable

ANY = st.text(st.characters(codec=None), max_size=700)


@given(ANY)
def test_a_line_is_printable_and_short(text: str) -> None:
    shown = one_line(text)
    assert shown.isprintable()
    assert len(shown) <= 500
    assert json.loads(canonical_json(shown)) == shown
    if text.isprintable() and len(text) <= 500:
        assert shown == text


@given(ANY)
def test_storable_text_fits_every_document_and_loses_nothing_else(text: str) -> None:
    stored = storable(text)
    assert json.loads(canonical_json(stored)) == stored
    assert "\0" not in stored
    if text.isprintable():
        assert stored == text
