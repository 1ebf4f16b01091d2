"""The engine of a running server: follows the signed pointer, answers in batches, and logs before it answers."""
