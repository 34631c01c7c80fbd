"""`python -m bench.gpu [--section checks,decode,…] [--model …] [--out DIR] [--dry-run]`: see docs/gpu.md.

    python -m bench.gpu --merge DIR [--save]     what a machine with a GPU left in DIR, as one report

Exits with 0 when all went well, 1 when a check was wrong or a part failed, 2 where there is no NVIDIA GPU: then only
our Triton kernels are checked, by interpretation.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gpu.conduct import conduct
from bench.gpu.machine import describe
from bench.gpu.merge import SUMMARY, local_git_sha, merge, save, summary
from bench.gpu.results import SectionResults
from bench.gpu.sections import MODELS, SECTIONS, find, plan
from bench.gpu.setting import Setting

DEADLINE_S = 570.0
NO_GPU = (
    "bench.gpu needs an NVIDIA GPU and a CUDA build of PyTorch; nothing was measured. "
    "Our Triton kernels were checked by interpretation only"
)


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.merge is not None:
        return _report(arguments.merge, arguments.git_sha or local_git_sha(), keep=arguments.save)
    setting = Setting(arguments.dry_run, arguments.backend)
    if arguments.part is not None:
        return _run_part(setting, arguments.part, arguments.out)
    if not setting.is_dry and not torch.cuda.is_available():
        return _interpret()
    parts = plan(arguments.section, arguments.model)
    _clear(arguments.out, arguments.section)
    went_well = conduct(parts, setting, arguments.out, arguments.deadline_s)
    return max(_report(arguments.out, arguments.git_sha, keep=False), 0 if went_well else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path(os.environ.get("OUT") or "gpu-results")
    parser.add_argument("--section", type=_names(SECTIONS), default=list(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--model", type=_names(MODELS), default=[], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=out, help="folder for results; default: $OUT or gpu-results")
    parser.add_argument("--backend", default="auto", help="attention backend")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="seconds for everything")
    parser.add_argument("--git-sha", help="commit of this tree, for machines without its history")
    parser.add_argument("--dry-run", action="store_true", help="the same steps on the CPU with tiny shapes")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="only report what DIR holds")
    parser.add_argument("--save", action="store_true", help="with --merge: keep the report under bench/results")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser


def _names(known: tuple[str, ...]) -> "type[list[str]]":
    def parse(text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: choose from {', '.join(known)}")
        return names

    return parse  # type: ignore[return-value]


def _run_part(setting: Setting, label: str, folder: Path) -> int:
    part = find(label)
    results = SectionResults(folder, part.section, is_dry=setting.is_dry)
    results.describe(describe())
    started_s = time.perf_counter()
    function = part.load()
    function(setting, results, *([part.model] if part.model else []))
    results.took(part.label, time.perf_counter() - started_s)
    return 0


def _report(folder: Path, git_sha: str | None, *, keep: bool) -> int:
    report = merge(folder, git_sha)
    (folder / SUMMARY).write_text(json.dumps(asdict(report), indent=1) + "\n")
    print(summary(report))
    if keep:
        report.print()
        print(f"saved {save(report)}")
    is_wrong = report.config["errors"] or not all(check["passed"] for check in report.config["checks"])
    return 1 if is_wrong else 0


def _clear(folder: Path, sections: list[str]) -> None:
    """Results of an earlier run of the same sections."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sections:
        (folder / f"{name}.json").unlink(missing_ok=True)


def _interpret() -> int:
    """The attention checks of a dry run."""
    folder = Path(tempfile.mkdtemp(prefix="tandem-gpu-"))
    try:
        parts = [part for part in plan(["checks"], []) if part.name == "attention"]
        went_well = conduct(parts, Setting(is_dry=True), folder, DEADLINE_S)
        report = merge(folder)
        print(summary(report))
        print(NO_GPU, file=sys.stderr)
        return 2 if went_well and all(check["passed"] for check in report.config["checks"]) else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
