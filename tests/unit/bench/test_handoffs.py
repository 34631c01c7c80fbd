"""Figures of a hand-off, read from a request's timeline."""

from typing import Any

from bench.handoffs import HandedOver, Measured, handed_over, rows_of


def stage(name: str, start_s: float, duration_s: float, num_bytes: int = 0) -> dict[str, Any]:
    return {"name": name, "start_s": start_s, "duration_s": duration_s, "attributes": {"num_bytes": num_bytes}}


def test_what_ends_after_the_last_chunk_is_exposed() -> None:
    stages = [
        stage("queued", 0.0, 1.0),
        stage("prefill chunk", 1.0, 2.0),
        stage("transfer", 2.0, 1.5, num_bytes=100),
        stage("prefill chunk", 3.0, 2.0),
        stage("transfer", 3.5, 2.0, num_bytes=10),
        stage("transfer", 4.5, 1.25, num_bytes=1),
    ]
    assert handed_over(stages) == HandedOver(num_bytes=111, prefill_s=4.0, exposed_s=0.75, exposed_bytes=11)


def test_rows_are_medians_in_their_units() -> None:
    samples = [HandedOver(2e6, 2.0, exposed_s, 1e6) for exposed_s in (0.5, 0.1, 0.2)]
    rows = {row.metric: (row.value, row.unit) for row in rows_of("latents", [Measured("512 tokens", samples, 0.0)])}
    assert rows == {
        "moved": (2.0, "MB"),
        "of them after the last chunk": (1.0, "MB"),
        "exposed": (200.0, "ms"),
        "exposed, share of prefill": (10.0, "%"),
    }
    (row,) = rows_of("latents", [Measured("512 tokens", samples, 0.0, is_burst=True)])
    assert (row.metric, row.value, row.unit) == ("moved by all", 6.0, "MB")
