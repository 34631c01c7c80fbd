"""Built images, the journal, and one fleet for all faults. Run by `make e2e-images` alone: it wants root."""

import os
import time
from collections.abc import Iterator

import pytest

from tests.faults.streams import Known
from tests.images.fleet import MODEL, Fleet, running_fleet
from tests.images.journal import Journal
from tests.images.load import known_answers
from tools.images import Images, build_images
from tools.images.build import sizes


@pytest.fixture(scope="session")
def journal() -> Iterator[Journal]:
    with Journal() as journal:
        yield journal


@pytest.fixture(scope="session")
def images(journal: Journal) -> Images:
    """Built now, or those of the tag that TANDEM_E2E_IMAGES names."""
    if tag := os.environ.get("TANDEM_E2E_IMAGES"):
        return Images(*(f"localhost/tandem-{name}:{tag}" for name in ("base", "control", "worker", "redis")))
    start_s = time.monotonic()
    images = build_images()
    journal.tell(f"images up to date in {time.monotonic() - start_s:.0f} s")
    for name, size in sizes(images).items():
        journal.tell(f"  {name}: {size / 2**20:.0f} MiB")
    return images


@pytest.fixture(scope="session")
def fleet(images: Images, journal: Journal) -> Iterator[Fleet]:
    start_s = time.monotonic()
    with running_fleet(images) as fleet:
        journal.tell(f"redis, 2 routers, 2 prefill, 2 decode and a gateway ready in {time.monotonic() - start_s:.1f} s")
        for name, container in fleet.containers.items():
            journal.tell(f"  {name} at {container.ip()}")
        yield fleet


@pytest.fixture(scope="session")
def known(fleet: Fleet, journal: Journal) -> list[Known]:
    start_s = time.monotonic()
    known = known_answers(fleet.url, MODEL)
    lengths = ", ".join(str(len(each.asked.prompt)) for each in known)
    journal.tell(f"greedy answers to prompts of {lengths} tokens known after {time.monotonic() - start_s:.1f} s")
    return known
