"""`python -m bench.gpu_checks`: the correctness section of `bench.gpu`, under the name it had first.

Exits 1 when something is wrong, 2 where there is no NVIDIA GPU.
"""

import subprocess
import sys
import tempfile

import torch


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_checks needs an NVIDIA GPU and a CUDA build of PyTorch; nothing was checked", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as folder:
        command = [sys.executable, "-m", "bench.gpu", "--section", "checks", "--out", folder]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
