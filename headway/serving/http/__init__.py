"""The server's HTTP side: the Open Inference Protocol v2, labels, metrics and what limits each of them."""
