"""Reads of git: files, commit subjects, and an earlier version of a file. All of them answer without a history, too."""

import subprocess
from datetime import datetime
from pathlib import Path

SKIPPED = {".venv", "build", "dist", "node_modules", "__pycache__"}


class History:
    """The checkout in one folder. A folder without git has files, and no commits."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def files(self, suffix: str) -> list[Path]:
        """Files that git tracks or would track; without git all files outside of hidden and generated folders."""
        listed = self._git("ls-files", "--cached", "--others", "--exclude-standard", f"*{suffix}")
        if listed is not None:
            return [path for line in listed.splitlines() if (path := self._root / line).is_file()]
        found = (path for path in self._root.rglob(f"*{suffix}") if path.is_file())
        return [path for path in found if not any(_is_skipped(part) for part in path.relative_to(self._root).parts)]

    def subjects_since(self, base: str) -> list[tuple[str, str]]:
        """Short name and subject of each commit that was made after `base`, an ISO time, and is no merge."""
        listed = self._git("log", "--no-merges", "--format=%h%x09%aI%x09%s") or ""
        commits = (line.split("\t", 2) for line in listed.splitlines())
        since = datetime.fromisoformat(base)
        return [(name, subject) for name, made, subject in commits if datetime.fromisoformat(made) > since]

    def before(self, path: str) -> str | None:
        """The file's text where this branch left main; None where there is no such commit or no such file in it."""
        for main in ("main", "origin/main"):
            if commit := self._git("merge-base", "HEAD", main):
                return self._git("show", f"{commit.strip()}:{path}")
        return None

    def _git(self, *words: str) -> str | None:
        try:
            done = subprocess.run(["git", *words], cwd=self._root, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return done.stdout if done.returncode == 0 else None


def _is_skipped(part: str) -> bool:
    return part.startswith(".") or part in SKIPPED
