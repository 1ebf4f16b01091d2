"""From delivered files to validated, immutable dataset versions.

Read in this order: `reading` (files to canonical rows), `digest` (what names a version), `partitions` (the calendar),
`quality` (Great Expectations suites), `ingest` (one delivery to one version per partition), `rows` (what was released).
"""
