"""New implementations of a seam are tested, documented and reachable by their settings: CONTRIBUTING.md says where."""

from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from tandem.architecture.quantisation import QUANTISED
from tandem.architecture.registry import ARCHITECTURES
from tandem.cli.up import UpCommand
from tandem.core.errors import ConfigurationError
from tandem.models.gguf import architectures as gguf
from tandem.models.gguf.file import SERVED_TYPES
from tandem.routing.policies import POLICIES
from tandem.transport.choose import AUTO, TRANSPORTS, Site, choose
from tests.contract import test_transports
from tests.helpers.checkpoints import BUILDERS, EXPERT_BUILDERS, MORE_BUILDERS
from tests.helpers.hybrid_checkpoints import RECURRENT_BUILDERS
from tests.helpers.published_formats import FORMATS, MXFP4
from tests.helpers.sparse_checkpoints import BLOCK_BUILDERS
from tests.unit.models.gguf.test_convert import SAVERS

DOCS = Path(__file__).parents[2] / "docs"
GGUF = "gguf"
WITH_OTHER_TENSORS = {  # see tests/contract/test_gguf_served.py
    *("gpt-oss", "granitehybrid", "qwen3next", "qwen35", "qwen35moe", "kimi-linear", "falcon-h1", "nemotron_h"),
    *("nemotron_h_moe", "granitemoe", "lfm2moe"),
}

NAMES = {  # by which docs/features.md lists the families
    "llama": "Llama 2/3.x",
    "mistral": "Mistral,",
    "mistral3": "Mistral Small 3",
    "ministral3": "Ministral 3",
    "mistral4": "Mistral Small 4",
    "mixtral": "Mixtral",
    **dict.fromkeys(("qwen2", "qwen3"), "Qwen 2 to 3"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), "Qwen-MoE"),
    "qwen3_next": "Qwen3-Next",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), "Qwen3.5 and 3.6 (dense and with experts"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma4"), "Gemma 2, 3 and 4"),
    **dict.fromkeys(("olmo2", "olmo3"), "Olmo 2/3"),
    "phi3": "Phi 3 to 4",
    "smollm3": "SmolLM3",
    **dict.fromkeys(("granite", "granite_moe"), "Granite 3 (with experts too)"),
    "granite_hybrid": "Granite 4",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), "DeepSeek-V2, V2-Lite, V3 and R1, Kimi-K2"),
    "deepseek_v32": "DeepSeek-V3.2",
    "deepseek_v4": "DeepSeek-V4",
    "glm4_moe": "GLM 4.5 to 4.7",
    "glm4_moe_lite": "GLM-4.7-Flash",
    "glm_moe_dsa": "GLM-5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "MiniMax-M2",
    "minimax_m3": "MiniMax-M3",
    "lfm2": "LFM2,",
    "lfm2_moe": "LFM2-MoE",
    "jamba": "Jamba",
    "kimi_linear": "Kimi-Linear",
    "mamba2": "Mamba-2",
    "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1",
    "moba": "MoBA",
    "nsa": "NSA",
}


@pytest.mark.parametrize(
    "family", sorted({entry.module.removesuffix("_conditional") for entry in ARCHITECTURES.values()})
)
def test_every_family_is_in_the_document(family: str) -> None:
    models = (DOCS / "features.md").read_text().partition("\n## Models\n")[2].partition("\n## ")[0]
    assert family in NAMES, "name the family in docs/features.md, and its name there in NAMES"
    assert NAMES[family] in models


def test_every_text_family_has_a_tiny_checkpoint_beside_transformers() -> None:
    texts = {entry.module for entry in ARCHITECTURES.values() if not entry.module.endswith("_conditional")}
    known = BUILDERS | EXPERT_BUILDERS | MORE_BUILDERS | RECURRENT_BUILDERS | BLOCK_BUILDERS
    assert texts <= known.keys(), "tests/helpers/checkpoints.py"


def test_every_gguf_architecture_is_converted_in_a_test() -> None:
    assert SAVERS.keys() | WITH_OTHER_TENSORS == gguf.ARCHITECTURES.keys()


@pytest.mark.parametrize("name", [*gguf.ARCHITECTURES, *SERVED_TYPES])
def test_what_is_read_of_gguf_files_is_in_the_document(name: str) -> None:
    assert name in (DOCS / "gguf.md").read_text()


@pytest.mark.parametrize("method", QUANTISED)
def test_every_quantised_format_is_in_the_document_and_in_a_test(method: str) -> None:
    assert f"| `{method}` |" in (DOCS / "formats.md").read_text()
    assert method in {
        GGUF,
        MXFP4["quant_method"],
        *(published.config["quant_method"] for published in FORMATS.values()),
    }


@pytest.mark.parametrize("name", POLICIES)
def test_every_routing_policy_is_in_the_document(name: str) -> None:
    assert f"`{name}`" in (DOCS / "disaggregation.md").read_text()


@pytest.mark.parametrize("name", TRANSPORTS)
def test_every_transport_is_chosen_or_refused_with_a_reason(name: str) -> None:
    assert name in reason_of(name)


def reason_of(name: str) -> str:
    """Reason why this machine's CPU memory is moved by that transport, or is not."""
    here = Site.here("cpu")
    try:
        return str(choose(here, here, name))
    except ConfigurationError as error:
        return str(error)


def test_every_transport_is_in_the_contract_suite() -> None:
    kinds = {kind.removesuffix(" over TLS") for kind in test_transports.KINDS}
    assert kinds == set(TRANSPORTS)


def test_tandem_up_offers_every_transport_between_processes() -> None:
    annotation = UpCommand.model_fields["transport"].annotation
    assert get_origin(annotation) is Literal
    assert set(get_args(annotation)) == {AUTO, *TRANSPORTS} - {"inproc"}
