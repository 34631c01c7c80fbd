"""Names and paths of models, without a network."""

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tandem.cli.model_cost import config_of
from tandem.core.errors import CheckpointError, ConfigurationError
from tandem.models.gguf.convert import converted
from tandem.models.gguf.parts import part_paths
from tandem.models.hub import resolve_model_path, served_name
from tests.helpers.checkpoints import save_tiny_llama
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hub import COMMIT, LATER_COMMIT, SMALL_MODEL, Hub
from tests.unit.models.gguf.test_convert import LLAMA3_ROPE, frequencies


def test_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./nowhere", "~/nowhere-at-all", "a/b/c"])
def test_path_that_is_no_directory(name: str) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        resolve_model_path(name)


@pytest.mark.parametrize(("name", "problem"), [("~nobody-of-that-name/a", "home directory"), ("a" * 300, "too long")])
def test_a_path_that_cannot_be_looked_up_is_refused_by_name(name: str, problem: str) -> None:
    """Regression: a command ended with the traceback of a RuntimeError or OSError."""
    for find in (resolve_model_path, served_name, config_of):
        with pytest.raises(ConfigurationError, match=f"'{name[:9]}.*{problem}"):
            find(name)


def test_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(CheckpointError, match="is not a directory or a GGUF file"):
        resolve_model_path(str(tmp_path / "model.bin"))


@pytest.mark.parametrize("name", ["not a name", "", "--", "a..b", "not a name:Q4", ":Q4"])
def test_impossible_name(name: str) -> None:
    with pytest.raises(CheckpointError):
        resolve_model_path(name)


def test_without_network_or_cache_the_message_says_what_to_do(tmp_path: Path) -> None:
    """A process of its own: the hub's client reads its environment when it is imported."""
    code = "from tandem.models.hub import resolve_model_path; resolve_model_path('someone/some-model')"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert "CheckpointError: 'someone/some-model' is no directory here" in done.stderr
    assert "check the name and the network" in done.stderr


UNREAD = ("original/params.json", "assets/notes.txt", "onnx/config.json")
PICKLED = ("config.json", "tokenizer.json", "pytorch_model.bin")


