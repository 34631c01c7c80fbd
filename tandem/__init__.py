"""Tandem: disaggregated LLM serving. Prefill and decode share one engine; the KV cache is what passes between them."""

from tandem.core.openmp import quieten

quieten()

__version__ = "0.1.0"
