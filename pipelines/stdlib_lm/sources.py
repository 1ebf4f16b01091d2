"""The source files of the running interpreter's standard library, as documents with their licence.

Folders named `test` and `tests` are left out: distributions of Python often come without them, so that what is learned
would depend on how the interpreter was packaged; and they hold the same scaffolding many times over, files in strange
encodings and generated data. `idle_test` is IDLE's folder of the same kind. Installed packages are no part of the
library and carry licences of their own.

The library is distributed under the PSF licence, version 2. Some of its files also carry the notice of whoever wrote
them first (`xmlrpc/client.py`, `_pydecimal.py`): the notice goes wherever the file goes, so these are told apart.
"""

from collections.abc import Mapping

import pyarrow as pa

from headway.datasets.arrow import compute as pc

LICENCE = "PSF-2.0"
LICENCE_WITH_NOTICE = "PSF-2.0 and the file's own notice"
_OWN_NOTICE = r"(?i)permission to use, copy, modify|redistribution and use in source|licensed to psf under"


def canonical_modules(raw: pa.Table, lookups: Mapping[str, pa.Table]) -> pa.Table:
    """One row per file, in the order of `raw`, with the licence under which it may be learned from."""
    own = pc.match_substring_regex(raw["content"], _OWN_NOTICE)
    return raw.append_column("licence", pc.if_else(own, LICENCE_WITH_NOTICE, LICENCE))
