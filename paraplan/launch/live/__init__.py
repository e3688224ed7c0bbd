"""What a launcher answers to commands about its job while that runs."""
