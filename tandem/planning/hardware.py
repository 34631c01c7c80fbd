"""Accelerators and links with the peak figures of their data sheets, found by name or given as text.

Rates are per second, for one accelerator or one node's link, in one direction. Prices are assumptions (rounded prices
per accelerator-hour of specialised clouds in 2025): replace them by yours.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from tandem.core.errors import ConfigurationError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One accelerator device.

    Args:
        flops: dense tensor operations per second at 16 bits, accumulated in 32 (no sparsity).
        flops_8bit: the same at 8 bits (FP8, else INT8); equal to `flops` if 8 bits are no faster.
        memory_bytes_per_s: bandwidth of its own memory.
        memory_bytes: size of its own memory, as sold (1 GB = 10^9 bytes).
        peer_bytes_per_s: bandwidth to the other accelerators of its node, one way.
        usd_per_hour: assumed price.
    """

    name: str
    flops: float
    flops_8bit: float
    memory_bytes_per_s: float
    memory_bytes: float
    peer_bytes_per_s: float
    usd_per_hour: float

    @property
    def ridge(self) -> float:
        """Arithmetic intensity (FLOP per byte) above which 16-bit work is compute-bound, below which memory-bound."""
        return self.flops / self.memory_bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """Link that carries KV from a prefill worker's node to a decode worker's.

    Args:
        bytes_per_s: line rate, one way.
        share: share of the line rate that hand-offs reach. Published: 0.71 to 0.82 over RDMA for long prompts.
        latency_ms: time of one hand-off before its first byte: handshake, descriptors.
    """

    name: str
    bytes_per_s: float
    share: float
    latency_ms: float

    @property
    def usable_bytes_per_s(self) -> float:
        """The rate that hand-offs reach."""
        return self.bytes_per_s * self.share


_T, _G = 1e12, 1e9

# Sources, all dense figures (data sheets that print sparse ones are halved):
#   h100        NVIDIA H100 data sheet, SXM5: 989 TFLOP/s, FP8 1,979, 3.35 TB/s, 80 GB, NVLink 900 GB/s both ways
#   h100-pcie   the same, PCIe: 756, FP8 1,513, 2.0 TB/s, 80 GB, PCIe 5.0 x16 128 GB/s both ways
#   h200        NVIDIA H200 data sheet, SXM: H100's compute, 4.8 TB/s, 141 GB
#   b200        NVIDIA DGX B200 data sheet / 8: 2.25 PFLOP/s, FP8 4.5, 8 TB/s, 180 GB, NVLink 1.8 TB/s both ways
#   a100        NVIDIA A100 80GB data sheet, SXM4: 312, INT8 624, 2.039 TB/s, 80 GB, NVLink 600 GB/s both ways
#   l40s        NVIDIA L40S data sheet: 362, FP8 733, 864 GB/s, 48 GB, PCIe 4.0 x16 64 GB/s both ways
#   l4          NVIDIA L4 data sheet: 121, FP8 242, 300 GB/s, 24 GB, PCIe 4.0 x16
#   mi300x      AMD MI300X data sheet: 1,307, FP8 2,615, 5.3 TB/s, 192 GB, Infinity Fabric 896 GB/s both ways
#   rtx-4090    NVIDIA Ada white paper: 165 (FP32 accumulate), FP8 330, 1,008 GB/s, 24 GB, PCIe 4.0 x16
#   cpu         no data sheet: a server of about 16 cores with wide vectors and eight memory channels; name your own
ACCELERATORS: Sequence[Accelerator] = tuple(
    Accelerator(
        name=name,
        flops=tflops * _T,
        flops_8bit=tflops_8bit * _T,
        memory_bytes_per_s=gb_per_s * _G,
        memory_bytes=gb * _G,
        peer_bytes_per_s=peer_gb_per_s * _G,
        usd_per_hour=usd,
    )
    for name, tflops, tflops_8bit, gb_per_s, gb, peer_gb_per_s, usd in (
        ("h100", 989.0, 1979.0, 3350.0, 80.0, 450.0, 2.5),
        ("h100-pcie", 756.0, 1513.0, 2000.0, 80.0, 64.0, 2.0),
        ("h200", 989.0, 1979.0, 4800.0, 141.0, 450.0, 3.5),
        ("b200", 2250.0, 4500.0, 8000.0, 180.0, 900.0, 5.0),
        ("a100", 312.0, 624.0, 2039.0, 80.0, 300.0, 1.6),
        ("l40s", 362.0, 733.0, 864.0, 48.0, 32.0, 0.9),
        ("l4", 121.0, 242.0, 300.0, 24.0, 32.0, 0.6),
        ("mi300x", 1307.0, 2615.0, 5300.0, 192.0, 448.0, 2.2),
        ("rtx-4090", 165.0, 330.0, 1008.0, 24.0, 32.0, 0.4),
        ("cpu", 2.0, 2.0, 150.0, 64.0, 20.0, 0.6),
    )
)

