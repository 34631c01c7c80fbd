"""One control plane, one cluster and one release for all steps; the steps run in the order of their file."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.streams import Answer, Known, asked_of
from tests.kubernetes.background import Background
from tests.kubernetes.journal import Journal
from tests.kubernetes.release import MODEL, ROOT, Release, values_for
from tools.images import Images, build_images
from tools.kubernetes.binaries import default_folder, missing_binaries
from tools.kubernetes.chart import chart_for_old_api
from tools.kubernetes.cluster import Cluster, running_cluster
from tools.kubernetes.control_plane import ControlPlane, running_control_plane

NUM_PROMPTS = 4
MAX_TOKENS = 96
MODE = os.environ.get("TANDEM_E2E_PODS") or "podman"


@pytest.fixture(scope="session")
def journal() -> Iterator[Journal]:
    with Journal(Path(os.environ.get("TANDEM_E2E_LOG") or ROOT / "build" / "e2e-kubernetes.log")) as journal:
        yield journal


@pytest.fixture(scope="session")
def images(journal: Journal) -> Images:
    """Built now, or those of the tag that TANDEM_E2E_IMAGES names; names alone where pods are processes."""
    if MODE == "process":
        return Images(*(f"localhost/tandem-{name}:none" for name in ("base", "control", "worker", "redis")))
    if tag := os.environ.get("TANDEM_E2E_IMAGES"):
        return Images(*(f"localhost/tandem-{name}:{tag}" for name in ("base", "control", "worker", "redis")))
    begun_s = time.monotonic()
    images = build_images()
    journal.tell(f"images up to date in {time.monotonic() - begun_s:.0f} s")
    return images


@pytest.fixture(scope="session")
def plane(journal: Journal) -> Iterator[ControlPlane]:
    assert not missing_binaries(default_folder()), "run python -m tools.kubernetes.build first"
    begun_s = time.monotonic()
    with running_control_plane() as plane:
        journal.tell(f"etcd, API server, controllers and scheduler ready in {time.monotonic() - begun_s:.1f} s")
        yield plane


@pytest.fixture(scope="session")
def background() -> Iterator[Background]:
    with Background() as background:
        yield background


@pytest.fixture(scope="session")
def cluster(plane: ControlPlane, background: Background, journal: Journal) -> Iterator[Cluster]:
    folder = ROOT / "build" / "kubernetes"
    shutil.rmtree(folder, ignore_errors=True)
    with background.entered(running_cluster(plane, folder, journal.tell, MODE)) as cluster:
        journal.tell("two nodes are ready")
        yield cluster


@pytest.fixture(scope="session")
def old_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chart_for_old_api(ROOT / "helm" / "tandem", tmp_path_factory.mktemp("helm") / "tandem")


@pytest.fixture(scope="session")
def release(cluster: Cluster, background: Background, images: Images, old_chart: Path) -> Iterator[Release]:
    """Not installed yet: that is the first step."""
    release = Release(cluster, background, old_chart, values_for(images))
    yield release
    release.close()


@pytest.fixture(scope="session")
def known(release: Release, journal: Journal) -> list[Known]:
    begun_s = time.monotonic()
    known = [answered(release.url, number) for number in range(NUM_PROMPTS)]
    lengths = ", ".join(str(len(each.asked.prompt)) for each in known)
    journal.tell(f"greedy answers to prompts of {lengths} tokens known after {time.monotonic() - begun_s:.1f} s")
    return known


def answered(url: str, number: int) -> Known:
    """A prompt and its greedy answer, asked while nothing goes wrong."""
    asked = asked_of(number, num_tokens=100 + 250 * number, max_tokens=MAX_TOKENS)
    with Answer(url, MODEL, asked, f"known-{number}") as answer:
        answer.wait(timeout_s=90)
        assert answer.error is None, answer.error
        return Known(asked, answer.token_ids)
