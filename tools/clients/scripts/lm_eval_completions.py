"""`lm-eval` over `local-completions`: choices, perplexity and generation; its loglikelihoods are the engine's own.

The engine computes them once more in a process without gateway, router or transfer.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from lm_eval.models.openai_completions import LocalCompletionsAPI

from tools.clients.checks import Checks, equal, holds

TASKS = "tandem_choices,tandem_perplexity,tandem_continue"
TOLERANCE = 1e-4


def model_arguments(checks: Checks, backend: str) -> dict[str, Any]:
    tokenizer = {} if backend == "remote" else {"tokenizer": str(checks.checkpoint)}
    return {
        "model": checks.model,
        "base_url": f"{checks.url}/v1/completions",
        "tokenizer_backend": backend,
        "tokenized_requests": True,
        "max_length": 4096,
        **tokenizer,
    }


def evaluate(checks: Checks, backend: str) -> dict[str, list[dict[str, Any]]]:
    """Run it as its users do; the samples it logged, by task."""
    output = checks.work / backend
    arguments = ",".join(f"{name}={value}" for name, value in model_arguments(checks, backend).items())
    command = [str(Path(sys.executable).parent / "lm_eval"), "run", "--model", "local-completions", "--batch_size", "4"]
    command += ["--model_args", arguments, "--tasks", TASKS, "--include_path", "tools/clients/lm_eval_tasks"]
    subprocess.run([*command, "--output_path", str(output), "--log_samples"], check=True, timeout=240)
    found = {}
    for task in TASKS.split(","):
        newest = max(output.rglob(f"samples_{task}_*.jsonl"), key=lambda path: path.stat().st_mtime)
        found[task] = [json.loads(line) for line in newest.read_text().splitlines()]
    return found


def requests_of(samples: list[dict[str, Any]]) -> list[tuple[str, str, float]]:
    """(context, continuation, loglikelihood) of every request of these documents."""
    found = []
    for sample in samples:
        for arguments, answers in zip(sample["arguments"].values(), sample["resps"], strict=True):
            score = answers[0]
            found.append(
                (arguments["arg_0"], arguments.get("arg_1", ""), float(score[0] if isinstance(score, list) else score))
            )
    return found


def engine_scores(checks: Checks, asked: list[tuple[list[int], int]]) -> list[float]:
    """The sums of the logprobs from a place of each prompt on, of an engine in a process of its own."""
    prompts, answers = checks.work / "prompts.jsonl", checks.work / "answers.jsonl"
    lines = [{"prompt": ids, "prompt_logprobs": 0, "max_tokens": 1, "temperature": 0} for ids, _ in asked]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [checks.engine_python, "-m", "tandem.cli.main", "generate", "--model", str(checks.checkpoint)]
    subprocess.run([*command, "--file", str(prompts), "--output", str(answers)], check=True, timeout=240)
    scores = []
    for line, (_, start) in zip(answers.read_text().splitlines(), asked, strict=True):
        entries = json.loads(line)["prompt_logprobs"]
        scores.append(sum(entry["logprob"] for entry in entries[start:]))
    return scores


def check_scores(checks: Checks, samples: dict[str, list[dict[str, Any]]]) -> None:
    encoder = LocalCompletionsAPI(**model_arguments(checks, "huggingface"))
    asked, told = [], []
    for context, continuation, score in requests_of(samples["tandem_choices"]):
        before, after = encoder._encode_pair(context, continuation)
        asked.append((before + after, len(before)))
        told.append(score)
    for text, _, score in requests_of(samples["tandem_perplexity"]):
        asked.append(([encoder.prefix_token_id, *encoder.tok_encode(text)], 1))
        told.append(score)
    wanted = engine_scores(checks, asked)
    worst = max(abs(one - other) for one, other in zip(told, wanted, strict=True))
    checks.notes |= {"num_loglikelihoods": len(told), "worst_difference": worst}
    holds(worst < TOLERANCE, f"loglikelihoods differ by {worst} from the engine's")


def main() -> None:
    checks = Checks.from_arguments()
    with checks.that("choices, perplexity and generation, token ids and echo"):
        local = evaluate(checks, "huggingface")
    with checks.that("its loglikelihoods are the engine's own"):
        check_scores(checks, local)
    with checks.that("the same with our tokenizer over HTTP"):
        remote = evaluate(checks, "remote")
        for task, samples in local.items():
            equal([sample["resps"] for sample in remote[task]], [sample["resps"] for sample in samples])
    checks.finish(["lm-eval"])


if __name__ == "__main__":
    main()
