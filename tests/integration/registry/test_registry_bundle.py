"""Offline verification: a bundle and public keys, no catalog, no store; whatever was changed is named."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.catalog_facts import ALICE
from support.registry_bench import GATES, MODEL, Bench, open_bench
from support.registry_cases import Hand

from headway.artifacts.digests import canonical_json
from headway.registry.bundle import BundleRefused, read_bundle, verify_bundle, write_bundle
from headway.registry.dossier import check_dossier, collect_dossier
from headway.registry.keys import KeyRing, Trust
from headway.registry.promote import promote


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, migrated_sqlite: Path) -> tuple[Path, Trust]:
    """The bundle of a promoted version; its home is gone."""
    root = tmp_path_factory.mktemp("exported")
    bench = open_bench(root / "home", migrated_sqlite)
    version = bench.version()
    bench.judge(version)
    promote(bench.services, bench.keyring, MODEL, MODEL, version.version)
    _export(bench, root / "bundle")
    trust = bench.keyring.trust()
    bench.close()
    shutil.rmtree(bench.home)
    return root / "bundle", trust


def _export(bench: Bench, folder: Path, number: int = 1) -> None:
    version = bench.services.catalog.model_version(ALICE, MODEL, number)
    dossier = collect_dossier(bench.services, version)
    trust = bench.keyring.trust()
    manifest = check_dossier(dossier, trust).manifest
    assert manifest is not None
    write_bundle(bench.services.store, dossier, manifest, trust, folder)


@pytest.fixture
def copied(exported: tuple[Path, Trust], tmp_path: Path) -> tuple[Path, Trust]:
    folder = tmp_path / "bundle"
    shutil.copytree(exported[0], folder)
    return folder, exported[1]


def _problems(folder: Path, trust: Trust) -> dict[str, str]:
    _, checked, files = verify_bundle(folder, trust)
    return {f.subject: f.problem for f in (*checked.findings, *files) if f.problem}


def test_an_exported_version_verifies_with_public_keys_alone(exported: tuple[Path, Trust]) -> None:
    folder, trust = exported
    dossier, checked, files = verify_bundle(folder, trust)
    assert (checked.problems, [f.problem for f in files], dict(checked.unpassed)) == ((), ["", ""], {})
    assert set(checked.statements) == set(GATES)
    assert [(p.endpoint_id, p.epoch) for p in dossier.promotions] == [(MODEL, 1)]
    subjects = {f.subject for f in checked.findings}
    assert {"manifest", "provenance", "promotion to delay at epoch 1", "gate contract"} <= subjects
    private = [f for f in folder.rglob("*") if f.is_file() and f.suffix == ".key"]
    assert private == []


def _describe(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    described = json.loads((folder / "bundle.json").read_bytes())
    change(described)
    (folder / "bundle.json").write_bytes(canonical_json(described))


def _swap(folder: Path, one: str, other: str) -> None:
    names = [folder / "statements" / f"gate-{n}.json" for n in (one, other)]
    first, second = (n.read_bytes() for n in names)
    names[0].write_bytes(second)
    names[1].write_bytes(first)


def _drop_gate(folder: Path) -> None:
    _describe(folder, lambda d: d["gates"].remove("segments"))  # type: ignore[attr-defined]


def _fewer_gates(folder: Path) -> None:
    def change(described: dict[str, object]) -> None:
        policy = described["policy"]
        assert isinstance(policy, dict)
        policy["gates"] = [g for g in policy["gates"] if g["gate"] == "contract"]

    _describe(folder, change)


def _link(folder: Path) -> None:
    target = folder / "files" / "weights.safetensors"
    kept = folder.parent / "kept"
    target.rename(kept)
    target.symlink_to(kept)


def _linked_folder(folder: Path) -> None:
    (folder / "files" / "documents").rename(folder.parent / "documents")
    (folder / "files" / "documents").symlink_to(folder.parent / "documents")


def _linked_files(folder: Path) -> None:
    (folder / "files").rename(folder.parent / "elsewhere")
    (folder / "files").symlink_to(folder.parent / "elsewhere")


def _epoch(described: dict[str, object]) -> None:
    promotions = described["promotions"]
    assert isinstance(promotions, list)
    promotions[0]["epoch"] = 2


_TAMPERED: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "flipped": (lambda f: (f / "files/weights.safetensors").write_bytes(b"x"), "file weights.safetensors", "bytes"),
    "missing": (lambda f: (f / "files/documents/model.json").unlink(), "file documents/model.json", "not there"),
    "extra": (lambda f: (f / "files/run.py").write_text("x"), "file run.py", "does not list"),
    "link": (_link, "file weights.safetensors", "not there"),
    "linked folder": (_linked_folder, "file documents", "no plain file"),
    "linked files": (_linked_files, "files", "link"),
    "swapped gates": (lambda f: _swap(f, "contract", "segments"), "gate contract", "wrong_gate"),
    "dropped gate": (_drop_gate, "gate segments", "no signed verdict"),
    "fewer gates": (_fewer_gates, "gate contract", "wrong_policy"),
    "other version": (lambda f: _describe(f, lambda d: d.update(version=2)), "gate contract", "wrong_version"),
    "other kind": (lambda f: _describe(f, lambda d: d.update(kind="logistic")), "manifest", "kind"),
    "contract": (lambda f: _describe(f, lambda d: d.update(contract={})), "gate contract", "wrong_contract"),
    "no policy": (lambda f: _describe(f, lambda d: d.update(policy=None)), "policy", "no policy"),
    "policy version": (lambda f: _describe(f, lambda d: d.update(policy_version=2)), "gate contract", "wrong_policy"),
    "epoch": (lambda f: _describe(f, _epoch), "promotion to delay at epoch 2", "wrong_epoch"),
    "provenance": (lambda f: (f / "statements/provenance.json").unlink(), "provenance", "no statement"),
    "manifest": (lambda f: (f / "manifest.json").write_bytes(b"{}"), "manifest", "fields"),
    "digest": (
        lambda f: _describe(f, lambda d: d.update(manifest_digest="sha256:" + "0" * 64)),
        "provenance",
        "wrong_subject",
    ),
}


@pytest.mark.parametrize("how", _TAMPERED)
def test_whatever_was_changed_is_named(copied: tuple[Path, Trust], how: str) -> None:
    folder, trust = copied
    tamper, subject, said = _TAMPERED[how]
    tamper(folder)
    assert said in _problems(folder, trust)[subject]


def test_nothing_is_read_through_a_linked_folder(copied: tuple[Path, Trust]) -> None:
    _linked_folder(copied[0])
    assert _problems(*copied) == {
        "file documents": "it is no plain file",
        "file documents/model.json": "it is not there",
    }


def test_the_name_of_a_gate_is_no_path(copied: tuple[Path, Trust]) -> None:
    _describe(copied[0], lambda d: d.update(gates=["x/../contract"]))
    with pytest.raises(BundleRefused, match="no list of names"):
        read_bundle(copied[0])


def test_keys_of_others_verify_nothing(copied: tuple[Path, Trust], tmp_path: Path) -> None:
    other = KeyRing(tmp_path / "keys", Hand())
    for role in ("trainer", "gate", "promoter"):
        other.private_key(role)
    problems = _problems(copied[0], other.trust())
    assert {s for s, p in problems.items() if "unknown_key" in p} == {
        *(f"gate {g}" for g in GATES),
        "provenance",
        "promotion to delay at epoch 1",
    }


def test_no_byte_of_a_bundle_may_change_unseen(copied: tuple[Path, Trust]) -> None:
    folder, trust = copied
    for path in sorted(f for f in folder.rglob("*") if f.is_file() and f.name != "keys.json"):
        whole = path.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // (60 if path.name == "bundle.json" else 7))):
            changed = bytearray(whole)
            changed[place] ^= 1
            path.write_bytes(changed)
            with contextlib.suppress(BundleRefused):
                assert _problems(folder, trust), f"{path.name} byte {place}"
            path.write_bytes(whole)
    assert _problems(folder, trust) == {}


@pytest.mark.parametrize(
    "tamper",
    [
        lambda f: (f / "bundle.json").unlink(),
        lambda f: (f / "bundle.json").write_bytes(b'{"format":"headway.bundle/1","format":"x"}'),
        lambda f: (f / "manifest.json").unlink(),
        lambda f: (f / "statements/gate-contract.json").unlink(),
        lambda f: _describe(f, lambda d: d.update(gates="contract")),
        lambda f: _describe(f, lambda d: d.update(promotions=[{}])),
        lambda f: _describe(f, lambda d: d.update(version="1")),
        lambda f: _describe(f, lambda d: d.update(more=1)),
    ],
)
def test_what_is_no_bundle_is_refused(copied: tuple[Path, Trust], tamper: Callable[[Path], object]) -> None:
    tamper(copied[0])
    with pytest.raises(BundleRefused):
        read_bundle(copied[0])


def test_a_bundle_is_written_over_nothing(tmp_path: Path, migrated_sqlite: Path) -> None:
    bench = open_bench(tmp_path / "home", migrated_sqlite)
    bench.judge(bench.version())
    folder = tmp_path / "there"
    folder.mkdir()
    (folder / "mine.txt").write_text("x")
    with pytest.raises(BundleRefused, match="not an empty folder"):
        _export(bench, folder)
    assert [f.name for f in folder.iterdir()] == ["mine.txt"]
    bench.close()
