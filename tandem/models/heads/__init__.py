"""Draft heads in memory: small networks that guess further tokens from a model's hidden states, for speculation."""
