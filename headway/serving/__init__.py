"""The inference path: requests in, features as of their observation, scores, recorded answers, and why each came out.

Everything here computes features by the plan that made the snapshots; scoring runs in a process of the trainer.
"""
