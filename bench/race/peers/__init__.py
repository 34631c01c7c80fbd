"""The other systems of the race, each in a virtual environment of its own and configured at its best.

Their scripts run where neither tandem nor its dependencies are, so nothing of those is imported here at first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.race.system import System


VLLM_DRAFTS = 5  # what its documentation names


def peers(build: Path, dtype: str = "bfloat16", *, drafting: bool = False) -> "Sequence[System]":
    """All of them, in the order of the table.

    `build`: where their environments, logs and caches go. `dtype`: what they multiply, bfloat16 or float32. `drafting`:
    vLLM also with n-gram drafts.
    """
    from bench.race.peers.openvino import OpenVino
    from bench.race.peers.transformers import Transformers
    from bench.race.peers.vllm import Vllm
    from bench.race.peers.vllm_pd import VllmPrefillDecode

    build = build.absolute()
    return [
        Vllm(build=build, dtype=dtype),
        *([Vllm("vllm-drafts", build, dtype, VLLM_DRAFTS)] if drafting else []),
        OpenVino(build=build, dtype=dtype),
        Transformers(build=build, dtype=dtype),
        VllmPrefillDecode(build=build, dtype=dtype),
    ]
