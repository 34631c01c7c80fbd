"""llama.cpp's own server, with its own speculative decoding, compiled from the sources in
`llama-cpp-python`'s archive."""

import shutil
import sys
import tarfile
from pathlib import Path

from bench.race.peers.environment import run
from bench.race.peers.llama_cpp import ENVIRONMENT

PACKAGE = ENVIRONMENT.packages[0]
_TARGET = "llama-server"
_OPTIONS = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_OPENSSL=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_APP=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
)


def program(build: Path) -> Path:
    """Path of the program that `llama_server` compiles."""
    return _directory(build) / "build" / "bin" / _TARGET


def llama_server(build: Path) -> None:
    """Compiles the program for this processor, unless it is there; takes some ten minutes. Raises `NotHere`."""
    directory = _directory(build)
    if program(build).exists():
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    log = build / "logs" / "llama-native.log"
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(directory)]
    run([*pip, PACKAGE], "llama.cpp's sources cannot be fetched", log)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as members:
        members.extractall(directory, filter="data")
    (sources,) = directory.glob("*/vendor/llama.cpp")
    compiled = ["cmake", "-S", str(sources), "-B", str(directory / "build"), *_OPTIONS]
    run(compiled, "llama.cpp cannot be configured", log)
    compiling = ["cmake", "--build", str(directory / "build"), "--target", _TARGET, "--parallel"]
    run(compiling, "llama.cpp cannot be compiled", log)


def _directory(build: Path) -> Path:
    return build / "llama" / "native"
