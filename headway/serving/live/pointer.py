"""The signed pointer: what an endpoint serves and why, gathered from the catalog and kept on disk for its absence."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from headway.artifacts.manifest import read_manifest
from headway.catalog.encoding import encode
from headway.catalog.errors import InvalidFact
from headway.catalog.registry_documents import endpoint_of, model_version_of
from headway.catalog.registry_facts import Endpoint, ModelVersion
from headway.errors import HeadwayError
from headway.files import replace_file
from headway.registry.dsse import SignatureRefused
from headway.registry.keys import KeysRefused, Trust, trust
from headway.registry.promote import prove_served
from headway.registry.statements import Signed, open_promotion, open_rollback
from headway.registry.strict_json import JsonRefused, parse_json
from headway.services import Services
from trainer.blobs import Json, canonical_json
from trainer.spec import parse_run

FORMAT = "headway.pointer/1"


class PointerRefused(HeadwayError):
    """A stored pointer that cannot be read, or whose statements do not verify."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(f"the pointer {where}: {why}", "start the server once while the catalog answers")


@dataclass(frozen=True)
class Code:
    """The code tree of the version's run: its manifest in the store, its digest, and the folders that it covers."""

    manifest: str
    digest: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Pointer:
    """An endpoint at one epoch, the version that it serves, and the signed statements of both moves.

    `rolled_back` is None when the promotion itself is the last move. `contract_digest` and `code_digest` are those of
    the features that the version was trained on.
    """

    endpoint: Endpoint
    version: ModelVersion
    contract_digest: str
    code_digest: str
    code: Code
    promoted: Signed
    promoted_epoch: int
    gates: Mapping[str, str]
    rolled_back: Signed | None
    trust: Trust
    verified_at: int

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"{self.version.version}@epoch {self.endpoint.epoch}"


def gather(services: Services, keys: Trust, endpoint: Endpoint) -> Pointer:
    """What an endpoint serves now, its statements verified.

    Raises:
        NotPromoted: a statement does not verify, or there is none.
        StoreError: the store lacks a statement, the run's specification or the manifest of its code.
        CatalogError: the catalog does not answer.
    """
    catalog, principal = services.catalog, services.principal
    proof = prove_served(services, keys, endpoint)
    assert endpoint.stable is not None
    assert proof.promotion.evidence is not None
    version = catalog.model_version(principal, endpoint.model_id, endpoint.stable)
    trained = catalog.feature_set(principal, version.facts.feature_set, version.facts.feature_set_version)
    run = catalog.run(principal, version.run_id)
    manifest_digest = parse_run(services.store.get_bytes(run.facts.spec_digest)).model.code_manifest
    manifest = read_manifest(services.store, manifest_digest)
    parts = {"/".join(e.name.split("/")[: 2 if e.name.startswith("pipelines/") else 1]) for e in manifest.entries}
    return Pointer(
        endpoint=endpoint,
        version=version,
        contract_digest=trained.contract_digest,
        code_digest=trained.code_digest,
        code=Code(manifest_digest, str(manifest.facts["code_digest"]), tuple(sorted(parts))),
        promoted=proof.promoted,
        promoted_epoch=proof.promotion.epoch,
        gates=proof.promotion.evidence.statements,
        rolled_back=proof.rolled_back,
        trust=keys,
        verified_at=catalog.clock(),
    )


def verify(pointer: Pointer, keys: Trust) -> None:
    """Verify the statements of a pointer that was read from disk, with public keys only.

    Raises:
        PointerRefused: one does not verify for this endpoint, epoch and artifact.
    """
    endpoint, version = pointer.endpoint, pointer.version
    try:
        if (endpoint.stable, endpoint.model_id) != (version.version, version.model_id):
            raise PointerRefused(pointer.name, f"the endpoint serves {endpoint.model_id}@{endpoint.stable}")
        found = open_promotion(
            pointer.promoted,
            keys,
            version.manifest_digest,
            endpoint.endpoint_id,
            pointer.promoted_epoch,
            pointer.gates,
        )
        if (found.predicate.get("model"), found.predicate.get("version")) != (version.model_id, version.version):
            raise PointerRefused(pointer.name, "its promotion speaks of another version")
        if pointer.rolled_back is not None:
            open_rollback(
                pointer.rolled_back,
                keys,
                version.manifest_digest,
                endpoint.endpoint_id,
                endpoint.epoch,
                version.version,
            )
        elif pointer.promoted_epoch != endpoint.epoch:
            raise PointerRefused(pointer.name, f"its promotion was for epoch {pointer.promoted_epoch}")
    except SignatureRefused as error:
        raise PointerRefused(pointer.name, error.message) from error


def write_pointer(folder: Path, pointer: Pointer) -> None:
    """Keep a pointer as the endpoint's, in one durable step. Raises `OSError`."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(pointer_file(folder, pointer.endpoint.endpoint_id), canonical_json(_document(pointer)), 0o600)


def pointer_file(folder: Path, endpoint_id: str) -> Path:
    """Where an endpoint's pointer is kept; whatever its name holds, it is one file of this folder."""
    return folder / f"{quote(endpoint_id, safe='')}.json"


def read_pointer(path: Path) -> Pointer:
    """Read a kept pointer; nothing of it is verified yet.

    Raises:
        PointerRefused: the file cannot be read, or has another form.
    """
    try:
        document = cast("dict[str, Any]", parse_json(path.read_bytes()))
        if document["format"] != FORMAT:
            raise PointerRefused(path.name, f"format {document['format']!r:.60}, this code reads {FORMAT!r}")
        return Pointer(
            endpoint=endpoint_of(document["endpoint"]),
            version=model_version_of(document["version"]),
            contract_digest=document["features"]["contract_digest"],
            code_digest=document["features"]["code_digest"],
            code=Code(document["code"]["manifest"], document["code"]["digest"], tuple(document["code"]["parts"])),
            promoted=_signed(document["promoted"]),
            promoted_epoch=document["promoted"]["epoch"],
            gates=document["promoted"]["gates"],
            rolled_back=None if document["rolled_back"] is None else _signed(document["rolled_back"]),
            trust=trust(document["trust"]),
            verified_at=document["verified_at"],
        )
    except OSError as error:
        raise PointerRefused(path.name, f"{path} cannot be read ({error.strerror})") from error
    except (JsonRefused, KeysRefused, InvalidFact, KeyError, TypeError, ValueError) as error:
        raise PointerRefused(path.name, f"{path} has another form ({error!r:.200})") from error


def _document(pointer: Pointer) -> dict[str, Json]:
    promoted = {**_envelope(pointer.promoted), "epoch": pointer.promoted_epoch, "gates": dict(pointer.gates)}
    return {
        "format": FORMAT,
        "endpoint": encode(pointer.endpoint),
        "version": encode(pointer.version),
        "features": {"contract_digest": pointer.contract_digest, "code_digest": pointer.code_digest},
        "code": {"manifest": pointer.code.manifest, "digest": pointer.code.digest, "parts": list(pointer.code.parts)},
        "promoted": promoted,
        "rolled_back": None if pointer.rolled_back is None else _envelope(pointer.rolled_back),
        "trust": pointer.trust.document(),
        "verified_at": pointer.verified_at,
    }


def _envelope(signed: Signed) -> dict[str, Json]:
    return {"envelope": base64.b64encode(signed.envelope).decode("ascii"), "recorded_at": signed.recorded_at}


def _signed(document: Mapping[str, Any]) -> Signed:
    return Signed(base64.b64decode(document["envelope"], validate=True), document["recorded_at"])
