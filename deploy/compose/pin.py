"""deploy/images.sh --pin: writes the digests of the images that are pulled, as their registries give them, into .env.

docker-compose.yml, deploy/images.sh and `make manifests` read that file; without it tags are used, which may name
other bytes tomorrow. With IMAGES (and TAG) also the digests of the images of master, slave and worker there. Nothing is
written unless every registry has answered. Credentials are those of `docker login`, except of credential helpers.
Needs Python alone.

    python deploy/compose/pin.py             asks registries, and writes .env
    python deploy/compose/pin.py FOLDER      puts these digests into the manifests of a folder, asking no one
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from up import PULLED, ROOT, settings

ROLES = ("master", "slave", "worker")
DIGESTS = "DIPS_DIGESTS"
"""REGISTRY/dips-ROLE:TAG@DIGEST, with commas."""

DOCKER_HUB = "registry-1.docker.io"
HUB_NAMES = ("docker.io", "index.docker.io", DOCKER_HUB)
KINDS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json, "
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json"
)
ANSWER_S = 30.0
MOST_BYTES = 4 << 20
"""Of a manifest: what registries themselves take."""


class Refused(Exception):
    """Why there is no digest, in one sentence."""


def place(name: str) -> tuple[str, str, str]:
    """An image's registry, its path there, and its tag; a digest that the name already has is left out."""
    rest, _, tag = name.partition("@")[0].rpartition(":")
    if not rest or "/" in tag:
        rest, tag = name.partition("@")[0], "latest"
    host, slash, path = rest.partition("/")
    if not (slash and (set(".:") & set(host) or host == "localhost")):
        host, path = DOCKER_HUB, rest
    elif host not in HUB_NAMES:
        return host, path, tag
    return DOCKER_HUB, path if "/" in path else f"library/{path}", tag


def digest_of(name: str, logins: Mapping[str, str]) -> str:
    """The sha256 of what the tag names now, for all processors. Raises Refused."""
    host, path, tag = place(name)
    plain = host.partition(":")[0] in ("localhost", "127.0.0.1")
    url = f"{'http' if plain else 'https'}://{host}/v2/{path}/manifests/{tag}"
    basic = {"Authorization": f"Basic {logins[host]}"} if host in logins else {}
    try:
        try:
            body = _body(url, {"Accept": KINDS, **basic})
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or not challenge.lower().startswith("bearer "):
                raise
            asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
            realm = asked.pop("realm", "")
            if urlsplit(realm).scheme != "https" and not plain:
                raise Refused(f"{host} asks for a login without TLS") from error
            told = json.loads(_body(f"{realm}?{urlencode(asked)}", basic))
            token = told.get("token") or told["access_token"]
            body = _body(url, {"Accept": KINDS, "Authorization": f"Bearer {token}"})
    except urllib.error.HTTPError as error:
        words = f"{host} answers {error.code} for {path}:{tag}"
        raise Refused(f"{words}: docker login {host}" if error.code in (401, 403) else words) from error
    except (OSError, ValueError, KeyError, AttributeError) as error:
        why = getattr(error, "reason", error)
        raise Refused(f"registry {host} does not give the digest of {path}:{tag} ({why})") from error
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


def _body(url: str, headers: Mapping[str, str]) -> bytes:
    request = urllib.request.Request(url)
    for name, value in headers.items():
        # A registry may send us on to another server, which gets no login of ours.
        (request.add_unredirected_header if name == "Authorization" else request.add_header)(name, value)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: bytes = answer.read(MOST_BYTES + 1)
    if len(found) > MOST_BYTES:
        raise ValueError("its answer is no manifest")
    return found


def logins_of(folder: Path) -> dict[str, str]:
    """The logins that `docker login` keeps in its own file, by registry."""
    try:
        kept = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auths", {})
        names = {"https://index.docker.io/v1/": DOCKER_HUB}
        return {names.get(host, host): one["auth"] for host, one in kept.items() if one.get("auth")}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def main(file: Path = ROOT / ".env") -> int:
    found = settings(os.environ, file)
    logins = logins_of(Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker"))
    # An image that .env has already keeps its name and tag, and gets the digest of today.
    names = {key: (found.get(key) or default).partition("@")[0] for key, default in PULLED.items()}
    try:
        lines = {key: f"{name}@{digest_of(name, logins)}" for key, name in names.items()}
        if images := found.get("IMAGES"):
            own = [f"{images}/dips-{role}:{os.environ['TAG']}" for role in ROLES]
            digests = [digest_of(name, logins) for name in own]
            lines[DIGESTS] = ",".join(f"{name}@{digest}" for name, digest in zip(own, digests, strict=True))
    except Refused as refused:
        print(f"images: {refused}: nothing was written, and tags are used as before", file=sys.stderr)
        return 2
    kept = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    kept = [line for line in kept if line.partition("=")[0].strip() not in lines]
    new = file.with_name(f"{file.name}.new")
    new.touch()
    if file.is_file():
        shutil.copymode(file, new)  # it may hold passwords
    new.write_text("\n".join([*kept, *(f"{key}={value}" for key, value in lines.items()), ""]), encoding="utf-8")
    new.replace(file)
    for key, value in lines.items():
        print(f"{key}={value}")
    if DIGESTS in lines:
        print(
            "for the file of dips deploy: digests =", json.dumps(list(map("=".join, zip(ROLES, digests, strict=True))))
        )
    return 0


def pin_manifests(folder: Path, images: Sequence[str]) -> None:
    """Put digests behind the names of images; of images with another registry or tag they would name other bytes."""
    known = {image.partition("@")[0]: image for image in images}
    for path in folder.rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        pinned = re.sub(r"(?<=image: )\S+$", lambda found: known.get(found[0], found[0]), text, flags=re.MULTILINE)
        if pinned != text:
            path.write_text(pinned, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:]:
        pin_manifests(Path(sys.argv[1]), settings(os.environ).get(DIGESTS, "").split(","))
    else:
        sys.exit(main())