def resolve(hub: Hub, home: Path, name: str, options: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own that asks `hub` and prints the directory; its log goes to standard error."""
    code = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from tandem.models.hub import resolve_model_path\n"
        f"print(resolve_model_path({name!r}{options}))"
    )
    command = [sys.executable, "-c", code]
    environment = hub.environment(home) | {"TANDEM_CACHE_DIR": str(home / "tandem")}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def files_in(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    snapshot = Path(done.stdout.strip())
    return {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if not path.is_dir()}


@pytest.mark.parametrize(
    ("revision", "options", "has_weights"), [("v1.0", "", True), ("refs/pr/1", ", has_weights=False", False)]
)
def test_a_revision_is_kept_to_and_weights_are_left_where_nobody_wants_them(
    tmp_path: Path, revision: str, options: str, has_weights: bool
) -> None:
    """Regression: the slashes of a revision were counted as the name's, which has one at most."""
    with Hub.running((*SMALL_MODEL, *UNREAD)) as hub:
        done = resolve(hub, tmp_path, f"a/b@{revision}", options)
    unwanted = {"README.md"} if has_weights else {"README.md", "model.safetensors"}
    assert files_in(done) == set(SMALL_MODEL) - unwanted
    assert any(f"/revision/{quote(revision, safe='')}" in path for path in hub.asked)
    assert not any("/revision/main" in path for path in hub.asked)
    assert f"a/b at {revision} is commit {COMMIT}; name a/b@{COMMIT} to keep to it" in done.stderr


def test_the_commit_of_the_default_branch_is_logged(tmp_path: Path) -> None:
    with Hub.running(SMALL_MODEL) as hub:
        done = resolve(hub, tmp_path, "a/b")
    assert f"a/b at its default branch is commit {COMMIT}; name a/b@{COMMIT} to keep to it" in done.stderr


def test_a_commit_is_kept_to_whatever_the_branch_holds_by_then(tmp_path: Path) -> None:
    with Hub.running(SMALL_MODEL) as hub:
        done = resolve(hub, tmp_path, f"a/b@{LATER_COMMIT}")
    assert done.stdout.strip().endswith(LATER_COMMIT)
    assert f"a/b is served at commit {LATER_COMMIT}" in done.stderr


def test_pickles_are_fetched_from_a_hub_only_where_they_are_allowed(tmp_path: Path) -> None:
    with Hub.running(PICKLED) as hub:
        refused = resolve(hub, tmp_path, "a/b")
        assert not any("pytorch_model.bin" in path for path in hub.asked)
        allowed = resolve(hub, tmp_path, "a/b", ", allow_pickle=True")
    assert f"UnsupportedCheckpointError: a/b@{COMMIT} has no safetensors" in refused.stderr
    assert "--allow-pickle" in refused.stderr
    assert files_in(allowed) == set(PICKLED)


def test_pickles_are_of_the_commit_that_the_rest_is_of(tmp_path: Path) -> None:
    """The branch moves between the two fetches; both were of whatever it held at that moment."""
    with Hub.running(PICKLED, moves_after_first=True) as hub:
        done = resolve(hub, tmp_path, "a/b", ", allow_pickle=True")
    assert files_in(done) == set(PICKLED)
    assert done.stdout.strip().endswith(COMMIT)


GGUF_NAMES = ("README.md", "tiny-Q8_0.gguf", "tiny-BF16.gguf", "tiny.F16.gguf", "mmproj-tiny-F16.gguf")


@pytest.fixture(scope="module")
def gguf_content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    place = tmp_path_factory.mktemp("gguf")
    return write_gguf(save_tiny_llama(place / "plain"), place / "tiny.gguf", type_name="Q8_0").read_bytes()


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (("config.json", "tiny-Q8_0.gguf", "mmproj-F16.gguf"), "a/b"),
        (("tiny-Q8_0.gguf",), "a/b@v1.0"),
        (GGUF_NAMES, "a/b:q8_0"),
        ((*SMALL_MODEL, "deep/tiny-Q8_0.gguf"), "a/b:Q8_0@v1.0"),
    ],
)
@pytest.mark.parametrize("options", ["", ", has_weights=False"])
def test_a_gguf_file_of_a_repository_is_served_alone(
    names: tuple[str, ...], name: str, options: str, gguf_content: bytes, tmp_path: Path
) -> None:
    with Hub.running(names, {"tiny-Q8_0.gguf": gguf_content}) as hub:
        done = resolve(hub, tmp_path, name, options)
    assert files_in(done) >= {"config.json", "tokenizer.json"}
    fetched = {path.rpartition("/")[2] for path in hub.asked if path.startswith("GET") and path.endswith(".gguf")}
    assert fetched == {"tiny-Q8_0.gguf"}
    again = resolve(hub, tmp_path, name, options)  # NOTE: it is gone, so the file comes from the cache
    assert again.stdout == done.stdout
    assert "Retrying" not in again.stderr, "it waits for a hub that does not answer"


def test_all_files_of_a_model_in_parts_are_fetched(tmp_path: Path) -> None:
    first = write_gguf(save_tiny_llama(tmp_path / "plain"), tmp_path / "tiny-Q8_0.gguf", tensors_of_a_part=9)
    parts = {path.name: path.read_bytes() for path in part_paths(first)}
    others = ("tiny-Q4_0-00001-of-00002.gguf", "tiny-Q4_0-00002-of-00002.gguf", "tiny-F16.gguf")
    with Hub.running([f"Q8_0/{name}" for name in parts] + [*others], parts) as hub:
        done = resolve(hub, tmp_path / "home", "a/b:Q8_0")
    assert files_in(done) >= {"config.json", "tokenizer.json", "model.safetensors"}
    fetched = {path.rpartition("/")[2] for path in hub.asked if path.startswith("GET") and path.endswith(".gguf")}
    assert fetched == set(parts)
    assert resolve(hub, tmp_path / "home", "a/b:Q8_0").stdout == done.stdout  # NOTE: the hub is gone


