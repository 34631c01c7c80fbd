"""`make lock`: writes the locks in requirements/ from pyproject.toml and constraints.txt, with every file's SHA-256.

Versions that constraints.txt does not pin stay what the lock has, unless `--upgrade` is given. Hashes are the package
index's. CPU builds of torch are on another index than the rest: PyTorch's, or a directory that holds the wheel.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.supply.pins import CONSTRAINTS, DIRECTORY, ROOT, read_pins

UV = ROOT / "build" / "supply" / "bin" / "uv"
CPU = "worker-cpu"
LOCKS: Mapping[str, Sequence[str]] = {
    "control": ("pyproject.toml", "--extra", "kubernetes", "--extra", "load", "--universal"),
    "worker": ("pyproject.toml", "--extra", "worker", "--extra", "nixl", "--universal"),
    CPU: ("pyproject.toml", "--extra", "worker", "--extra", "nixl", "--python-platform", "x86_64-manylinux_2_28"),
    "build": ("requirements/build.in", "--universal"),
    "tools": ("requirements/tools.in", "--universal"),
}
_OPTIONS = (
    *("--quiet", "--generate-hashes", "--no-annotate", "--system-certs", "--python-version", "3.11"),
    *("--constraint", str(CONSTRAINTS.relative_to(ROOT)), "--custom-compile-command", "make lock"),
)


def lock_command(name: str, output: Path, cpu_torch: Path | None, *, upgrade: bool = False) -> list[str]:
    """Command that writes the lock `name` to `output`, run in the repository's root.

    Args:
        cpu_torch: directory with a wheel of torch's CPU build; None = PyTorch's index.
    """
    command = [str(UV), "pip", "compile", *LOCKS[name], *_OPTIONS, "--output-file", str(output)]
    if name == CPU:
        command += ["--torch-backend", "cpu"] if cpu_torch is None else ["--find-links", str(cpu_torch)]
    return [*command, "--upgrade"] if upgrade else command


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="make lock", description=__doc__)
    parser.add_argument("--only", choices=sorted(LOCKS), action="append", help="this lock; repeatable; default: all")
    parser.add_argument("--cpu-torch", type=Path, help="directory with a wheel of torch's CPU build")
    parser.add_argument("--upgrade", action="store_true", help="the newest versions that constraints.txt allows")
    arguments = parser.parse_args(argv)
    for name in arguments.only or LOCKS:
        output = DIRECTORY / f"{name}.lock"
        command = lock_command(name, output, arguments.cpu_torch, upgrade=arguments.upgrade)
        if subprocess.run(command, cwd=ROOT, check=False).returncode != 0:
            hint = "; a directory with the wheel can be given by ARGS='--cpu-torch DIR'" if name == CPU else ""
            print(f"{output.relative_to(ROOT)} was not written, the reason is above{hint}", file=sys.stderr)
            return 1
        print(f"{output.relative_to(ROOT)}: {len(read_pins(output))} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
