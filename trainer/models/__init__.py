"""Torch modules that a pipeline's factory may build from."""
