"""Compiles the kernels on first use into a cache file whose name is a digest of everything that affects the code.

Sources are compiled separately, as many at once as there are cores, since a user waits for the first start. A file is
renamed once complete, so an existing file is complete, and several processes may compile at once.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.core.errors import ConfigurationError

# NOTE: no -ffast-math. It would let the compiler reorder sums, and results would depend on how a loop was unrolled.
_FLAGS = (
    *("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno"),
    *("-fPIC", "-pthread", "-fvisibility=hidden"),
)
_COMPILE_TIMEOUT_S = 1200.0  # for one source, on a busy machine
_CPUINFO = Path("/proc/cpuinfo")
_VENDOR_FIELDS = ("vendor_id", "CPU implementer", "CPU part")
# Instructions that a compiler may choose; the other flags of an x86 depend on the system and the hypervisor too.
_INSTRUCTION_FLAGS = re.compile(
    r"3dnowprefetch|abm|adx|aes|amx_\w+|apx|avx\w*|bmi[12]|cx16|f16c|fma4?|gfni|lahf_lm|mmx|movbe|pclmulqdq|pni|popcnt"
    r"|sha_ni|sha512|sm[34]|sse\w*|ssse3|tbm|vaes|vpclmulqdq|xop"
)
_compiled_again: set[Path] = set()

_log = logging.getLogger(__name__)


def load_library(cache_dir: Path | None = None, *, architecture: str = "native") -> ctypes.CDLL:
    """Compiles the library if needed, and loads it. A file that does not load is compiled again, once per process. See
    `build`.

    Raises:
        ConfigurationError: the kernels cannot be compiled or loaded on this machine; the message says why.
    """
    path = build(cache_dir, architecture=architecture)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        reason = f"the native kernels at {str(path)!r} do not load: {error}"
    if path in _compiled_again:
        raise ConfigurationError(reason)
    _compiled_again.add(path)
    try:
        return ctypes.CDLL(str(build(cache_dir, force=True, architecture=architecture)))
    except (OSError, ConfigurationError) as error:
        raise ConfigurationError(f"{reason}; nor when they are compiled again: {error}") from error


def build(cache_dir: Path | None = None, *, force: bool = False, architecture: str = "native") -> Path:
    """Returns the path of the compiled library, compiling it if this machine has not done so yet.

    `architecture`: the processors to compile for, as a value of the compiler's -march.

    Raises:
        ConfigurationError: no usable compiler, or compilation failed; the message ends with the compiler's output.
    """
    command = (_compiler(), f"-march={architecture}", *_FLAGS)
    directory = default_cache_dir() if cache_dir is None else cache_dir
    target = directory / f"tandem_native_{_digest(command)}.so"
    if force or not target.exists():
        _compile(command, target)
    return target


def default_cache_dir() -> Path:
    """`TANDEM_CACHE_DIR`, or `~/.cache/tandem` if it is not set.

    Raises:
        ConfigurationError: it is not set, and this user has no home directory.
    """
    configured = os.environ.get("TANDEM_CACHE_DIR")
    if configured:
        return Path(configured)
    try:
        return Path.home() / ".cache" / "tandem"
    except RuntimeError as error:  # NOTE: of users without an entry in /etc/passwd, as containers often have
        raise ConfigurationError(
            f"user {os.getuid()} has no home directory for ~/.cache/tandem; set TANDEM_CACHE_DIR (or HOME)"
        ) from error


def _compiler() -> str:
    return os.environ.get("CXX") or "g++"


def _source_dir() -> Path:
    return Path(__file__).parent / "src"


def _sources() -> list[Path]:
    return sorted(_source_dir().glob("*.cpp"))


def _digest(command: tuple[str, ...]) -> str:
    parts = [_compiler_version(command[0]), _cpu(), *command]
    parts += [path.read_text() for path in sorted(_source_dir().iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigurationError(
            f"no C++ compiler: {compiler!r} does not run ({error}); install g++ or set CXX"
        ) from error


def _cpu() -> str:
    """The processor's vendor and instructions, on which the code for -march=native depends."""
    try:
        first = _CPUINFO.read_text().partition("\n\n")[0]
    except OSError:
        return platform.machine()
    pairs = (line.partition(":") for line in first.splitlines())
    values = {name.strip(): value.strip() for name, _, value in pairs}
    flags = [flag for flag in values.get("flags", "").split() if _INSTRUCTION_FLAGS.fullmatch(flag)]
    vendor = [values.get(name, "") for name in _VENDOR_FIELDS]
    return " ".join([platform.machine(), *vendor, *sorted(flags), values.get("Features", "")])


def _compile(command: tuple[str, ...], target: Path) -> None:
    began_s = time.monotonic()
    _log.info("compiling the CPU kernels with %s into %s, once", command[0], target.parent)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=target.parent) as scratch,
            ThreadPoolExecutor(os.cpu_count() or 1) as pool,
        ):
            objects = {source: str(Path(scratch) / f"{source.stem}.o") for source in _sources()}
            compilations = [(*command, "-c", str(source), "-o", path) for source, path in objects.items()]
            list(pool.map(_run, compilations))
            output = Path(scratch) / target.name
            _run((*command, "-shared", *objects.values(), "-o", str(output)))
            with output.open("rb") as compiled:
                os.fsync(compiled.fileno())  # a power cut must not leave an empty file under that name
            output.replace(target)
            _log.info("compiled the CPU kernels in %.1f s", time.monotonic() - began_s)
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(
            f"the native kernels do not compile with {command[0]!r}: {error.stderr[-2000:]}"
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"the native kernels cannot be built in {str(target.parent)!r} ({error}); set TANDEM_CACHE_DIR"
        ) from error


def _run(arguments: tuple[str, ...]) -> None:
    subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=_COMPILE_TIMEOUT_S)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    sys.stdout.write(f"{build()}\n")
