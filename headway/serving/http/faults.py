"""The error table: what a refused request is answered with.

Every error has the body `{"error": text, "code": slug, "retry": bool}`, and where they are known `field`, `id` (of the
request), `prediction_ids` and `parameters` (of the version that would have answered). What may be repeated later says
when in `Retry-After`, with jitter, so that callers refused together do not come back together.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headway.catalog.errors import CatalogUnavailable
from headway.features.online.store import OnlineNotReady
from headway.features.online.store import OnlineUnavailable as StoreUnavailable
from headway.serving.live.types import (
    DeadlineExceeded,
    FeaturesUnavailable,
    LogFull,
    NotReady,
    OnlineUnavailable,
    QueueFull,
    Retryable,
    ScoringFailed,
    UnknownModel,
    VersionNotServed,
)
from headway.serving.requests import RequestsRefused
from headway.serving.scoring import ContractNotMet

if TYPE_CHECKING:
    from headway.errors import HeadwayError

INTERNAL = "internal"

# What a code means for people; docs/serving.md and /openapi.json carry it.
MEANINGS: Mapping[str, tuple[int, bool, str]] = {
    "bad_json": (400, False, "the body is no JSON document, or one that two readers could read differently"),
    "bad_request": (400, False, "the body, a header or a parameter breaks the protocol"),
    "contract_violation": (400, False, "a field is missing, unknown or not as declared"),
    "unknown_path": (404, False, "there is no such path"),
    "unknown_model": (404, False, "no endpoint of this server has that name"),
    "version_not_served": (404, False, "the endpoint serves another version"),
    "method_not_allowed": (405, False, "the path takes another method; see Allow"),
    "slow_body": (408, True, "the body did not arrive in time"),
    "key_in_use": (409, True, "a request with this Idempotency-Key is being answered"),
    "body_too_large": (413, False, "more bytes, values or nesting than the server takes"),
    "too_many_rows": (413, False, "more rows than the pipeline declares for one request"),
    "unsupported_type": (415, False, "the content type is not one that is read here"),
    "unsupported_encoding": (415, False, "the content encoding is not one that is read here"),
    "key_reused": (422, False, "the Idempotency-Key came before with another body"),
    "features_unavailable": (424, True, "features that the pipeline requires are missing or too old"),
    "contract_not_met": (424, True, "a feature that the model needs has no value"),
    "internal": (500, False, "a fault of the server; its log has the cause under the request's id"),
    "model_refused": (500, False, "the model does not take this request's features"),
    "model_died": (500, False, "the model's process ended while it worked on this request"),
    "wrong_row_count": (500, False, "the model answered another number of rows than it was asked"),
    "not_finite": (500, False, "the model's answer is no finite number"),
    "feature_code": (500, False, "a feature function of the pipeline failed on this request"),
    "overloaded": (503, True, "more requests are in flight than the server takes"),
    "queue_full": (503, True, "more rows wait than can be answered in time"),
    "not_ready": (503, True, "nothing can answer yet"),
    "draining": (503, True, "the server is stopping"),
    "log_full": (503, True, "the inference log takes no record, and the pipeline declares must_log"),
    "online_unavailable": (503, True, "the online store does not answer"),
    "online_not_ready": (503, True, "the online store was not filled for these features yet"),
    "catalog_unavailable": (503, True, "the catalog does not answer, and this needs it"),
    "deadline_exceeded": (504, True, "the request's time was spent before an answer"),
}


class Fault(Exception):
    """One refusal on its way to the caller: a code of `MEANINGS`, and the text that says what is wrong."""

    def __init__(
        self,
        code: str,
        text: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        prediction_ids: tuple[str, ...] = (),
    ) -> None:
        super().__init__(text)
        self.status, self.retry, _ = MEANINGS[code]
        self.code = code
        self.text = text
        self.field = field
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})
        self.prediction_ids = prediction_ids


_CODES: Mapping[type[HeadwayError], str] = {
    UnknownModel: "unknown_model",
    VersionNotServed: "version_not_served",
    QueueFull: "queue_full",
    LogFull: "log_full",
    OnlineUnavailable: "online_unavailable",
    StoreUnavailable: "online_unavailable",
    OnlineNotReady: "online_not_ready",
    FeaturesUnavailable: "features_unavailable",
    ContractNotMet: "contract_not_met",
    DeadlineExceeded: "deadline_exceeded",
    CatalogUnavailable: "catalog_unavailable",
}


def fault_of(error: HeadwayError) -> Fault | None:
    """What a refusal of the engine or the labels' desk means to a caller; None: it is none of theirs."""
    if isinstance(error, RequestsRefused):
        return Fault("contract_violation", str(error), field=error.problems[0].field or None)
    if isinstance(error, NotReady):
        code = "draining" if error.reason == "draining" else "not_ready"
        return Fault(code, str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, ScoringFailed):
        code = error.code if error.code in MEANINGS else INTERNAL
        return Fault(code, str(error), prediction_ids=error.prediction_ids)
    code = next((c for kind, c in _CODES.items() if isinstance(error, kind)), None)
    if code is None:
        return None
    after = error.retry_after_s if isinstance(error, Retryable) else None
    return Fault(code, str(error), retry_after_s=after)


def retry_after(seconds: float | None) -> str:
    """Whole seconds for `Retry-After`: at least as long as said, up to half longer and never alike for all."""
    least = max(1, math.ceil(seconds or 1.0))
    return str(least + random.randint(0, max(1, least // 2)))
