"""A short soak of a gateway's process: every answer is as expected, and nothing is left over."""

import asyncio
from pathlib import Path

import pytest

from bench.soak import hold_idle, observed_gateway, soak

NUM_REQUESTS = 1500
MAX_FREE_BYTES = 32e6


@pytest.mark.slow
def test_mixed_traffic_leaves_no_memory_descriptors_or_compiled_grammars(tmp_path: Path) -> None:
    """Regression: after as many requests the heap kept 60 MB that were free, and every schema that was ever checked."""
    with observed_gateway(tmp_path) as observed:
        before = observed.sample(0, 0.0)
        traffic, samples, reports = asyncio.run(
            soak(observed, NUM_REQUESTS, num_parts=3, concurrency=16, every_s=0.5, most_s=300.0)
        )
        assert traffic.num_done == NUM_REQUESTS
        assert not traffic.unexpected
        assert reports[-1]["heap"]["free_bytes"] < MAX_FREE_BYTES
        assert "tandem.text.grammars.CompiledGrammar" not in reports[-1]["types"]
        assert samples[-1].num_threads < before.num_threads + 16
        _, during, after = asyncio.run(hold_idle(observed, 100))
        assert during.num_descriptors >= before.num_descriptors + 100
        assert after.num_descriptors < before.num_descriptors + 16
