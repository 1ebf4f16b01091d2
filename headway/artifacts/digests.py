"""Digest and canonical JSON helpers; they live in `trainer.blobs`, which workers carry without the platform."""

from trainer.blobs import (
    InvalidDigest,
    Json,
    NotCanonical,
    canonical_json,
    check_digest,
    digest_bytes,
    digest_file,
    digest_json,
)

__all__ = [
    "InvalidDigest",
    "Json",
    "NotCanonical",
    "canonical_json",
    "check_digest",
    "digest_bytes",
    "digest_file",
    "digest_json",
]
