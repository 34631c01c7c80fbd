"""Accounting of KV blocks: pool, owners, prefix cache and host tier. No tensors here."""
