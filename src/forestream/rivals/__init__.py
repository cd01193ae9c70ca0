"""What a user would pick instead of streams, on the same engine: the same passes, cache, choice of token, counter."""
