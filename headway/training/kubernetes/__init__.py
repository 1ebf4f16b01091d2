"""Training attempts as Kubernetes Jobs: one Indexed Job and one headless Service per attempt."""
