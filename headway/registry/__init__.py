"""What decides that a model may serve: keys, signed statements, metrics, gates, evidence, promotion, offline bundles.

Registration is not promotion. A version is judged by the gates of its policy; each verdict is a signed statement bound
to the digest of the artifact's manifest; only a complete, fresh and verifying set of passing statements promotes.
"""
