"""Features for requests that are answered at once: rows in reach are kept in a store, and the snapshots' plan runs."""

from headway.features.online.open import online_store_at, online_store_for
from headway.features.online.store import (
    OnlineBusy,
    OnlineNotReady,
    OnlineState,
    OnlineStore,
    OnlineUnavailable,
    UnsupportedOnlineStore,
)

__all__ = [
    "OnlineBusy",
    "OnlineNotReady",
    "OnlineState",
    "OnlineStore",
    "OnlineUnavailable",
    "UnsupportedOnlineStore",
    "online_store_at",
    "online_store_for",
]
