"""Dagster resources that build Headway's services for a profile."""
