"""Outcome of a paired request as its gateway measured it; a router compares it with what it predicted."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """Outcome of a paired request: measured milliseconds, None for stages not reached. `pairing_id`: as in
    `RequestShape`.
    """

    request_id: str
    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    ttft_ms: float | None = None
    pairing_id: str = ""

    @property
    def key(self) -> str:
        """Id of the pairing, as `RequestShape.key`."""
        return self.pairing_id or self.request_id
