"""Tandem: disaggregated LLM serving. Prefill and decode share one engine; the KV cache is what passes between them."""

import os

# NOTE: OpenMP, which PyTorch brings along, reads this once. By default its threads spin for milliseconds after every
# operation, on cores that our own threads and the gateway want; every decode step began with one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

__version__ = "0.1.0"
