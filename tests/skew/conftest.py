"""Releases beside this one, built once, and a cluster's processes replaced one after the other."""

from pathlib import Path

import pytest

from tests.helpers.releases import BEFORE_SESSIONS, PREVIOUS, installed, next_release


@pytest.fixture(scope="session")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which the release before this one is installed."""
    return installed(PREVIOUS, tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="session")
def following(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a release that speaks one protocol more than this one."""
    return next_release(tmp_path_factory.mktemp("following"))


@pytest.fixture(scope="session")
def rehashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a release with other block hashes."""
    return next_release(tmp_path_factory.mktemp("rehashed"), with_other_hashes=True)


@pytest.fixture(scope="session")
def outdated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory in which a release is installed that has no protocol in common with this one."""
    return installed(BEFORE_SESSIONS, tmp_path_factory.mktemp("outdated"))
