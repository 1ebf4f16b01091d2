"""Finds the version that a person means: `model@version`, a number, or the start of a manifest digest."""

import re

from headway.catalog.registry_facts import ModelVersion
from headway.errors import HeadwayError
from headway.registry.card import standing
from headway.services import Services


class UnclearVersion(HeadwayError):
    """A text that names no version, or more than one."""


_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_BARE = re.compile(r"[1-9][0-9]{0,4}")
_LIST = "`headway models list` shows what there is"


def find_version(services: Services, reference: str, model_id: str | None = None) -> ModelVersion:
    """Return the version that `reference` names.

    A number alone is a version of `model_id`, or of the only model there is; without `model_id`, more than five digits
    are the start of a digest.

    Raises:
        UnclearVersion: it names none, or several.
        UnknownModel: the model has no such version.
    """
    catalog, principal = services.catalog, services.principal
    remedy = f"write model@version or the first characters of a manifest digest; {_LIST}"
    model, at, number = reference.rpartition("@")
    if at:
        if _NUMBER.fullmatch(number) is None:
            raise UnclearVersion(f"{reference!r:.80} names no version: versions are numbered from 1", remedy)
        return catalog.model_version(principal, model, int(number))
    if model_id is not None and _NUMBER.fullmatch(reference):
        return catalog.model_version(principal, model_id, int(reference))
    if model_id is None and _BARE.fullmatch(reference):
        models = [found.model_id for found in catalog.models(principal)]
        if len(models) == 1:
            return catalog.model_version(principal, models[0], int(reference))
        raise UnclearVersion(f"{reference!r} is a version of {len(models)} models", f"name the model; {_LIST}")
    digits = reference.removeprefix("sha256:")
    versions = services.catalog.model_versions(services.principal, model_id)
    found = [v for v in versions if digits and v.manifest_digest.startswith(f"sha256:{digits}")]
    if not found:
        raise UnclearVersion(f"{reference!r:.80} names no version", remedy)
    if len(found) > 1:
        names = ", ".join(f"{v.model_id}@{v.version}" for v in found[:5])
        raise UnclearVersion(f"{reference!r} names {len(found)} versions ({names})", remedy)
    return found[0]


def newest_eligible(services: Services, model_id: str) -> ModelVersion:
    """Return the version of the latest `as_of`, the last registered of them, that every gate of the policy passed.

    Raises:
        UnclearVersion: there is no version, or none that is eligible.
    """
    versions = services.catalog.model_versions(services.principal, model_id)
    if not versions:
        raise UnclearVersion(f"model {model_id!r} has no version", _LIST)
    ordered = sorted(versions, key=lambda v: (v.facts.as_of, v.version), reverse=True)
    for version in ordered:
        if standing(services, version) == "eligible":
            return version
    last = ordered[0]
    raise UnclearVersion(
        f"no version of {model_id!r} is eligible; {model_id}@{last.version} is {standing(services, last)}",
        f"`headway models show {model_id}@{last.version}` shows what each gate said",
    )
