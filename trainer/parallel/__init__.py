"""How one model is spread over ranks by its own structure: tensors, sequence, experts, stages; one norm over all."""
