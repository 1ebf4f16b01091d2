"""What a card says of a language model: bits per byte beside compressors, by training minute, and what it writes."""

from collections.abc import Iterator, Mapping, Sequence

from headway.artifacts.digests import Json
from headway.registry.text_evaluation import BITS_PER_BYTE

METRICS = (BITS_PER_BYTE,)
BASIS = ("documents", "bytes", "bootstrap", "streams")
_MINUTES = 12
_LEVELS = {"gzip": "gzip -9", "zlib": "zlib -9", "lzma": "lzma -9 (xz)"}


def is_text(report: Mapping[str, Json] | None) -> bool:
    """Whether an evaluation, as JSON, is one of documents."""
    return report is not None and "documents" in report


def coder_name(coder: str) -> str:
    """How people call a coder."""
    return _LEVELS.get(coder, coder.replace("_", " "))


def measured(report: Mapping[str, Json]) -> Mapping[str, Json]:
    """How an evaluation was made: `context`, `stride`, `tokens`, `samples`, `minutes`."""
    found = report.get("measured")
    return found if isinstance(found, Mapping) else {}


def records(report: Mapping[str, Json], name: str) -> list[Mapping[str, Json]]:
    """`samples` (prompt, text) or `minutes` (minute, step, bits_per_byte) of an evaluation."""
    found = measured(report).get(name)
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []


def evaluation_lines(report: Mapping[str, Json], rows: Sequence[Mapping[str, Json]], looks: Json) -> Iterator[str]:
    """The part of a card between its head and its gates."""
    bootstrap = report["bootstrap"]
    units = bootstrap.get("units") if isinstance(bootstrap, Mapping) else None
    said = measured(report)
    yield (
        f"  evaluated  on {report['documents']} held-out documents ({units} independent), {report['bytes']:,} bytes in "
        f"{said.get('tokens')} tokens; evaluation number {looks} of them"
    )
    yield f"             each by itself, in windows of {said.get('context')} tokens, {said.get('stride')} apart"
    yield f"    {'coder':<20}  {'bits per byte':<25}  candidate's gain"
    for row in rows:
        cells = f"{coder_name(str(row['model'])):<20}  {_spread(row, BITS_PER_BYTE):<25}  {_spread(row, 'gain')}"
        yield f"    {cells}".rstrip()
    streams = report.get("streams")
    if isinstance(streams, Mapping) and streams:
        listed = ", ".join(f"{coder_name(coder)} {bits:.4f}" for coder, bits in streams.items())
        yield f"  as one     stream of all documents: {listed}"
    minutes = records(report, "minutes")
    if minutes:
        step = -(-len(minutes) // _MINUTES)
        shown = [*minutes[:-1:step], minutes[-1]]
        listed = ", ".join(f"{item['bits_per_byte']} after {item['minute']} min" for item in shown)
        yield f"  validation bits per byte by training minute: {listed}"


def samples_markdown(report: Mapping[str, Json]) -> str:
    """What the model wrote behind each prompt, as markdown."""
    parts = [
        f"prompt\n\n{_fenced(str(item.get('prompt')))}\n\ngoes on\n\n{_fenced(str(item.get('text')))}"
        for item in records(report, "samples")
    ]
    return "\n\n---\n\n".join(parts)


def _fenced(text: str) -> str:
    fence = "`" * 3
    while fence in text:
        fence += "`"
    return f"{fence}python\n{text}\n{fence}"


def _spread(row: Mapping[str, Json], name: str) -> str:
    value, lower, upper = (row[f"{name}{end}"] for end in ("", "_lower", "_upper"))
    if value is None:
        return "" if name == "gain" else "undefined"
    ends = ["?" if end is None else f"{end:.4f}" for end in (lower, upper)]
    return f"{value:.4f} [{ends[0]}, {ends[1]}]"
