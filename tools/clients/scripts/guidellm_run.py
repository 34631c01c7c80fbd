"""`guidellm run`: synthetic chats and completions from the local tokenizer; its report has no errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.clients.checks import Checks, equal, holds

NUM_REQUESTS, NUM_TOKENS = 8, 16


def run(checks: Checks, path: str) -> dict[str, Any]:
    """Run it as its users do; the metrics of its one benchmark."""
    output = checks.work / f"{path.rpartition('/')[2]}.json"
    command = [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={checks.url},model={checks.model},request_format={path}"]
    command += ["--tokenizer", f"kind=hf_auto,model={checks.checkpoint.resolve()}", "--seed", "kind=static,value=1"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    subprocess.run([*command, "--output", f"kind=json,path={output}"], check=True, timeout=240)
    (benchmark,) = json.loads(output.read_text())["benchmarks"]
    metrics: dict[str, Any] = benchmark["metrics"]
    return metrics


def main() -> None:
    checks = Checks.from_arguments()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        with checks.that(f"{path}: TTFT, ITL, no errors"):
            metrics = run(checks, path)
            totals = metrics["request_totals"]
            equal((totals["successful"], totals["errored"], totals["incomplete"]), (NUM_REQUESTS, 0, 0))
            equal(metrics["output_token_count"]["successful"]["mean"], float(NUM_TOKENS))
            for name in ("time_to_first_token_ms", "inter_token_latency_ms"):
                mean = metrics[name]["successful"]["mean"]
                holds(mean > 0, name)
                checks.notes[f"{path}: {name}"] = f"{mean:.1f}"
    checks.finish(["guidellm"])


if __name__ == "__main__":
    main()
