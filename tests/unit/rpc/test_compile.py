"""Generating the protobuf modules: done once, done again after a change, and refused clearly."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.core.errors import ConfigurationError
from tandem.rpc.compile import PACKAGE, ROOT, compile_protos

SECOND_NS = 10**9

SUFFIXES = (".py", ".pyi", "_grpc.py")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the .proto files alone."""
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    (tmp_path / PACKAGE.parent).mkdir(parents=True)
    return tmp_path


def test_modules_are_made_once(checkout: Path) -> None:
    assert compile_protos(checkout)
    made = {path.name for path in (checkout / PACKAGE).iterdir()}
    files = {f"{name}_pb2{suffix}" for name in ("common", "worker", "router", "session") for suffix in SUFFIXES}
    assert made == files | {"__init__.py"}
    assert [path.name for path in (checkout / PACKAGE.parent).iterdir()] == ["v1"]
    assert not compile_protos(checkout)
    assert compile_protos(checkout, force=True)


def test_modules_are_made_beside_libraries_that_crash_protoc(checkout: Path) -> None:
    """protoc's library, loaded into a process that had loaded torch and others, ended the whole test run."""
    script = f"""
import torch, sys
from pathlib import Path
from tandem.rpc.compile import compile_protos
assert compile_protos(Path({str(checkout)!r}))
assert not any(name.startswith("grpc_tools") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_modules_are_made_again_when_something_changed(checkout: Path) -> None:
    compile_protos(checkout)
    proto = checkout / "proto" / PACKAGE / "common.proto"
    later_ns = (checkout / PACKAGE / "common_pb2.py").stat().st_mtime_ns + SECOND_NS
    os.utime(proto, ns=(later_ns, later_ns))
    assert compile_protos(checkout)
    os.utime(proto, ns=(0, 0))
    (checkout / PACKAGE / "router_pb2.pyi").unlink()
    assert compile_protos(checkout)


def test_what_this_checkout_has_is_current() -> None:
    """Otherwise the other tests of this room test something old."""
    assert not compile_protos()


def test_a_bad_proto_is_refused_and_changes_nothing(checkout: Path) -> None:
    compile_protos(checkout)
    before = (checkout / PACKAGE / "common_pb2.py").read_bytes()
    (checkout / "proto" / PACKAGE / "common.proto").write_text("nonsense")
    with pytest.raises(ConfigurationError, match="protoc refused"):
        compile_protos(checkout, force=True)
    assert (checkout / PACKAGE / "common_pb2.py").read_bytes() == before


def test_a_place_without_protos_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="run this in a checkout"):
        compile_protos(tmp_path)


def test_missing_tools_are_named(checkout: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.modules["grpc_tools"] = None
from tandem.rpc.compile import compile_protos
compile_protos(Path({str(checkout)!r}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "install grpcio-tools" in done.stderr


def test_the_command_says_how_long_it_took_and_nothing_where_there_is_nothing_to_do(checkout: Path) -> None:
    """The line is one of those of `make setup`."""
    for part in ("core", "rpc"):
        generated = shutil.ignore_patterns(PACKAGE.name, "__pycache__")
        shutil.copytree(ROOT / "tandem" / part, checkout / "tandem" / part, ignore=generated, dirs_exist_ok=True)
    shutil.copy(ROOT / "tandem" / "__init__.py", checkout / "tandem")
    command = [sys.executable, "-m", "tandem.rpc.compile"]
    first, second = (
        subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert re.fullmatch(r"generated the gRPC modules in \d+\.\d s\n", first)
    assert (checkout / PACKAGE / "common_pb2.py").exists()
    assert second == ""


def test_the_wire_needs_no_torch() -> None:
    script = "import tandem.rpc.client, tandem.rpc.server, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
