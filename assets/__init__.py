"""The Dagster code location: one factory per lineage stage, each thin over `headway`."""

import warnings

# Two features that we depend on are marked beta in Dagster 1.13; these two lines name them, so that others still show.
warnings.filterwarnings("ignore", message="Parameter `backfill_policy` of function `asset`")
warnings.filterwarnings("ignore", message="Parameter `allow_nonexistent_upstream_partitions` of initializer")
