"""Compiles the kernels on first use into a cache file whose name is a digest of everything that shaped it.

A file that exists under its name is complete (temporary file, then rename), so processes may race.
"""

import hashlib
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

from tandem.core.errors import ConfigurationError

# NOTE: no -ffast-math. It would let the compiler reorder sums, and results would depend on how a loop was unrolled.
_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
)
_COMPILE_TIMEOUT_S = 300.0


def build(cache_dir: Path | None = None, *, force: bool = False, architecture: str = "native") -> Path:
    """Returns the compiled library, compiling it if this machine has not done so yet.

    `architecture`: the processors that it is for, as the compiler's -march names them.

    Raises:
        ConfigurationError: no usable compiler, or compilation failed; the message ends with the compiler's words.
    """
    command = (_compiler(), f"-march={architecture}", *_FLAGS, *map(str, _sources()))
    directory = default_cache_dir() if cache_dir is None else cache_dir
    target = directory / f"tandem_native_{_digest(command)}.so"
    if force or not target.exists():
        _compile(command, target)
    return target


def default_cache_dir() -> Path:
    configured = os.environ.get("TANDEM_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".cache" / "tandem"


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _source_dir() -> Path:
    return Path(__file__).parent / "src"


def _sources() -> list[Path]:
    return sorted(_source_dir().glob("*.cpp"))


def _digest(command: tuple[str, ...]) -> str:
    parts = [_compiler_version(command[0]), _cpu_flags(), *command]
    parts += [path.read_text() for path in sorted(_source_dir().iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigurationError(
            f"no C++ compiler: {compiler!r} does not run ({error}); install g++ or set CXX"
        ) from error


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _compile(command: tuple[str, ...], target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            output = Path(scratch) / target.name
            arguments = [*command, "-o", str(output)]
            subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)
            output.replace(target)
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(
            f"the native kernels do not compile with {command[0]!r}: {error.stderr[-2000:]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"the native kernels cannot be built in {str(target.parent)!r} ({error}); set TANDEM_CACHE_DIR"
        ) from error


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
