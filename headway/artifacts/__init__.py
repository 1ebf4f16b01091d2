"""Content-addressed artifacts: every stored byte is named by its digest, never by a path or URL."""

from headway.artifacts.store import Blob, LocalStore

__all__ = ["Blob", "LocalStore"]
