"""Models: what is trained, as blocks with parameters, matmuls and saved activations."""
