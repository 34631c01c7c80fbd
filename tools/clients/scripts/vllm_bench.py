"""Requests of `vllm bench serve` and its reading of answers: the functions of the installed package.

That is installed without its dependencies, several GB of CUDA, so the command itself cannot start.
"""

import asyncio
import importlib.metadata
import importlib.util
from types import ModuleType
from typing import Any

import aiohttp

from tools.clients.checks import Checks, equal, holds

NUM_TOKENS = 16
QUESTION = "What does os.path.join do?"
KINDS = {
    "openai": ("async_request_openai_completions", "/v1/completions"),
    "openai-chat": ("async_request_openai_chat_completions", "/v1/chat/completions"),
}


def request_functions() -> ModuleType:
    """The module, without its package, whose import wants torch."""
    path = importlib.metadata.distribution("vllm").locate_file("vllm/benchmarks/lib/endpoint_request_func.py")
    spec = importlib.util.spec_from_file_location("endpoint_request_func", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def ask(module: ModuleType, checks: Checks, name: str, path: str, **more: Any) -> Any:
    """One request, as the benchmark makes it; its output."""
    asked = module.RequestFuncInput(
        prompt=QUESTION,
        api_url=f"{checks.url}{path}",
        prompt_len=8,
        output_len=NUM_TOKENS,
        model=checks.model,
        ignore_eos=True,
        **more,
    )
    async with aiohttp.ClientSession() as session:
        return await getattr(module, name)(asked, session)


def main() -> None:
    checks = Checks.from_arguments()
    module = request_functions()
    for backend, (name, path) in KINDS.items():
        for more in ({}, {"extra_body": {"temperature": 0.0, "top_p": 0.9, "top_k": 5}, "request_id": f"{backend}-0"}):
            with checks.that(f"--backend {backend}{' with sampling' if more else ''}: TTFT, ITL, token counts"):
                output = asyncio.run(ask(module, checks, name, path, **more))
                equal((output.success, output.error), (True, ""))
                equal(output.output_tokens, NUM_TOKENS)
                holds(output.prompt_len > 0, "prompt tokens")
                holds(output.ttft > 0, "a time to the first token")
                holds(output.itl and output.generated_text, "times between tokens, and text")
    checks.finish(["vllm"])


if __name__ == "__main__":
    main()
