"""The build cache: complete files only, one per compiler, flags and processor, and errors that say what to do."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.compute.native import build as build_module
from tandem.compute.native.bindings import load
from tandem.compute.native.build import build
from tandem.compute.native.core_board import CoreBoard
from tandem.compute.native.sampling import load_draws
from tandem.core.errors import ConfigurationError
from tandem.process.cores import Share
from tests.helpers.native_kernels import FLAG_OF_MACRO, load_or_skip

FAKE_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "fake {version}" && exit 0
case " $* " in *" -shared "*) echo run >> {log} ;; esac
while [ "$1" != -o ]; do shift; done
[ -n "{fail}" ] && echo "{fail}" >&2 && exit 1
{write} "$2"
"""
CPUINFO = """processor	: {number}
vendor_id	: GenuineIntel
cpu family	: 6
model		: {model}
model name	: Intel(R) Xeon(R) Processor @ 2.80GHz
cpu MHz		: {mhz}
flags		: fpu sse sse2 ss avx2 avx512f {flags}
bugs		: spectre_v1

"""


def _borrow(cache_dir: Path) -> None:
    path = cache_dir.parent / "board"
    CoreBoard.create(path, [Share(1)])
    CoreBoard(path, 0).borrow(cache_dir)


LOADERS: list[Callable[[Path], object]] = [load, load_draws, _borrow]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def use_compiler(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    log: Path,
    *,
    version: str = "1",
    fail: str = "",
    write: str = "echo compiled >",
) -> None:
    script = tmp_path / "compiler"
    script.write_text(FAKE_COMPILER.format(version=version, log=log, fail=fail, write=write))
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))


def test_second_build_compiles_nothing(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    first = build(tmp_path / "cache")
    assert first.read_text() == "compiled\n"
    assert build(tmp_path / "cache") == first
    assert runs.read_text() == "run\n"
    build(tmp_path / "cache", force=True)
    assert runs.read_text() == "run\nrun\n"


def test_another_compiler_version_gets_another_file(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    first = build(tmp_path / "cache")
    use_compiler(monkeypatch, tmp_path, runs, version="2")
    assert build(tmp_path / "cache") != first


def test_cache_directory_comes_from_the_environment(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert build().parent == tmp_path / "elsewhere"


def test_a_user_without_a_home_is_told_what_to_set(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container's user with a number that /etc/passwd lacks."""
    use_compiler(monkeypatch, tmp_path, runs)
    monkeypatch.delenv("TANDEM_CACHE_DIR", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    with pytest.raises(ConfigurationError, match=r"user 2147483643 has no home directory .* set TANDEM_CACHE_DIR"):
        build()


def test_who_builds_by_hand_is_told_what_it_does_and_how_long_it_took(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first `make run` compiles for up to a minute."""
    use_compiler(monkeypatch, tmp_path, runs)
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    said = subprocess.run([sys.executable, "-m", build_module.__name__], check=True, capture_output=True, text=True)
    first, second, path = said.stdout.splitlines()
    assert first.startswith("compiling the CPU kernels with ")
    assert re.fullmatch(r"compiled the CPU kernels in \d+\.\d s", second)
    assert Path(path).read_text() == "compiled\n"


def test_failed_compilation_leaves_nothing_and_quotes_the_compiler(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs, fail="error: no such intrinsic")
    with pytest.raises(ConfigurationError, match="no such intrinsic"):
        build(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_unwritable_cache_directory_names_the_setting(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    occupied = tmp_path / "a-file"
    occupied.touch()
    with pytest.raises(ConfigurationError, match="TANDEM_CACHE_DIR"):
        build(occupied)


@pytest.mark.parametrize("use", LOADERS)
def test_a_file_that_does_not_load_is_compiled_again(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
) -> None:
    load_or_skip()
    use_compiler(monkeypatch, tmp_path, runs, write=f"cp '{build()}'")
    build(tmp_path / "cache").write_bytes(b"")
    use(tmp_path / "cache")
    assert runs.read_text() == "run\nrun\n"


@pytest.mark.parametrize("use", LOADERS)
def test_what_never_loads_is_an_error_and_compiled_again_only_once(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="do not load"):
            use(tmp_path / "cache")
        assert runs.read_text() == "run\nrun\n"


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, list((tmp_path / "cache").glob("*.so"))))

    use_compiler(monkeypatch, tmp_path, runs)
    monkeypatch.setattr(os, "fsync", fsync)
    compiled = build(tmp_path / "cache")
    assert synced == [(compiled.stat().st_ino, [])]


def test_instructions_name_the_file_but_no_model_kernel_or_hypervisor(
    tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_compiler(monkeypatch, tmp_path, runs)
    monkeypatch.setattr(build_module, "_CPUINFO", tmp_path / "cpuinfo")

    def built(flags: str, *, model: int = 106, mhz: float = 2800.0) -> Path:
        cores = [CPUINFO.format(number=number, model=model, mhz=mhz + number, flags=flags) for number in range(2)]
        (tmp_path / "cpuinfo").write_text("".join(cores))
        return build(tmp_path / "cache")

    first = built("avx512_bf16 avx512_vnni")
    assert built("avx512_bf16 avx512_vnni md_clear hypervisor ibpb_exit_to_user", mhz=3300.0) == first
    assert built("avx512_vnni avx512_bf16") == first
    assert built("avx512_vnni") != first
    assert built("avx512_bf16 avx512_vnni", model=143) == first


def test_the_sources_choose_code_by_the_macros_that_tests_know() -> None:
    """Tests skip what is compiled for lesser processors where that is the same code."""
    sources = Path(build_module.__file__).parent / "src"
    found = {
        name for path in sources.iterdir() for name in re.findall(r"__(?:AVX|F16C|FMA|SSE|BMI)\w*__", path.read_text())
    }
    assert found == FLAG_OF_MACRO.keys()


@pytest.mark.slow
def test_the_code_of_avx_vnni_compiles(tmp_path: Path) -> None:
    """Also on processors without it, where nothing else compiles it."""
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        pytest.skip("the CPU kernels are compiled by a C++ compiler, and none is on PATH")
    options = [compiler, "-march=alderlake", "-dM", "-E", "-x", "c++", "/dev/null"]
    macros = subprocess.run(options, capture_output=True, text=True, check=True).stdout
    assert "__AVXVNNI__" in macros
    assert "__AVX512F__" not in macros
    code = build(tmp_path, architecture="alderlake").read_bytes()
    product = (
        rb"\xc4[\x02\x22\x42\x62\x82\xa2\xc2\xe2][\x05\x0d\x15\x1d\x25\x2d\x35\x3d\x45\x4d\x55\x5d\x65\x6d\x75\x7d]\x50"
    )
    assert len(re.findall(product, code)) > 20, "it has no vpdpbusd of 256 bits, in the encoding of AVX-VNNI"
