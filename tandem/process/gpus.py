"""Divides a machine's GPUs between workers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuShare:
    """One worker's share of the GPUs: its device, and the part of that GPU's memory for weights and KV (0 to 1)."""

    device: str
    memory: float


def share_gpus(device: str, num_gpus: int, num_workers: int, memory: float) -> list[GpuShare]:
    """Assigns GPUs to workers in turn; workers on the same GPU get equal parts of its `memory`.

    Args:
        device: "auto" or "cuda": all of them; "cuda:N": that one. Others have no GPU, so no worker gets one.
        memory: share of a GPU that all its workers may take together.
    """
    if device in ("auto", "cuda"):
        devices = [f"cuda:{index % num_gpus}" for index in range(num_workers)] if num_gpus else []
    else:
        devices = [device] * num_workers if device.startswith("cuda:") else []
    return [GpuShare(each, memory / devices.count(each)) for each in devices]
