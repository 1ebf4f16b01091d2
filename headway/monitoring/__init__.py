"""What becomes of answers: labels, quality, data incidents, drift, and the next justified training run."""
