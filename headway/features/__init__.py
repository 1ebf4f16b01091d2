"""Features: the contract, the point-in-time kernel, and the leakage proof."""
