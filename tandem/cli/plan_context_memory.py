"""Prints the memory of one context: bytes that each kind of layer holds, and bytes that the next token reads.

For `tandem plan --context`, as a table or as JSON.
"""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.architecture.cost import ModelCost


def context_memory_as_json(model: ModelCost, num_tokens: int) -> dict[str, Any]:
    """The memory as JSON values; sizes in bytes."""
    return {
        "model": model.name,
        "context_tokens": num_tokens,
        "kv_bits": model.kv_bits,
        "held_bytes": model.kv_bytes(num_tokens),
        "read_bytes": model.read_bytes(num_tokens),
        "layers": [asdict(line) for line in model.context_memory(num_tokens)],
    }


def print_context_memory(console: Console, model: ModelCost, num_tokens: int) -> None:
    """Prints the memory: a line for each kind of layer, and the sum."""
    console.print(f"{model.name}: a context of {num_tokens:,} tokens", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    table.add_column("what a layer keeps")
    for name in ("layers", "kept", "next token reads", "of it to choose"):
        table.add_column(name, justify="right", no_wrap=True)
    lines = model.context_memory(num_tokens)
    for line in lines:
        sizes = line.held_bytes, line.read_bytes, line.scanned_bytes
        table.add_row(line.state.replace("; ", "\n"), str(line.num_layers), *map(_size, sizes))
    scanned = sum(line.scanned_bytes for line in lines)
    totals = map(_size, (model.kv_bytes(num_tokens), model.read_bytes(num_tokens), scanned))
    table.add_row("all", str(model.num_layers), *totals)
    console.print(table)


def _size(num_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes:.0f} B"
