"""A version with all its evidence in a folder, checked without catalog, store or network.

Layout: `bundle.json` (what is claimed), `manifest.json`, `files/<name>` for each entry of the manifest, `statements/`
with one envelope per gate, `provenance.json` and `promotion-<n>.json`, and `keys.json`, the signer's public keys.
Nothing in the folder is believed: names are checked before a file is opened, links are refused, and a file that the
manifest does not list is a problem. Keys that come from the folder itself show that it is consistent, not whose it is.
"""

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from headway.artifacts.digests import InvalidDigest, Json, canonical_json, check_digest
from headway.artifacts.manifest import Manifest
from headway.artifacts.store import LocalStore
from headway.errors import HeadwayError
from headway.registry.dossier import Checked, Dossier, Finding, Promoted, check_dossier, stored_files
from headway.registry.keys import Trust
from headway.registry.statements import Signed
from headway.registry.strict_json import MAX_BYTES, JsonRefused, parse_json

BUNDLE_FORMAT = "headway.bundle/1"
_DESCRIPTION = "bundle.json"
_MANIFEST = "manifest.json"
_KEYS = "keys.json"
_PROVENANCE = "provenance.json"
_FIELDS = {
    "format",
    "model",
    "version",
    "kind",
    "manifest_digest",
    "contract",
    "policy_version",
    "policy",
    "gates",
    "promotions",
}
_CHUNK = 1 << 20


class BundleRefused(HeadwayError):
    """A folder that is no bundle, or that stands in the way of one."""

    def __init__(self, message: str, remedy: str = "export it again: `headway models verify ID --export DIR`") -> None:
        super().__init__(f"bundle: {message}", remedy)


def write_bundle(store: LocalStore, dossier: Dossier, manifest: Manifest, trust: Trust, folder: Path) -> None:
    """Export a version into `folder`, which must not exist yet or be empty; the description is written last.

    Raises:
        BundleRefused: the folder holds something.
        StoreError: a file is not in the store as the manifest says.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BundleRefused(f"{folder} exists and is not an empty folder", "name a new folder")
    statements = folder / "statements"
    statements.mkdir(parents=True, exist_ok=True)
    for entry in manifest.entries:
        path = folder / "files" / entry.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.get_bytes(entry.sha256))
    for gate, signed in dossier.gates.items():
        (statements / f"gate-{gate}.json").write_bytes(signed.envelope)
    if dossier.provenance is not None:
        (statements / _PROVENANCE).write_bytes(dossier.provenance.envelope)
    for number, promoted in enumerate(dossier.promotions):
        (statements / f"promotion-{number}.json").write_bytes(promoted.signed.envelope)
    (folder / _MANIFEST).write_bytes(dossier.manifest)
    (folder / _KEYS).write_bytes(canonical_json(trust.document()))
    (folder / _DESCRIPTION).write_bytes(canonical_json(_description(dossier)))


def bundled_keys(folder: Path) -> Path:
    """The file of public keys that the bundle brings along."""
    return folder / _KEYS


def read_bundle(folder: Path) -> Dossier:
    """Return what a bundle claims, unchecked.

    Raises:
        BundleRefused: a part is missing, a link, too large or not of its form.
    """
    try:
        described = parse_json(_read(folder / _DESCRIPTION))
    except JsonRefused as error:
        raise BundleRefused(f"{_DESCRIPTION}: {error}") from error
    if not isinstance(described, Mapping) or set(described) != _FIELDS or described["format"] != BUNDLE_FORMAT:
        raise BundleRefused(f"{_DESCRIPTION} is no description of format {BUNDLE_FORMAT!r}")
    model, version, kind = described["model"], described["version"], described["kind"]
    contract, policy_version = described["contract"], described["policy_version"]
    if not isinstance(model, str) or not isinstance(kind, str) or not isinstance(contract, Mapping):
        raise BundleRefused(f"{_DESCRIPTION}: model, kind or contract is malformed")
    if not isinstance(version, int) or not isinstance(policy_version, int):
        raise BundleRefused(f"{_DESCRIPTION}: version and policy_version are whole numbers")
    statements = folder / "statements"
    provenance = statements / _PROVENANCE
    return Dossier(
        model_id=model,
        version=version,
        kind=kind,
        manifest_digest=_digest(described["manifest_digest"]),
        manifest=_read(folder / _MANIFEST),
        contract=contract,
        policy_version=policy_version,
        policy=described["policy"],
        gates={gate: Signed(_read(statements / f"gate-{gate}.json")) for gate in _gate_names(described["gates"])},
        provenance=Signed(_read(provenance)) if provenance.exists() else None,
        promotions=_promotions(described["promotions"], statements),
    )


def verify_bundle(folder: Path, trust: Trust) -> tuple[Dossier, Checked, tuple[Finding, ...]]:
    """Check a bundle with public keys alone: its dossier, what was found of its statements, and of its files.

    Raises:
        BundleRefused: it cannot even be read.
    """
    dossier = read_bundle(folder)
    checked = check_dossier(dossier, trust)
    files = () if checked.manifest is None else _files(folder / "files", checked.manifest)
    return dossier, checked, tuple(files)


def verify_stored(store: LocalStore, dossier: Dossier, trust: Trust) -> tuple[Checked, tuple[Finding, ...]]:
    """Check a version where it is registered, as `verify_bundle` does."""
    checked = check_dossier(dossier, trust)
    return checked, () if checked.manifest is None else tuple(stored_files(store, checked.manifest))


def _description(dossier: Dossier) -> dict[str, Json]:
    return {
        "format": BUNDLE_FORMAT,
        "model": dossier.model_id,
        "version": dossier.version,
        "kind": dossier.kind,
        "manifest_digest": dossier.manifest_digest,
        "contract": dossier.contract,
        "policy_version": dossier.policy_version,
        "policy": dossier.policy,
        "gates": sorted(dossier.gates),
        "promotions": [{"endpoint": p.endpoint_id, "epoch": p.epoch, "gates": p.gates} for p in dossier.promotions],
    }


def _files(folder: Path, manifest: Manifest) -> list[Finding]:
    """Compare the folder's files with the manifest; its names were checked when it was read, before this."""
    listed = {entry.name: entry for entry in manifest.entries}
    present, findings = _present(folder)
    findings += [Finding(f"file {name}", "the manifest does not list it") for name in sorted(present - set(listed))]
    for name, entry in listed.items():
        if name not in present:
            findings.append(Finding(f"file {name}", "it is not there"))
            continue
        size, digest = _hashed(folder / name)
        problem = "" if digest == entry.sha256 else f"it has digest {digest}, the manifest says {entry.sha256}"
        if size != entry.size:
            problem = f"it has {size} bytes, the manifest says {entry.size}"
        findings.append(Finding(f"file {name}", problem))
    return findings