HEADER_ONLY = ", has_weights=False"


@pytest.fixture(scope="module")
def large_content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Its configuration needs the numbers of a tensor, which are the last of the file."""
    place = tmp_path_factory.mktemp("large")
    plain = save_tiny_llama(place / "plain", hidden_size=256, intermediate_size=1024, **LLAMA3_ROPE)
    content = write_gguf(plain, place / "large.gguf", extra={"rope_freqs.weight": frequencies()}).read_bytes()
    assert len(content) > 4 << 20
    return content


def described(content: bytes, place: Path) -> dict[str, bytes]:
    """Files that a GGUF file on disk is converted to without its weights, by name."""
    (place / "local").mkdir()
    (place / "local" / "m.gguf").write_bytes(content)
    made = converted(place / "local" / "m.gguf", place / "local" / "cache", has_weights=False)
    return {path.name: path.read_bytes() for path in made.iterdir()}


def contents_of(done: subprocess.CompletedProcess[str]) -> dict[str, bytes]:
    return {name: (Path(done.stdout.strip()) / name).read_bytes() for name in files_in(done)}


@pytest.mark.parametrize("refused", [0, 1])
def test_only_the_header_is_fetched_where_no_weights_are_wanted(
    large_content: bytes, tmp_path: Path, refused: int
) -> None:
    """`refused`: ranges that the hub answers with 503 at first."""
    name = "large-Q8_0.gguf"
    with Hub.running((name, "large-F16.gguf"), {name: large_content}, moves_after_first=True) as hub:
        hub.refused = refused
        done = resolve(hub, tmp_path, "a/b:Q8_0", HEADER_ONLY)
        assert contents_of(done) == described(large_content, tmp_path)
        assert 0 < hub.sent[name] < 1 << 20
        assert f"a/b at its default branch is commit {COMMIT}; name a/b:Q8_0@{COMMIT}" in done.stderr
        assert {path for path in hub.asked if path.startswith("GET") and path.endswith(name)} == {
            f"GET /a/b/resolve/{COMMIT}/{name}"
        }
        assert not [*(tmp_path / "hub").rglob("*.gguf")], "nothing that could be taken for the model"
        sent = hub.sent[name]
        assert resolve(hub, tmp_path, f"a/b:Q8_0@{COMMIT}", HEADER_ONLY).stdout == done.stdout
        assert hub.sent[name] == sent, "it is made once for a commit"
        assert "model.safetensors" in files_in(resolve(hub, tmp_path, f"a/b:Q8_0@{COMMIT}"))
        assert hub.sent[name] == sent + len(large_content)
    for again in ("a/b:Q8_0", f"a/b:Q8_0@{COMMIT}"):
        assert resolve(hub, tmp_path, again, HEADER_ONLY).stdout == done.stdout  # NOTE: the hub is gone


def test_every_part_gives_its_header(tmp_path: Path) -> None:
    """`output.weight` of the last part decides a key of the configuration."""
    plain = save_tiny_llama(tmp_path / "plain", hidden_size=256, intermediate_size=1024)
    first = write_gguf(plain, tmp_path / "large.gguf", tensors_of_a_part=9)
    parts = {path.name: path.read_bytes() for path in part_paths(first)}
    with Hub.running(list(parts), parts) as hub:
        done = resolve(hub, tmp_path / "home", "a/b", HEADER_ONLY)
    whole = write_gguf(plain, tmp_path / "whole.gguf").read_bytes()
    assert contents_of(done) == described(whole, tmp_path)
    assert all(0 < hub.sent[name] <= 1 << 19 for name in parts)
    assert sum(map(len, parts.values())) > 4 << 20
    assert resolve(hub, tmp_path / "home", "a/b", HEADER_ONLY).stdout == done.stdout


def test_a_hub_without_ranges_gives_the_whole_file_and_it_is_said(large_content: bytes, tmp_path: Path) -> None:
    name = "large-Q8_0.gguf"
    with Hub.running((name,), {name: large_content}, has_ranges=False) as hub:
        done = resolve(hub, tmp_path, "a/b", HEADER_ONLY)
    assert contents_of(done) == described(large_content, tmp_path)
    assert f"{name}: the server ignores ranges, so the whole file is downloaded" in done.stderr
    assert hub.sent[name] >= len(large_content)


def test_a_file_that_is_here_is_not_fetched_again_for_its_header(large_content: bytes, tmp_path: Path) -> None:
    name = "large-Q8_0.gguf"
    with Hub.running((name,), {name: large_content}) as hub:
        assert "model.safetensors" in files_in(resolve(hub, tmp_path, "a/b"))
        sent = hub.sent[name]
        assert contents_of(resolve(hub, tmp_path, "a/b", HEADER_ONLY)) == described(large_content, tmp_path)
        assert hub.sent[name] == sent == len(large_content)


def test_a_header_that_is_none_is_refused_before_the_rest_is_fetched(large_content: bytes, tmp_path: Path) -> None:
    name = "large-Q8_0.gguf"
    with Hub.running((name,), {name: b"GGML" + large_content[4:]}) as hub:
        done = resolve(hub, tmp_path, "a/b", HEADER_ONLY)
    last = done.stderr.splitlines()[-1]
    assert f"CorruptCheckpointError: a/b@{COMMIT}/{name}: begins with b'GGML' and not with b'GGUF'" in last
    assert "name another file or revision" in last
    assert hub.sent[name] == 1 << 19


def test_the_parts_of_a_directory_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_CACHE_DIR", str(tmp_path / "cache"))
    place = tmp_path / "files"
    place.mkdir()
    first = write_gguf(save_tiny_llama(tmp_path / "plain"), place / "tiny.gguf", tensors_of_a_part=9)
    assert resolve_model_path(str(place)) == resolve_model_path(str(first))
    assert served_name(str(first)) == "tiny"


def test_f16_is_not_bf16(gguf_content: bytes, tmp_path: Path) -> None:
    with Hub.running(GGUF_NAMES, {"tiny.F16.gguf": gguf_content}) as hub:
        assert "config.json" in files_in(resolve(hub, tmp_path, "a/b:F16"))


@pytest.mark.parametrize(
    ("names", "name", "message"),
    [
        (
            GGUF_NAMES,
            "a/b",
            "'a/b' has 3 GGUF files that fit (tiny-BF16.gguf, tiny-Q8_0.gguf, tiny.F16.gguf); name one",
        ),
        (GGUF_NAMES, "a/b:tiny", "as a/b:Q4_K_M"),
        (GGUF_NAMES, "a/b:Q5_K_M", "'a/b' has no GGUF file with 'Q5_K_M' in its name; it has tiny-BF16.gguf, "),
        (SMALL_MODEL, "a/b:Q8_0", "'a/b' has no GGUF file; leave :Q8_0 away"),
    ],
)
def test_a_repository_with_several_files_or_none_says_which(
    names: tuple[str, ...], name: str, message: str, tmp_path: Path
) -> None:
    with Hub.running(names) as hub:
        done = resolve(hub, tmp_path, name)
    assert "CheckpointError" in done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert not any(path.startswith("GET") and path.endswith(".gguf") for path in hub.asked)


def test_a_model_is_called_after_its_directory_or_its_name_on_the_hub(tmp_path: Path) -> None:
    assert served_name(str(tmp_path)) == tmp_path.name
    assert served_name("org/name@v1") == served_name("org/name") == "org/name"
    assert served_name("org/name:Q4_K_M@v1") == "org/name:Q4_K_M"
