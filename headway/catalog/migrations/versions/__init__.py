"""The revisions, in order of their number."""
