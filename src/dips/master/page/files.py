"""The page's own files, read once from the package: no requested path can lead to any other file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    "LICENSE": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class StaticFile:
    """A file of the page. tag: changes with the content, so that a browser can check its copy with a short request."""

    body: bytes
    content_type: str
    tag: str


def static_files() -> Mapping[str, StaticFile]:
    """Path below /static/ -> file, for all files in the package's folder static."""
    return dict(_walk(files("dips.master.page") / "static", ""))


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found: list[tuple[str, StaticFile]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
            continue
        kind = next((kind for end, kind in _TYPES.items() if entry.name.endswith(end)), None)
        if kind is not None:
            body = entry.read_bytes()
            tag = hashlib.sha256(body).hexdigest()[:32]
            found.append((f"{prefix}{entry.name}", StaticFile(body, kind, tag)))
    return found
