"""Benchmarks: run by hand through make, never part of the tests."""
