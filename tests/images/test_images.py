"""Contents of the images: no torch in the control plane, no root, no compilers but Triton's, nothing writable."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.images.journal import Journal
from tools.images import CommandError, Images, Network
from tools.images.container import ContainerSpec
from tools.images.host import podman

NETWORK = "tandem-images"
MAX_CONTROL_MIB = 700
MAX_WORKER_MIB = 1400


@pytest.fixture(scope="module")
def network(images: Images) -> Iterator[Network]:
    with Network.running(NETWORK) as network:
        yield network


def run_python(image: str, source: str, **options: Any) -> str:
    """Output of `source` in a container of that image, hardened as in the fleet."""
    spec = ContainerSpec("tandem-look", image, NETWORK, entrypoint="python3", argv=("-c", source), **options)
    arguments = [argument for argument in spec.arguments() if argument != "--detach"]
    return podman("run", "--rm", *arguments, timeout_s=120)


def config_of(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(podman("image", "inspect", image))[0]
    return found


def both(images: Images) -> tuple[str, str]:
    return images.control, images.worker


@pytest.mark.usefixtures("network")
def test_the_control_plane_has_no_torch(images: Images, journal: Journal) -> None:
    source = (
        "import importlib.util as u, sys\n"
        "import tandem.gateway.app, tandem.router.process, tandem.kube, tandem.planning\n"
        "import kubernetes, matplotlib, httpx\n"
        "assert u.find_spec('torch') is None and 'torch' not in sys.modules\n"
        "print('clean')"
    )
    assert run_python(images.control, source) == "clean"
    journal.tell("control image: gateway and router import, torch is not there")


@pytest.mark.usefixtures("network")
def test_containers_are_not_root_and_cannot_write_but_where_they_may(images: Images, journal: Journal) -> None:
    source = (
        "import os, pathlib, tempfile\n"
        "tempfile.NamedTemporaryFile().close()\n"
        "for path in ('/opt/tandem', '/opt/venv', '/etc', os.environ['HOME']):\n"
        "    try: (pathlib.Path(path) / 'x').touch()\n"
        "    except OSError: continue\n"
        "    raise SystemExit(path + ' is writable')\n"
        "print(os.getuid(), os.getgid())"
    )
    for image in both(images):
        assert run_python(image, source) == "10001 10001"
    journal.tell("both images: uid 10001, read-only root, only /tmp can be written")


@pytest.mark.usefixtures("network")
def test_there_are_no_compilers_but_tritons_and_no_pip(images: Images, journal: Journal) -> None:
    source = (
        "import importlib.util as u, json, shutil\n"
        "found = [name for name in ('gcc', 'g++', 'cc', 'pip', 'make') if shutil.which(name)]\n"
        "print(json.dumps([found, u.find_spec('triton') is not None, u.find_spec('pip') is not None]))"
    )
    for image in both(images):
        found, has_triton, has_pip = json.loads(run_python(image, source))
        assert found == (["gcc", "cc"] if has_triton else [])
        assert not has_pip
    journal.tell("both images: no compiler but Triton's, no pip")


@pytest.mark.usefixtures("network")
def test_compiled_kernels_serve_without_a_compiler(images: Images, journal: Journal) -> None:
    source = "from tandem.compute.native.bindings import unavailable_reason; print(unavailable_reason())"
    assert run_python(images.worker, source) == "None"
    journal.tell("worker image: the compiled CPU kernels load on the kind of CPU that they were built on")


@pytest.mark.usefixtures("network")
def test_on_another_cpu_pytorch_computes_instead(images: Images) -> None:
    """The kernels are named by a digest of the CPU; a folder without them is what another CPU finds."""
    source = (
        "import torch; from tandem.compute.choose import choose_kernels\n"
        "print(type(choose_kernels(torch.device('cpu'))).__name__)"
    )
    assert run_python(images.worker, source) == "NativeKernels"
    assert run_python(images.worker, source, env={"TANDEM_CACHE_DIR": "/tmp/none"}) == "TorchKernels"


@pytest.mark.usefixtures("network")
def test_nixl_loads(images: Images) -> None:
    source = "from tandem.transport.nixl.bindings import unavailable_reason; print(unavailable_reason())"
    assert run_python(images.worker, source) == "None"


@pytest.mark.usefixtures("network")
def test_every_service_explains_its_settings(images: Images) -> None:
    services = {images.control: ("gateway", "router"), images.worker: ("prefill", "decode")}
    for image, names in services.items():
        for name in names:
            spec = ContainerSpec("tandem-look", image, NETWORK, argv=(f"services.{name}", "--help"))
            arguments = [argument for argument in spec.arguments() if argument != "--detach"]
            assert f"python -m services.{name}" in podman("run", "--rm", *arguments)


def test_images_say_what_they_are_and_how_they_are(images: Images) -> None:
    for image in both(images):
        config = config_of(image)["Config"]
        labels = {name.removeprefix("org.opencontainers.image."): text for name, text in config["Labels"].items()}
        assert labels["title"] == image.partition("/")[2].partition(":")[0]
        assert labels["licenses"] == "Apache-2.0"
        assert labels["revision"]
        assert config["User"] == "10001:10001"
        assert config_of(image)["Healthcheck"]["Test"][0] == "CMD"


@pytest.mark.usefixtures("network")
def test_each_image_has_a_bill_of_its_materials(images: Images, journal: Journal) -> None:
    source = (
        "import importlib.metadata as m, json\n"
        "bill = json.load(open('/opt/tandem/sbom.cdx.json'))\n"
        "found = {each['name'].lower().replace('_', '-'): each['version'] for each in bill['components']}\n"
        "here = {each.name.lower().replace('_', '-'): each.version for each in m.distributions()}\n"
        "print(json.dumps([bill['bomFormat'], sorted(found.items() ^ here.items()), len(found), sorted(found)]))"
    )
    for image in both(images):
        form, differences, num_found, names = json.loads(run_python(image, source))
        assert (form, differences) == ("CycloneDX", [])
        assert "tandem" in names
        assert ("torch" in names) == (image == images.worker)
        journal.tell(f"{image}: {num_found} Python packages in its SBOM, as many as are installed")


def test_nothing_of_the_build_machine_is_left_inside(images: Images) -> None:
    """Pip's configuration may hold passwords of a package index."""
    for image in both(images):
        history = json.dumps(
            [
                entry["created_by"]
                for entry in json.loads(podman("history", "--format", "json", "--no-trunc", image))
                if "created_by" in entry
            ]
            or config_of(image)["History"]
        )
        assert "index-url" not in history
        with pytest.raises(CommandError):
            podman("run", "--rm", "--entrypoint", "cat", image, "/etc/pip.conf")


def test_images_stay_small(images: Images) -> None:
    for image, most in zip(both(images), (MAX_CONTROL_MIB, MAX_WORKER_MIB), strict=True):
        assert config_of(image)["Size"] < most * 2**20
