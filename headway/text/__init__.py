"""From documents to tokens: near duplicates, the split, the tokenizer, token files, and the proof of the split."""