# Line rates: NVLink of H100, one way; InfiniBand NDR and HDR, RoCE; Ethernet with TCP, where copies cost more.
LINKS: Sequence[NetworkLink] = tuple(
    NetworkLink(name=name, bytes_per_s=gigabits / 8 * _G, share=share, latency_ms=latency_ms)
    for name, gigabits, share, latency_ms in (
        ("nvlink", 3600.0, 0.8, 0.1),
        ("rdma-400g", 400.0, 0.75, 0.3),
        ("rdma-200g", 200.0, 0.75, 0.3),
        ("rdma-100g", 100.0, 0.75, 0.3),
        ("tcp-100g", 100.0, 0.5, 0.5),
        ("tcp-25g", 25.0, 0.8, 0.5),
        ("tcp-10g", 10.0, 0.9, 0.5),
    )
)

_ACCELERATOR_KEYS = {
    "tflops": ("flops", _T),
    "tflops-8bit": ("flops_8bit", _T),
    "gb-per-s": ("memory_bytes_per_s", _G),
    "gb": ("memory_bytes", _G),
    "peer-gb-per-s": ("peer_bytes_per_s", _G),
    "usd": ("usd_per_hour", 1.0),
}
_LINK_KEYS = {"gbit-per-s": ("bytes_per_s", _G / 8), "share": ("share", 1.0), "latency-ms": ("latency_ms", 1.0)}


def find_accelerator(spec: str) -> Accelerator:
    """Returns the accelerator of a spec: a name such as `h100`, or a name with own values such as `h100,usd=1.9` or
    `cpu,tflops=1,gb-per-s=80,gb=32`.

    Raises:
        ConfigurationError: unknown accelerator or value.
    """
    return _find(spec, ACCELERATORS, _ACCELERATOR_KEYS, "hardware")


def find_link(spec: str) -> NetworkLink:
    """Returns the link of a spec: a name such as `rdma-400g`, or a name with own values such as `tcp-25g,share=0.6`.

    Raises:
        ConfigurationError: unknown link or value.
    """
    link = _find(spec, LINKS, _LINK_KEYS, "link")
    if not link.share <= 1:
        raise ConfigurationError(f"link {shown(spec)}: share={link.share:g}; no more than 1 of the line rate arrives")
    return link


_Item = TypeVar("_Item", Accelerator, NetworkLink)


def _find(spec: str, items: Sequence[_Item], keys: dict[str, tuple[str, float]], kind: str) -> _Item:
    name, *overrides = (part.strip() for part in spec.split(","))
    item = next((item for item in items if item.name == name.lower()), None)
    if item is None:
        known = ", ".join(item.name for item in items)
        raise ConfigurationError(
            f"{kind} {shown(name)} is not known; choose one of {known}, and change values as in {items[-1].name},"
            f"{next(iter(keys))}=1"
        )
    values: dict[str, Any] = dict(_override(text, keys, kind) for text in overrides)
    return replace(item, **values) if values else item


def _override(text: str, keys: dict[str, tuple[str, float]], kind: str) -> tuple[str, float]:
    key, _, value = text.partition("=")
    if key not in keys:
        raise ConfigurationError(
            f"{kind}: {shown(text)} is not understood; write KEY=NUMBER with KEY of {', '.join(keys)}"
        )
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if not 0 <= number < float("inf") or (number == 0 and key not in ("usd", "latency-ms")):
        raise ConfigurationError(f"{kind}: {shown(text)} is not above zero; write {key}=NUMBER")
    field, unit = keys[key]
    return field, number * unit
