"""Runs declared drift cases: a reference sample, a current sample, and the verdict that a person expects.

A file is {"kind": "drift", "policy"?: {...}, "cases": [...]}. A case is {"name", "reference": {column: [values]},
"current": {column: [values]}} with, where they are known, "entity" and "times" as {"reference": [...], "current":
[...]} (or the name of a column that holds them), "policy" (over the file's), "stale" and "skipped" ({view or source:
share of rows}), "feature_set_version" ({"reference": n, "current": n}), "before" ({column: [values]}: the last window
before the current one without an incident). Times are ISO 8601 text or integer
microseconds UTC. Each case's reference is calibrated by itself.

"expected" may hold "verdict", "incidents" (a list of "kind", "kind:feature" or objects with these fields: exactly these
and no others are to be found) and "features" ({name: a verdict or reason, or an object}). Without it a case is answered
and not compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from headway.features.cases import CaseFileError, agrees, field, finite, no_number
from headway.monitoring.calibrate import calibrate
from headway.monitoring.drift import DriftPolicy, PolicyRefused, WindowVerdict, judge_window
from headway.monitoring.reference import Column, Ints, Reference, Window, column_of, reference_of

Case = dict[str, Any]

_EXPECTED = {"verdict": str, "incidents": list, "features": dict}
# Years 1 to 9999, so that the span of any two fits into 64 bits.
_FIRST, _LAST = -62_135_596_800_000_000, 253_402_300_799_999_999


def run_cases(path: Path) -> list[Case]:
    """Judge every case of a file.

    Each answer is {"name", "verdict", "expected", "agree", "judgement"}; `agree` is None where nothing is expected.

    Raises:
        CaseFileError: not JSON, another kind, a missing or wrongly typed field.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"), parse_constant=no_number, parse_float=finite)
    except (OSError, ValueError) as error:
        raise CaseFileError(f"{path}: cannot be read as JSON: {error}") from error
    where = str(path)
    kind = field(document, "kind", where, str)
    if kind != "drift":
        raise CaseFileError(f"{path}: unknown kind {kind!r}", "use drift")
    policy = _policy(document, where, DriftPolicy())
    cases = field(document, "cases", where, list)
    # Everything is read before anything is judged: a fault in the last case is told at once.
    read = [_read(case, f"{path}: case {i}", policy) for i, case in enumerate(cases)]
    return [_answer(*one) for one in read]


def _read(
    case: object, where: str, policy: DriftPolicy
) -> tuple[str, Reference, Window, Window | None, DriftPolicy, Case]:
    name = field(case, "name", where, str)
    where = f"{where} ({name})"
    assert isinstance(case, dict)
    sides = {side: dict(field(case, side, where, dict)) for side in ("reference", "current")}
    entity, times = (_beside(case, what, sides, where) for what in ("entity", "times"))
    versions = field(case, "feature_set_version", where, dict) if "feature_set_version" in case else {}
    windows = {
        side: _window(values, entity.get(side), times.get(side), f"{where}, {side}") for side, values in sides.items()
    }
    reference = replace(reference_of(windows["reference"]), feature_set_version=versions.get("reference"))
    current = replace(
        windows["current"],
        stale=_shares(case, "stale", where),
        skipped=_shares(case, "skipped", where),
        feature_set_version=versions.get("current"),
    )
    expected = _expected(case, where)
    before = _window(field(case, "before", where, dict), None, None, f"{where}, before") if "before" in case else None
    return name, reference, current, before, _policy(case, where, policy), expected


def _expected(case: Case, where: str) -> Case:
    """What a case expects. Raises `CaseFileError` where nothing of it would be compared: it would always agree."""
    if "expected" not in case:
        return {}
    expected = field(case, "expected", where, dict)
    for name in _EXPECTED.keys() & expected.keys():
        field(expected, name, f"{where}, expected", _EXPECTED[name])
    if expected and not _EXPECTED.keys() & expected.keys():
        raise CaseFileError(f"{where}: expected holds only {sorted(expected)}", f"compared are {sorted(_EXPECTED)}")
    return expected


def _answer(
    name: str, reference: Reference, current: Window, before: Window | None, policy: DriftPolicy, expected: Case
) -> Case:
    if policy.minimum <= current.rows and reference.sample.rows:
        span = None if current.times is None else int(current.times.max() - current.times.min()) + 1
        calibration = calibrate(reference, policy.psi, policy.distance, [current.rows], span=span, days=policy.days)
        reference = replace(reference, calibration=calibration)
    judged = judge_window(reference, current, policy, before)
    return {
        "name": name,
        "verdict": judged.verdict,
        "expected": expected or None,
        "agree": _agree(judged, expected) if expected else None,
        "judgement": verdict_json(judged),
    }


