"""Digests, canonical JSON, manifests: one spelling, and nothing that leaves the set."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.artifacts.digests import canonical_json, check_digest, digest_bytes, digest_file, digest_json
from headway.artifacts.manifest import manifest_entry, put_manifest, read_manifest
from headway.artifacts.store import LocalStore
from trainer.blobs import InvalidDigest, InvalidManifest, Manifest, ManifestEntry, NotCanonical, parse_manifest

GOOD = digest_bytes(b"good")
EMPTY = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def test_digest_is_sha256_in_one_spelling(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert digest_bytes(b"") == EMPTY
    assert digest_file(tmp_path / "empty") == EMPTY


@pytest.mark.parametrize(
    "value",
    [
        "",
        "sha256:",
        EMPTY[7:],
        EMPTY.upper(),
        EMPTY + "\n",
        EMPTY[:-1],
        "md5:" + EMPTY[7:],
        "sha256:../" + EMPTY[10:],
        7,
    ],
)
def test_anything_else_is_no_digest(value: str) -> None:
    with pytest.raises(InvalidDigest, match="expected 'sha256:' and 64"):
        check_digest(value)


@settings(deadline=None)
@given(json_values)
def test_canonical_json_is_a_fixed_point(value: object) -> None:
    data = canonical_json(value)  # pyright: ignore[reportArgumentType]
    assert canonical_json(json.loads(data)) == data


def test_canonical_json_ignores_key_order_and_keeps_the_rest() -> None:
    assert canonical_json({"b": [1, 1.5, "é"], "a": None}) == '{"a":null,"b":[1,1.5,"é"]}'.encode()
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    assert digest_json([1, 2]) != digest_json([2, 1])
    assert digest_json(1) != digest_json(1.0)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [math.nan]}, r"\$\.a\[0\]"),
        (-math.inf, r"\$"),
        ({"a": {1: 2}}, r"\$\.a"),
        ("\ud800", "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        (b"bytes", "bytes"),
        ({1, 2}, "set"),
    ],
)
def test_what_has_no_canonical_form_is_refused_with_its_place(value: object, place: str) -> None:
    with pytest.raises(NotCanonical, match=place):
        canonical_json(value)  # pyright: ignore[reportArgumentType]


def _manifest(*names: str) -> Manifest:
    return Manifest(tuple(ManifestEntry(name, 4, GOOD) for name in names), {"rows": 3})


def test_a_manifest_is_its_content_whatever_the_order() -> None:
    manifest = _manifest("b/data.parquet", "a.json")
    assert manifest.digest == _manifest("a.json", "b/data.parquet").digest
    assert parse_manifest(manifest.canonical()) == manifest
    assert manifest.entry("a.json").sha256 == GOOD
    assert manifest.digest != Manifest(manifest.entries, {"rows": 4}).digest


NAMES = [
    ("../x",),
    ("/etc/hostname",),
    ("a/../../x",),
    ("a//b",),
    ("A", "a"),
    ("a\nb",),
    ("",),
    (".",),
    ("a/",),
    ("a\\b",),
    ("c:x",),
    ("a\0b",),
    ("a ",),
    ("a.",),
    ("é", "é"),
    ("ß", "ss"),
    ("a\u202eb",),
    ("x" * 513,),
]


@pytest.mark.parametrize("names", NAMES, ids=ascii)
def test_field_F05_a_name_that_leaves_or_blurs_the_set_is_refused_by_name(names: tuple[str, ...]) -> None:
    with pytest.raises(InvalidManifest) as refusal:
        _manifest(*names)
    assert repr(names[0])[:60] in str(refusal.value)


@pytest.mark.parametrize("names", NAMES[:6], ids=ascii)
def test_field_F05_a_stored_manifest_is_refused_before_anything_is_opened(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    entries = [{"name": n, "size": 4, "sha256": GOOD, "media_type": "text/plain"} for n in names]
    document = {"format": "headway.manifest/1", "facts": {}, "entries": entries}
    store = LocalStore(tmp_path)
    blob = store.put_bytes(canonical_json(document))
    with pytest.raises(InvalidManifest) as refusal:
        read_manifest(store, blob.digest)
    assert repr(names[0]) in str(refusal.value)


def test_field_F05_one_name_with_two_digests_is_refused() -> None:
    with pytest.raises(InvalidManifest, match="'a'"):
        Manifest((ManifestEntry("a", 4, GOOD), ManifestEntry("a", 0, EMPTY)))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"entries":[],"facts":{},"format":"headway.manifest/2"}',
        b'{"entries":[],"facts":{},"format":"headway.manifest/1","more":1}',
        b'{"entries":[], "facts":{},"format":"headway.manifest/1"}',
        b'{"entries":[],"entries":[],"facts":{},"format":"headway.manifest/1"}',
        b'{"entries":[{"name":"a","size":1.0,"sha256":"x","media_type":"a/b"}],"facts":{},"format":"headway.manifest/1"}',
        b'{"entries":[{"name":"a"}],"facts":{},"format":"headway.manifest/1"}',
        b'{"entries":{},"facts":{},"format":"headway.manifest/1"}',
    ],
)
def test_bytes_that_are_no_canonical_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidManifest):
        parse_manifest(data)


@pytest.mark.parametrize(
    "entry",
    [ManifestEntry("a", -1, GOOD), ManifestEntry("a", 1, "x"), ManifestEntry("a", 1, GOOD, "text")],
)
def test_a_bad_entry_is_refused(entry: ManifestEntry) -> None:
    with pytest.raises(InvalidManifest, match="'a'"):
        Manifest((entry,))


def test_a_manifest_goes_through_the_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    data = store.put_bytes(b"rows", "application/vnd.apache.parquet")
    manifest = Manifest((manifest_entry("rows.parquet", data),), {"rows": 1})
    blob = put_manifest(store, manifest)
    assert blob.digest == manifest.digest
    assert read_manifest(store, blob.digest) == manifest
