"""The host tier: blocks copied to page-locked memory and back must come back whole; and at which rate they do."""

import statistics

import psutil
import torch

from bench.gpu.floors import wall_s
from bench.gpu.results import Check, SectionResults
from bench.gpu.setting import Setting
from bench.report import Row
from tandem.architecture.state import KVSpec
from tandem.compute.arena import Arena
from tandem.kvcache.spec import build_layout
from tandem.kvcache.tiers import HostRead
from tandem.worker.host_tier import HostPages

NUM_LAYERS = 36
HOST_BYTES = 5 << 30  # NOTE: not a power of two, so that rounding up to one would show


@torch.inference_mode()
def run(setting: Setting, results: SectionResults) -> None:
    """Out and back, in random order, while the device computes."""
    layout = build_layout([KVSpec(8, 128, "bfloat16")] * setting.pick(NUM_LAYERS, 1), 16)
    num_blocks = setting.pick(1024, 8)
    arena = Arena(layout, num_blocks, setting.device)
    arena.pages.random_(0, 255)
    before = arena.pages.clone()
    resident = psutil.Process().memory_info().rss
    pages = HostPages(arena.pages.unsqueeze(0), setting.pick(HOST_BYTES, 1 << 20))
    grown = psutil.Process().memory_info().rss - resident
    results.note(
        f"{pages.num_slots} slots of {pages.page_bytes} bytes; resident memory grew by {grown / 2**30:.2f} GiB"
    )
    count = min(num_blocks - 1, pages.num_slots)
    slots = torch.randperm(count, generator=torch.Generator().manual_seed(1)).tolist()
    pairs = list(zip(range(1, count + 1), slots, strict=True))
    pages.store(pairs)
    arena.pages.zero_()
    reads = [HostRead(0, index, (block,), (slot,)) for index, (block, slot) in enumerate(pairs)]
    pages.load(reads)
    same = torch.equal(arena.pages[1 : count + 1], before[1 : count + 1])
    is_locked = not arena.pages.is_cuda or pages._pages.is_pinned()
    detail = f"{'whole' if same else 'DIFFERENT'}, {'page-locked' if is_locked else 'NOT page-locked'}"
    results.check(Check("host tier", f"{count} blocks of {pages.page_bytes} bytes", same and is_locked, detail))
    for name, call in {"store": lambda: pages.store(pairs), "load": lambda: pages.load(reads)}.items():
        seconds = statistics.median(wall_s(call, setting.device, 5))
        results.row(Row("host tier", "tandem", name, count * pages.page_bytes / seconds / 1e9, "GB/s"))
