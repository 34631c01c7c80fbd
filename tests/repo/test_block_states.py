"""docs/disaggregation.md names every state that a block is counted in."""

import re
from pathlib import Path

from tandem.worker.reports import BLOCK_STATES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "disaggregation.md").read_text()


def test_every_state_of_a_block_is_in_the_document() -> None:
    found = re.search(r'tandem_kv_blocks\{state="([a-z|]+)"\}', DOCUMENT)
    assert found is not None
    assert tuple(found[1].split("|")) == BLOCK_STATES