def _present(folder: Path) -> tuple[set[str], list[Finding]]:
    """Names of the plain files below the folder, links never followed, and what is no plain file."""
    names: set[str] = set()
    findings: list[Finding] = []
    if folder.is_symlink():
        return names, [Finding("files", "it is a link")]
    for base, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            path = Path(base) / name
            shown = path.relative_to(folder).as_posix()
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                names.add(shown)
            elif not stat.S_ISDIR(mode):
                findings.append(Finding(f"file {shown}", "it is no plain file"))
    return names, findings


def _hashed(path: Path) -> tuple[int, str]:
    hasher, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as source:
        while chunk := source.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
    return size, f"sha256:{hasher.hexdigest()}"


def _read(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise BundleRefused(f"{path.name} cannot be read ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as source:
        facts = os.fstat(source.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_BYTES:
            raise BundleRefused(f"{path.name} is no plain file of at most {MAX_BYTES} bytes")
        return source.read()


def _digest(value: Json) -> str:
    try:
        return check_digest(str(value))
    except InvalidDigest as error:
        raise BundleRefused(f"{_DESCRIPTION}: {error}") from error


def _gate_names(value: Json) -> list[str]:
    names = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
    # The name becomes part of a file's name.
    if not isinstance(value, list) or len(names) != len(value) or not all(n.isidentifier() for n in names):
        raise BundleRefused(f"{_DESCRIPTION}: gates {value!r:.120} is no list of names")
    return names


def _promotions(value: Json, statements: Path) -> tuple[Promoted, ...]:
    found: list[Promoted] = []
    for number, item in enumerate(value if isinstance(value, list) else [None]):
        if not isinstance(item, Mapping) or set(item) != {"endpoint", "epoch", "gates"}:
            raise BundleRefused(f"{_DESCRIPTION}: promotions {value!r:.120} is malformed")
        endpoint, epoch, gates = item["endpoint"], item["epoch"], item["gates"]
        if not isinstance(endpoint, str) or not isinstance(epoch, int) or not isinstance(gates, Mapping):
            raise BundleRefused(f"{_DESCRIPTION}: promotion {item!r:.120} is malformed")
        signed = Signed(_read(statements / f"promotion-{number}.json"))
        found.append(Promoted(endpoint, epoch, {g: str(s) for g, s in gates.items()}, signed))
    return tuple(found)
