"""Catalogue of clients: what each needs installed, and what it shows. Nothing else knows their names."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Args:
        group: names its requirements, `GROUP.txt` beside this file, and its virtual environment; groups are shared.
        script: module under `scripts`.
        variables: of its environment.
    """

    name: str
    group: str
    script: str
    shows: str
    variables: Mapping[str, str] = field(default_factory=dict)


_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}

CLIENTS = (
    Client("openai", "sdk", "openai_sdk", "chat, completions, responses, streams, parse, tools, models, errors"),
    Client("anthropic", "sdk", "anthropic_sdk", "messages, streams, count_tokens, tools, tool runner, cache, errors"),
    Client("open-webui", "sdk", "open_webui", "its requests: models, chats, titles, tools"),
    Client("langchain-openai", "langchain", "langchain_openai_chat", "invoke, stream, usage, tools, structured output"),
    Client("langchain-anthropic", "langchain", "langchain_anthropic_chat", "the same over Anthropic's API"),
    Client(
        "litellm",
        "litellm",
        "litellm_routes",
        "openai/, hosted_vllm/, anthropic/: whole, streamed, tools",
        {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Client("lm-eval", "lm_eval", "lm_eval_completions", "loglikelihoods equal to the engine's, generation", _OFFLINE),
    Client("vllm bench serve", "vllm", "vllm_bench", "its request functions over completions and chat"),
    # NOTE: told that it is offline, aiperf takes a local directory for a name on the hub.
    Client("aiperf", "aiperf", "aiperf_profile", "profiles of four endpoints, streamed"),
    Client("guidellm", "guidellm", "guidellm_run", "synthetic benchmarks of three endpoints", _OFFLINE),
)