def verdict_json(verdict: WindowVerdict) -> Case:
    """A verdict as JSON."""
    return json.loads(json.dumps(asdict(verdict)))


def _agree(judged: WindowVerdict, expected: Case) -> bool:
    if "verdict" in expected and judged.verdict != expected["verdict"]:
        return False
    if "incidents" in expected:
        found = [{"kind": i.kind, "feature": i.feature} for i in judged.incidents]
        wanted = expected["incidents"]
        if not all(any(_same_incident(w, f) for f in found) for w in wanted):
            return False
        if not all(any(_same_incident(w, f) for w in wanted) for f in found):
            return False
    features = {f.name: asdict(f) for f in judged.features if not f.segment}
    return all(
        name in features and _same_feature(w, features[name]) for name, w in expected.get("features", {}).items()
    )


def _same_incident(wanted: object, found: Mapping[str, str]) -> bool:
    if isinstance(wanted, str):
        return wanted in (found["kind"], f"{found['kind']}:{found['feature']}")
    return agrees(wanted, found)


def _same_feature(wanted: object, found: Mapping[str, Any]) -> bool:
    return wanted in (found["verdict"], found["reason"]) if isinstance(wanted, str) else agrees(wanted, found)


def _policy(record: Case, where: str, base: DriftPolicy) -> DriftPolicy:
    given = field(record, "policy", where, dict) if "policy" in record else {}
    known = [f.name for f in fields(DriftPolicy)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise CaseFileError(f"{where}: policy has unknown fields {unknown}", f"known are {known}")
    try:
        return replace(base, **given)
    except PolicyRefused as error:
        raise CaseFileError(f"{where}: {error}") from error


def _beside(case: Case, what: str, sides: Mapping[str, Case], where: str) -> dict[str, list[Any]]:
    """Entities or times of both sides: listed, or a column that then is no feature."""
    given = case.get(what)
    if given is None:
        return {}
    if isinstance(given, str):
        if any(given not in values for values in sides.values()):
            raise CaseFileError(f"{where}: {what} names column {given!r}, which a side lacks")
        return {side: values.pop(given) for side, values in sides.items()}
    if not isinstance(given, dict) or not set(given) <= set(sides):
        raise CaseFileError(f"{where}: {what} is {given!r:.80}", 'write {"reference": [...], "current": [...]}')
    return {side: field(given, side, f"{where}, {what}", list) for side in given}


def _shares(case: Case, what: str, where: str) -> dict[str, float]:
    given = field(case, what, where, dict) if what in case else {}
    for name, share in given.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise CaseFileError(f"{where}: {what} of {name!r} is {share!r}, needed is a share from 0 to 1")
    return {name: float(share) for name, share in given.items()}


def _window(columns: Case, entity: list[Any] | None, times: list[Any] | None, where: str) -> Window:
    made: dict[str, Column] = {}
    for name, values in columns.items():
        if not isinstance(values, list):
            raise CaseFileError(f"{where}: column {name!r} is a {type(values).__name__}, needed is a list of values")
        if any(isinstance(v, dict | list) for v in values):
            raise CaseFileError(f"{where}: column {name!r} holds lists or objects, needed are plain values")
        made[name] = column_of(values, f"{where}, {name}")
    rows = max((len(c) for c in made.values()), default=0)
    for what, listed in (("entity", entity), ("times", times)):
        if listed is not None and len(listed) != rows:
            raise CaseFileError(f"{where}: {what} has {len(listed)} entries for {rows} rows")
    return Window(
        made,
        None if entity is None else np.array([json.dumps(e, sort_keys=True) for e in entity], np.str_),
        None if times is None else _times(times, where),
    )


def _times(values: Sequence[Any], where: str) -> Ints:
    found: list[int] = []
    for value in values:
        if isinstance(value, int) and not isinstance(value, bool):
            found.append(value)
            continue
        try:
            moment = datetime.fromisoformat(str(value))
            if moment.tzinfo is None:
                raise ValueError("it has no offset")
        except ValueError as error:
            raise CaseFileError(
                f"{where}: time {value!r:.60}: {error}", "write ISO 8601 with offset, or microseconds UTC"
            ) from error
        found.append(round(moment.timestamp() * 1_000_000))
    outside = next((moment for moment in found if not _FIRST <= moment <= _LAST), None)
    if outside is not None:
        raise CaseFileError(f"{where}: time {outside} is outside the years 1 to 9999", "write microseconds UTC")
    return np.array(found, np.int64)
