"""The card of a language model says what was measured, in words."""

from __future__ import annotations

from typing import Any

from headway.registry.text_card import evaluation_lines, is_text, samples_markdown


def _report(**measured: Any) -> dict[str, Any]:  # noqa: ANN401
    return {
        "documents": 35,
        "bytes": 557_164,
        "bootstrap": {"units": 34},
        "streams": {"gzip": 2.0683},
        "measured": {"context": 256, "stride": 128, "tokens": 160_000, **measured},
    }


def _row(model: str, value: float | None) -> dict[str, Any]:
    ends = {f"bits_per_byte{end}": value for end in ("", "_lower", "_upper")}
    return {"model": model, **ends, "gain": None, "gain_lower": None, "gain_upper": None}


def test_a_card_names_documents_windows_coders_and_streams() -> None:
    minutes = [{"minute": float(i), "step": 10 * i, "bits_per_byte": 4.0 - i / 100} for i in range(1, 31)]
    rows = [_row("candidate", 1.8), _row("gzip", 2.2331), _row("lzma", None)]
    said = "\n".join(evaluation_lines(_report(minutes=minutes), rows, 2))
    assert "35 held-out documents (34 independent), 557,164 bytes" in said
    assert "evaluation number 2" in said
    assert "256 tokens, 128 apart" in said
    assert "gzip -9               2.2331" in said
    assert "undefined" in said
    assert "gzip -9 2.0683" in said
    told = said.splitlines()[-1]
    assert told.count(" min") <= 13
    assert "3.7 after 30.0 min" in told


def test_samples_hold_whatever_text_was_drawn() -> None:
    shown = samples_markdown(_report(samples=[{"prompt": "def f():", "text": "```\nbroken out"}]))
    assert "````python\n```\nbroken out\n````" in shown


def test_an_evaluation_of_rows_is_none_of_text() -> None:
    assert is_text(_report())
    assert not is_text({"rows": 3, "metrics": {}})
    assert not is_text(None)
