"""`aiperf profile`: streamed chats, completions and messages; its report has TTFT and ITL, and no errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.clients.checks import Checks, equal, holds

NUM_REQUESTS, NUM_TOKENS = 8, 16


def profile(checks: Checks, endpoint: str) -> dict[str, Any]:
    """Run it as its users do; what it exported."""
    output = checks.work / endpoint
    command = [str(Path(sys.executable).parent / "aiperf"), "profile", "--model", checks.model, "--url", checks.url]
    command += ["--tokenizer", str(checks.checkpoint.resolve()), "--endpoint-type", endpoint, "--streaming"]
    command += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2", "--random-seed", "1", "--ui", "none"]
    command += ["--isl", "64", "--osl", str(NUM_TOKENS), "--artifact-dir", str(output)]
    if endpoint != "messages":
        command += ["--extra-inputs", "ignore_eos:true"]
    subprocess.run(command, check=True, timeout=240, stdout=subprocess.DEVNULL)
    exported: dict[str, Any] = json.loads((output / "profile_export_aiperf.json").read_text())
    return exported


def check_endpoint(checks: Checks, endpoint: str) -> None:
    with checks.that(f"{endpoint}, streamed: TTFT, ITL, no errors"):
        report = profile(checks, endpoint)
        equal((report["error_summary"], report["was_cancelled"]), ([], False))
        equal(report["request_count"]["avg"], float(NUM_REQUESTS))
        for name in ("time_to_first_token", "inter_token_latency"):
            holds(report[name]["avg"] > 0, name)
            checks.notes[f"{endpoint}: {name}"] = f"{report[name]['avg']:.1f} ms"
        if endpoint in ("chat", "completions"):  # NOTE: of a response that ends by its length it reads no usage
            equal(report["total_usage_completion_tokens"]["avg"], float(NUM_REQUESTS * NUM_TOKENS))


def main() -> None:
    checks = Checks.from_arguments()
    for endpoint in ("chat", "completions", "responses", "messages"):
        check_endpoint(checks, endpoint)
    with checks.that("it reads the gateway's metrics"):
        metrics = json.loads((checks.work / "chat" / "server_metrics_export.json").read_text())
        equal(metrics["summary"]["endpoints_successful"], [f"{checks.url}/metrics"])
    checks.finish(["aiperf"])


if __name__ == "__main__":
    main()
