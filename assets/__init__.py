"""The Dagster code location: one factory per lineage stage, each thin over `headway`."""
