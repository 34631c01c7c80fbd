"""The pages' files: complete, named by their contents, free of strangers and of ways to run what a model says."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from tandem.gateway import pages
from tandem.gateway.pages.assets import Assets

STATIC = Path(pages.__file__).parent / "static"
VENDOR = Path(pages.__file__).parent / "vendor"
LICENCES = ("MIT", "BSD-2-Clause", "Apache-2.0")
MAX_SCRIPT_LINES = 2200
WAYS_TO_RUN = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc"


@pytest.fixture(scope="module")
def assets() -> Assets:
    return Assets.load()


def texts(suffix: str) -> dict[str, str]:
    return {path.name: path.read_text() for path in STATIC.iterdir() if path.suffix == suffix}


def test_every_file_is_served_with_its_type(assets: Assets) -> None:
    assert assets.by_name.keys() == {path.name for folder in (STATIC, VENDOR) for path in folder.iterdir()}
    assert assets.by_name["playground.html"].content_type == "text/html; charset=utf-8"
    assert assets.by_name["playground.js"].content_type == "text/javascript; charset=utf-8"
    assert assets.by_name["base.css"].content_type == "text/css; charset=utf-8"
    assert assets.by_name["icon.svg"].content_type == "image/svg+xml"


def test_pages_name_files_of_this_version_that_exist(assets: Assets) -> None:
    for name in texts(".html"):
        named = re.findall(r'"pages/([^/"]+)/([^"]+)"', assets.by_name[name].body.decode())
        assert len(named) >= 4
        assert {digest for digest, _ in named} == {assets.digest}
        assert {file for _, file in named} <= assets.by_name.keys()


def test_modules_import_modules_that_exist() -> None:
    known = texts(".js").keys() | {path.name for path in VENDOR.iterdir()}
    for name, source in texts(".js").items():
        assert set(re.findall(r'from "\./([^"]+)"', source)) <= known, name


def test_files_of_others_are_unchanged_and_come_with_their_licences() -> None:
    """A new version is a new file, a new line in the manifest and the licences of all that it bundles."""
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    licences = (VENDOR / "licences.txt").read_text()
    assert {path.name for path in VENDOR.iterdir()} == {*manifest, "manifest.json", "licences.txt"}
    for name, entry in manifest.items():
        body = (VENDOR / name).read_bytes()
        assert hashlib.sha256(body).hexdigest() == entry["sha256"]
        assert f"{entry['package']} {entry['version']}" in body[:200].decode()
        assert f"{entry['package']} {entry['version']}" in entry["bundles"]
        assert set(entry["bundles"].values()) <= set(LICENCES)
        texts_of = dict(re.findall(r"^== (.+?) ==\n(.+?)(?=^== |\Z)", licences, re.MULTILINE | re.DOTALL))
        assert texts_of.keys() == entry["bundles"].keys()
        assert all("Copyright" in text and "AS IS" in text for text in texts_of.values())


def test_scripts_of_others_run_no_text_and_ask_no_other_host() -> None:
    for path in VENDOR.glob("*.js"):
        found = re.search(rf"{WAYS_TO_RUN}|XMLHttpRequest|\bfetch\(|\bimport\(|WebSocket|EventSource", path.read_text())
        assert not found, (path.name, found)


def test_nothing_comes_from_another_host() -> None:
    for name, source in {**texts(".html"), **texts(".css"), **texts(".js"), **texts(".svg")}.items():
        known = source.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"(https?:)?//[a-z0-9-]+\.[a-z]", known), name
        assert "@import" not in source, name


def test_no_script_can_turn_words_into_markup() -> None:
    """The browser refuses it too, by policy; here it is said which line."""
    for name, source in texts(".js").items():
        found = re.search(WAYS_TO_RUN, source)
        assert not found, (name, found)
    for name, source in texts(".html").items():
        assert not re.search(r"\son[a-z]+=|\sstyle=|<script(?! type=\"module\" src=)", source), name


def test_scripts_stay_small() -> None:
    assert sum(source.count("\n") for source in texts(".js").values()) < MAX_SCRIPT_LINES
    for name, source in texts(".js").items():
        assert source.startswith("/**"), f"{name} does not say what it owns"


PAIRS = [
    *[(text, ground) for text in ("text", "muted") for ground in ("ground", "surface", "sunken")],
    ("accent", "surface"),
    ("accent", "accent-soft"),
    ("on-accent", "accent"),
    *[(tone, f"{tone}-soft") for tone in ("danger", "warn", "good")],
    ("text", "accent-soft"),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_stand_out_from_what_is_behind_them(scheme: str) -> None:
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for the edges of fields and the colours of data."""
    light, dark = (colours(block) for block in re.findall(r":root \{(.*?)\}", texts(".css")["base.css"], re.DOTALL))
    palette = light if scheme == "light" else {**light, **dark}
    for text, ground in PAIRS:
        assert contrast(palette[text], palette[ground]) >= 4.5, (scheme, text, ground)
    for mark in ("strong-line", "used", "cached", "leased", "transferring", "pinned", "other"):
        assert contrast(palette[mark], palette["surface"]) >= 3, (scheme, mark)


def colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z-]+): #([0-9a-f]{6});", block))


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, "contrast ratio"."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """WCAG 2.2, "relative luminance"."""
    channels = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return sum(share * value for share, value in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
