"""Prints the search for the sizes of workers (ranks and stages) of `tandem plan`, as a table or as JSON.

Shows the cost of each size, and why it was chosen or not.
"""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.planning.group_size import GroupSize
from tandem.planning.group_size_search import CHUNK_TOKENS, STEP_TOKENS, GroupSizeFacts, GroupSizeSearch


def group_sizes_as_json(search: GroupSizeSearch) -> dict[str, Any]:
    """The search as JSON values: memory in bytes; for each size the reasons as a prefill and as a decode worker's."""
    return {
        "prefill": search.prefill.width,
        "prefill_stages": search.prefill.num_stages,
        "decode": search.decode.width,
        "decode_stages": search.decode.num_stages,
        "divide": [
            {
                **_named(each.size),
                **{name: value for name, value in asdict(each).items() if name != "size"},
                "as_prefill": search.reason(prefill=each.size),
                "as_decode": search.reason(decode=each.size),
            }
            for each in search.facts
        ],
        "refused": {str(size): reason for size, reason in search.refusals.items()},
    }


def _named(size: GroupSize) -> dict[str, int]:
    return {"width": size.width, "num_stages": size.num_stages}


def print_group_sizes(console: Console, search: GroupSizeSearch) -> None:
    """Prints a line for each size, and reasons why others are impossible."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for name in ("ranks", "weights of one", "KV of a token", "exchanges", "sent for a token"):
        table.add_column(name, justify="right", no_wrap=True)
    has_stages = any(each.size.num_stages > 1 for each in search.facts)
    if has_stages:
        table.add_column("to the next stage", justify="right", no_wrap=True)
        table.add_column("idle stages", justify="right", no_wrap=True)
    has_experts = any(each.experts is not None for each in search.facts)
    if has_experts:
        table.add_column("experts of one", justify="right", no_wrap=True)
        table.add_column("busiest rank", justify="right", no_wrap=True)
    table.add_column("as prefill worker")
    table.add_column("as decode worker")
    for each in search.facts:
        table.add_row(
            str(each.size),
            f"{each.weight_bytes / 1e9:.2f} GB",
            f"{each.kv_bytes_per_token / 1e3:.3g} KB",
            str(each.num_exchanges),
            f"{each.exchanged_bytes_per_token / 1e3:.0f} KB",
            *(_stages(each) if has_stages else ()),
            *(_experts(each) if has_experts else ()),
            search.reason(prefill=each.size),
            search.reason(decode=each.size),
        )
    console.print(table)
    if has_stages:
        console.print(
            f"Idle stages: the share of a step in which a stage waits for the others, of {CHUNK_TOKENS} tokens of a "
            f"prompt and of {STEP_TOKENS[1]} requests that decode; the times above have it.",
            soft_wrap=True,
        )
    if has_experts:
        console.print(
            f"Busiest rank: its rows of experts over the mean, in a step of {STEP_TOKENS[0]} and of {STEP_TOKENS[-1]} "
            "tokens that choose evenly; the times above assume 1.",
            soft_wrap=True,
        )
    for reason in dict.fromkeys(search.refusals.values()):
        console.print(f"not possible: {reason}", markup=False, soft_wrap=True)
    console.print()


def _stages(facts: GroupSizeFacts) -> tuple[str, str]:
    if facts.size.num_stages == 1:
        return "", ""
    stream, idle = facts.stream_bytes_per_token, facts.idle_share
    return f"{stream / 1e3:.0f} KB", f"{idle[CHUNK_TOKENS]:.0%} - {idle[STEP_TOKENS[1]]:.0%}"


def _experts(facts: GroupSizeFacts) -> tuple[str, str]:
    imbalances = (facts.expert_imbalance[STEP_TOKENS[0]], facts.expert_imbalance[STEP_TOKENS[-1]])
    return str(facts.experts), " - ".join(f"{each:.2f} x" for each in imbalances)
