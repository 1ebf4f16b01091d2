"""What the artifact store refuses."""

from headway.errors import HeadwayError


class StoreError(HeadwayError):
    """Base of the store's refusals."""


class BlobMissing(StoreError):
    """No blob has this digest."""

    def __init__(self, digest: str) -> None:
        super().__init__(f"no blob {digest} in the store", "restore it from a copy or materialize its owner again")
        self.digest = digest


class BlobCorrupt(StoreError):
    """The stored bytes are not what their name says."""

    def __init__(self, digest: str, found: str) -> None:
        super().__init__(
            f"blob {digest} is corrupt: its bytes have digest {found}",
            "erase this blob, then restore it from a copy or materialize its owner again",
        )
        self.digest = digest


class StoreTampered(StoreError):
    """Something that the store never makes (a symbolic link, a device, a folder) stands where it keeps its files."""

    def __init__(self, place: str, found: str) -> None:
        super().__init__(f"{place} in the store is {found}", "remove it; the store makes only folders and plain files")
        self.place = place


class SourceRefused(StoreError):
    """A file handed over for storing is no regular file."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path} is no regular file", "hand over a plain file")
