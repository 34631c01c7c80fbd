"""The header adds stages of one name up, and never holds what a header may not."""

from tandem.core.timeline import Stage
from tandem.gateway.server_timing import MAX_STAGES, server_timing


def test_stages_of_one_name_are_added_up_in_order() -> None:
    stages = [Stage("queue", "d", 1, 0.001), Stage("prefill chunk", "p", 2, 0.25), Stage("prefill chunk", "p", 3, 0.5)]
    assert server_timing(stages) == "queue;dur=1.000, prefill_chunk;dur=750.000"


def test_names_from_elsewhere_stay_tokens_and_few() -> None:
    stages = [Stage(f'x{number}"\r\n,;=', "d", 1, 0.0) for number in range(100)]
    value = server_timing(stages)
    assert value.count("dur=") == MAX_STAGES
    assert value.startswith("x0_;dur=0.000, x1_")
