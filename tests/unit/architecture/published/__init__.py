"""The configurations of widely used checkpoints as their publishers wrote them, one module a vendor or two.

Nothing was downloaded for them: each says where a public copy was seen, or that it is from memory. Totals are counts
that the hub shows, from memory; reports of the stored tensors confirm those of Llama 3.2 3B, Qwen 2.5 7B and 72B, QwQ
32B, Qwen 3 0.6B, 32B and 30B-A3B, gpt-oss 20B and MiniMax M2.7.
"""

from tests.unit.architecture.published.checkpoint import Checkpoint
from tests.unit.architecture.published.deepseek import LATENT
from tests.unit.architecture.published.deltas import DELTA
from tests.unit.architecture.published.dense import GRANITE, GRANITE_MOE, OLMO, PHI, SMOLLM
from tests.unit.architecture.published.google import GEMMA, GEMMA_4
from tests.unit.architecture.published.hybrids import GRANITE_4, LFM2
from tests.unit.architecture.published.llama import META, SAME_ARCHITECTURE
from tests.unit.architecture.published.mistral import MISTRAL, MIXTRAL, WRAPPED
from tests.unit.architecture.published.mixtures import GLM, GPT_OSS, MINIMAX, MINIMAX_M3
from tests.unit.architecture.published.qwen import DENSE_2, DENSE_3, MIXTURES_2, MIXTURES_3
from tests.unit.architecture.published.state_spaces import FALCON_H1, JAMBA, MAMBA_2, NEMOTRON_H

CHECKPOINTS: tuple[Checkpoint, ...] = (
    *META,
    *SAME_ARCHITECTURE,
    *MISTRAL,
    *WRAPPED,
    *MIXTRAL,
    *DENSE_2,
    *MIXTURES_2,
    *DENSE_3,
    *MIXTURES_3,
    *GEMMA,
    *GEMMA_4,
    *OLMO,
    *PHI,
    *SMOLLM,
    *GRANITE,
    *GRANITE_MOE,
    *GRANITE_4,
    *LFM2,
    *JAMBA,
    *MAMBA_2,
    *NEMOTRON_H,
    *FALCON_H1,
    *DELTA,
    *LATENT,
    *GLM,
    *MINIMAX,
    *MINIMAX_M3,
    *GPT_OSS,
)
