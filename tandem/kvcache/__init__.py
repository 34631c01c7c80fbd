"""Accounting of KV blocks: block pool, block tables of requests, prefix cache and host tier. No tensors here."""
