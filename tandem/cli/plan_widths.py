"""The search of widths for people and as JSON: what each number of ranks costs, and why it was chosen or not."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.planning.widths import STEP_TOKENS, WidthFacts, WidthSearch


def widths_as_json(search: WidthSearch) -> dict[str, Any]:
    """Sizes in bytes; of each width the reason as a prefill and as a decode worker's."""
    return {
        "prefill": search.prefill,
        "decode": search.decode,
        "divide": [
            {
                **asdict(each),
                "as_prefill": search.reason(prefill=each.width),
                "as_decode": search.reason(decode=each.width),
            }
            for each in search.facts
        ],
        "refused": {str(width): reason for width, reason in search.refusals.items()},
    }


def print_widths(console: Console, search: WidthSearch) -> None:
    """Prints a line for each width."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for name in ("ranks", "weights of one", "KV of a token", "exchanges", "sent for a token"):
        table.add_column(name, justify="right", no_wrap=True)
    has_experts = any(each.experts is not None for each in search.facts)
    if has_experts:
        table.add_column("experts of one", justify="right", no_wrap=True)
        table.add_column("busiest rank", justify="right", no_wrap=True)
    table.add_column("as prefill worker")
    table.add_column("as decode worker")
    for each in search.facts:
        table.add_row(
            str(each.width),
            f"{each.weight_bytes / 1e9:.2f} GB",
            f"{each.kv_bytes_per_token / 1e3:.3g} KB",
            str(each.num_exchanges),
            f"{each.exchanged_bytes_per_token / 1e3:.0f} KB",
            *(_experts(each) if has_experts else ()),
            search.reason(prefill=each.width),
            search.reason(decode=each.width),
        )
    console.print(table)
    if has_experts:
        console.print(
            f"Busiest rank: its rows of experts over the mean, in a step of {STEP_TOKENS[0]} and of {STEP_TOKENS[-1]} "
            "tokens that choose evenly; the times above assume 1.",
            soft_wrap=True,
        )
    for reason in search.refusals.values():
        console.print(f"not possible: {reason}", markup=False, soft_wrap=True)
    console.print()


def _experts(facts: WidthFacts) -> tuple[str, str]:
    imbalances = (facts.expert_imbalance[STEP_TOKENS[0]], facts.expert_imbalance[STEP_TOKENS[-1]])
    return str(facts.experts), " - ".join(f"{each:.2f} x" for each in imbalances)
