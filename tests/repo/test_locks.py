"""The locks that images are installed from: hashed, of the versions of constraints.txt, and complete."""

import re
import subprocess
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.repo.test_constraints import FACTS, ORDINARY_MACHINE, lines_of
from tools.supply.accepted import ACCEPTED, read_acceptances
from tools.supply.image_digests import IMAGES
from tools.supply.lock import CPU, LOCKS
from tools.supply.pins import CONSTRAINTS, DIRECTORY, ROOT, lock_files, read_pins

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
WHEEL_OF_CPU_TORCH = "sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
FOR_GPUS = ("nvidia", "cuda", "triton")  # beginnings of names of packages
EXTRAS = {"control": ("kubernetes", "load"), "worker": ("worker", "nixl"), CPU: ("worker", "nixl")}
REMEDY = "run `make lock`"

every_lock = pytest.mark.parametrize("lock", lock_files(), ids=lambda path: path.stem)
every_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.stem)


def locked(lock: Path) -> dict[str, Version]:
    """Versions of the packages that the lock installs on an ordinary machine."""
    return {
        pin.name: pin.version
        for pin in read_pins(lock)
        if pin.marker is None or pin.marker.evaluate(dict(ORDINARY_MACHINE))
    }


def required(name: str, extras: tuple[str, ...], *, of_cpu: bool) -> Iterator[Requirement]:
    """By the distribution `name`, as far as it is known here: those for GPUs are not installed everywhere."""
    try:
        lines = requires(name) or []
    except PackageNotFoundError:
        return
    if name == "torch":  # NOTE: either build may be installed here
        lines = [line for line in lines_of(FACTS) if not (of_cpu and line.startswith(FOR_GPUS))]
    for line in lines:
        requirement = Requirement(line)
        environments = [{**ORDINARY_MACHINE, "extra": extra} for extra in (*extras, "")]
        if requirement.marker is None or any(requirement.marker.evaluate(each) for each in environments):
            yield requirement


def test_each_lock_has_its_recipe() -> None:
    assert {path.stem for path in lock_files()} == set(LOCKS)


@every_lock
def test_every_package_has_hashes(lock: Path) -> None:
    pins = read_pins(lock)
    assert pins
    assert [pin.name for pin in pins if not pin.hashes] == [], REMEDY
    assert all(re.fullmatch("sha256:[0-9a-f]{64}", each) for pin in pins for each in pin.hashes)


@every_lock
def test_versions_are_those_of_the_constraints(lock: Path) -> None:
    constrained = {pin.name: pin.version for pin in read_pins(CONSTRAINTS)}
    others = {
        pin.name: (str(pin.version), str(constrained[pin.name]))
        for pin in read_pins(lock)
        if pin.name in constrained and Version(pin.version.public) != constrained[pin.name]
    }
    assert others == {}, REMEDY


@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_all_that_is_required(name: str) -> None:
    """From our own extras on, by the metadata of what is installed here: pip refuses a lock that lacks something."""
    versions = locked(DIRECTORY / f"{name}.lock")
    seen: set[tuple[str, ...]] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [("tandem", EXTRAS[name])]
    while waiting:
        distribution, extras = waiting.pop()
        for requirement in required(distribution, extras, of_cpu=name == CPU):
            found = canonicalize_name(requirement.name)
            assert found in versions, f"{distribution} requires {requirement}: {REMEDY}"
            assert requirement.specifier.contains(versions[found], prereleases=True), f"{requirement}: {REMEDY}"
            if (found, *sorted(requirement.extras)) not in seen:
                seen.add((found, *sorted(requirement.extras)))
                waiting.append((found, tuple(requirement.extras)))
    assert {"numpy", "grpcio", "pydantic-core"} <= {key[0] for key in seen}


def test_images_for_cpus_get_torch_without_cuda() -> None:
    (torch,) = [pin for pin in read_pins(DIRECTORY / f"{CPU}.lock") if pin.name == "torch"]
    assert torch.version.local == "cpu"
    assert WHEEL_OF_CPU_TORCH in torch.hashes
    assert not [name for name in locked(DIRECTORY / f"{CPU}.lock") if name.startswith(FOR_GPUS)]
    assert {"triton", "nvidia-nccl-cu13"} <= locked(DIRECTORY / "worker.lock").keys()


def test_the_control_plane_has_no_torch() -> None:
    assert not {"torch", "safetensors"} & {pin.name for pin in read_pins(DIRECTORY / "control.lock")}


@every_dockerfile
def test_images_install_what_has_a_hash_or_lies_there(dockerfile: Path) -> None:
    """Regression: pip fetched whatever the index sent under a pinned version, and setuptools of any version."""
    text = dockerfile.read_text().replace("\\\n", " ")
    commands = re.findall(r"/opt/build/bin/pip (?:--python \S+ )?(?:install|wheel)[^&\n]*", text)
    assert len(commands) == 4
    for command in commands:
        assert "--no-index" in command or "--require-hashes --only-binary :all: -r" in command
    (default,) = re.findall(r"^ARG LOCK=(\S+)$", text, re.MULTILINE)
    assert ROOT / default in lock_files()


@every_dockerfile
@pytest.mark.parametrize(
    ("version", "base", "is_built"),
    [
        ("dev", "python:3.11-slim-bookworm", True),
        ("0.1.0", "python:3.11-slim-bookworm", False),
        ("0.1.0", f"python:3.11-slim-bookworm@sha256:{'a' * 64}", True),
    ],
)
def test_a_release_is_built_on_a_digest_alone(dockerfile: Path, version: str, base: str, is_built: bool) -> None:
    (check,) = re.findall(r"^RUN (case .*? esac)$", dockerfile.read_text().replace("\\\n", " "), re.MULTILINE)
    done = subprocess.run(
        ["sh", "-c", check], env={"VERSION": version, "BASE_IMAGE": base}, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == is_built
    assert ("make image-digests" in done.stderr) != is_built


def test_digests_are_asked_for_the_images_that_are_used() -> None:
    compose = (ROOT / "docker" / "compose.yaml").read_text()
    defaults = dict(re.findall(r"\$\{(\w+_IMAGE):-([^}]+)\}", compose))
    assert defaults == dict(IMAGES)
    for dockerfile in DOCKERFILES:
        assert f"\nARG BASE_IMAGE={IMAGES['BASE_IMAGE']}\n" in dockerfile.read_text()


def test_what_is_accepted_as_never_called_is_not_called() -> None:
    sources = [path for folder in ("tandem", "services") for path in (ROOT / folder).rglob("*.py")]
    texts = {path: path.read_text() for path in sources}
    assert texts
    for each in read_acceptances(ACCEPTED):
        if each.not_called is not None:
            assert [str(path) for path, text in texts.items() if each.not_called in text] == [], each.id


def test_the_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    used = {extra for extras in EXTRAS.values() for extra in extras}
    assert used == project["optional-dependencies"].keys() - {"dev"}
    for name, extras in EXTRAS.items():
        assert [word for word in LOCKS[name] if word in project["optional-dependencies"]] == list(extras)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["control", "build"])
def test_pip_takes_the_lock(name: str, tmp_path: Path) -> None:
    """By its own rules: everything that is required is pinned, and each file of the index has a hash that stands."""
    venv.create(tmp_path / "venv", with_pip=True)
    command = [str(tmp_path / "venv" / "bin" / "pip"), "install", "--quiet", "--retries", "1", "--dry-run"]
    flags = ["--require-hashes", "--only-binary", ":all:", "-r", str(DIRECTORY / f"{name}.lock")]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    if "Could not find a version" in done.stderr or "No matching distribution" in done.stderr:
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
