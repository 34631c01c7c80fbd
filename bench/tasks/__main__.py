"""Quality of formats by `lm-eval`: one multiple-choice task, the default model, Tandem over HTTP beside `transformers`.

The task is 100 sentences about common knowledge, each with four ways to end it (`facts.jsonl`, written for this
bench). `lm-eval` runs in an environment of its own: with `transformers` in its process, and over `/v1/completions` of a
gateway before one prefill and one decode worker. Weights are those of one GGUF file: as codes, decoded to floats, or
rounded anew by `tandem quantize`. Nothing is timed, so other load does not matter.

Beside the share of right answers stand the share of sentences that are ended as by `transformers` in float32, and the
mean difference of the loglikelihoods of all 400 ends. Expected before the first run: in float32 the same choices and
differences near 1e-5; in bfloat16 differences as between `transformers`' own two dtypes; int4 some points fewer.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import Report, Row
from tandem.compute.native.build import default_cache_dir
from tandem.models.default_model import fetch_default_model
from tandem.models.gguf.convert import converted
from tools.clients.environment import prepare
from tools.clients.system import served

_HERE = Path(__file__).parent
_TASK = "tandem_facts"
_RUN_TIMEOUT_S = 1800
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "NO_PROXY": "*"}


@dataclass(frozen=True, slots=True)
class Ending:
    """Of one sentence: which end was written as the right one, and the loglikelihood of each in nats."""

    right: int
    scores: tuple[float, ...]

    @property
    def choice(self) -> int:
        return max(range(len(self.scores)), key=self.scores.__getitem__)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """`lm-eval` in the environment of `python`, which leaves its samples under `directory`."""

    python: Path
    directory: Path

    def transformers(self, name: str, checkpoint: Path, dtype: str) -> list[Ending]:
        return self._run(name, "hf", {"pretrained": checkpoint, "dtype": dtype})

    def tandem(self, name: str, model: Path, tokenizer: Path, arguments: Sequence[str]) -> list[Ending]:
        with served(model, self.directory / f"{name}-logs", arguments) as url:
            given = {
                "model": _served_name(url),
                "base_url": f"{url}/v1/completions",
                "tokenizer": tokenizer,
                "tokenizer_backend": "huggingface",
                "tokenized_requests": True,
                "max_length": 2048,
            }
            return self._run(name, "local-completions", given)

    def _run(self, name: str, kind: str, arguments: dict[str, Any]) -> list[Ending]:
        output = self.directory / name
        command = [
            str(self.python.parent.absolute() / "lm_eval"),
            "run",
            "--model",
            kind,
            "--batch_size",
            "4",
            "--device",
            "cpu",
        ]
        command += ["--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())]
        command += ["--tasks", _TASK, "--include_path", str(_HERE), "--output_path", str(output), "--log_samples"]
        environment = os.environ | _OFFLINE | {"OPENAI_API_KEY": "none"}
        subprocess.run(command, check=True, timeout=_RUN_TIMEOUT_S, env=environment)
        newest = max(output.rglob(f"samples_{_TASK}_*.jsonl"), key=lambda path: path.stat().st_mtime)
        samples = sorted(map(json.loads, newest.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        return [
            Ending(int(sample["target"]), tuple(float(score) for score, _ in _answers(sample))) for sample in samples
        ]


def _answers(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    return [(answers[0][0], answers[0][1]) for answers in sample["resps"]]


def _served_name(url: str) -> str:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{url}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def rows_of(system: str, found: Sequence[Ending], reference: Sequence[Ending]) -> list[Row]:
    """Shares of right ends and of the reference's choices, and the mean difference of loglikelihoods."""
    pairs = list(zip(found, reference, strict=True))
    differences = [abs(a - b) for one, other in pairs for a, b in zip(one.scores, other.scores, strict=True)]
    return [
        Row("facts", system, "right ends", statistics.mean(one.choice == one.right for one in found), "share"),
        Row("facts", system, "same choices", statistics.mean(a.choice == b.choice for a, b in pairs), "share"),
        Row("facts", system, "mean |Δ loglikelihood|", statistics.mean(differences), "nat"),
        Row("facts", system, "largest |Δ loglikelihood|", max(differences), "nat"),
    ]


def _quantised(checkpoint: Path, target: Path) -> Path:
    """The checkpoint in int4, groups of 64, by GPTQ after rotation, by `tandem quantize`; kept for another run."""
    if target.exists():
        return target
    command = [sys.executable, "-m", "tandem.cli.main", "quantize", "--model", str(checkpoint), "--format", "int4"]
    command += ["--method", "gptq", "--rotate", "--calibration-sequences", "16", "--out", str(target)]
    subprocess.run(command, check=True, timeout=_RUN_TIMEOUT_S)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("build/tasks"), help="of the environment and the files")
    directory = parser.parse_args().directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    evaluator = Evaluator(prepare("lm-eval", _HERE / "requirements.txt", directory / "lm-eval"), directory)
    gguf = fetch_default_model(default_cache_dir() / "models")
    floats = converted(gguf, default_cache_dir() / "gguf", decoded_to="float32")
    int4 = _quantised(floats, directory / "int4")
    found = {
        "transformers float32, decoded": evaluator.transformers("hf-float32", floats, "float32"),
        "transformers bfloat16, decoded": evaluator.transformers("hf-bfloat16", floats, "bfloat16"),
        "Tandem float32, codes of GGUF": evaluator.tandem("float32", gguf, floats, ["--dtype", "float32"]),
        "Tandem bfloat16, codes of GGUF": evaluator.tandem("bfloat16", gguf, floats, ["--dtype", "bfloat16"]),
        "Tandem bfloat16, int4 of its quantiser": evaluator.tandem("int4", int4, floats, ["--dtype", "bfloat16"]),
    }
    reference = next(iter(found.values()))
    rows = [row for system, ends in found.items() for row in rows_of(system, ends, reference)]
    report = Report("tasks", {"task": _TASK, "sentences": len(reference), "model": gguf.name}, rows)
    report.print()
    print(f"saved: {report.save()}")


if __name__ == "__main__":
    main()
