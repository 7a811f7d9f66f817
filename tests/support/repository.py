"""Where the repository is and which of its files are sources."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
SOURCE = ROOT / "src" / "dips"
PACKAGES = sorted(folder.parent.name for folder in SOURCE.glob("*/__init__.py"))


def modules() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if "_pb2" not in path.name)


def texts() -> list[Path]:
    folders = ["src/dips", "tests", "docs", "examples", "benchmarks", "tools", "deploy", ".ci"]
    inside = (path for folder in folders for path in (ROOT / folder).rglob("*"))
    top = (path for path in ROOT.iterdir() if path.name not in ("LICENSE", ".git"))  # .git is a file in a worktree
    return sorted(path for path in (*inside, *top) if path.is_file() and _is_text(path))


def _is_text(path: Path) -> bool:
    if "__pycache__" in path.parts or "_pb2" in path.name:
        return False
    return b"\0" not in path.read_bytes()[:8192]
