"""Building images and publishing a release, with stand-ins for docker and twine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.repository import ROOT

from dips.core.release import VERSION

WHEEL, ARCHIVE = f"dist/dips_training-{VERSION}-py3-none-any.whl", f"dist/dips_training-{VERSION}.tar.gz"
REGISTRY = "registry.example.org/dips"
ROLES = ("master", "slave", "worker")

DOCKER = """
import json, os, pathlib, sys
words = sys.argv[1:]
at = pathlib.Path(os.environ["STAND_IN"])
images = json.loads(at.read_text()) if at.exists() else {}
with open(os.environ["CALLS"], "a") as calls:
    print("docker", *words, file=calls)
if words[0] == "build":
    name = words[words.index("--tag") + 1]
    images[name] = dict(words[i + 1].split("=", 1) for i, word in enumerate(words) if word == "--label")
    at.write_text(json.dumps(images))
elif words[0] == "push" and os.environ.get("REFUSES"):
    sys.exit("denied")
elif words[:2] == ["image", "inspect"]:
    if words[-1] not in images:
        sys.exit(1)
    asked = words[3] if words[2] == "--format" else ""
    if "Labels" in asked:
        print(images[words[-1]].get(asked.split('"')[1], ""))
    elif "RepoDigests" in asked:
        print("elsewhere.example.org/x@sha256:0", words[-1].rpartition(":")[0] + "@sha256:1234", sep="\\n")
    else:
        print("sha256:abcd")
"""
TWINE = """
import os, sys
with open(os.environ["CALLS"], "a") as calls:
    print("twine", *sys.argv[1:], os.environ.get("TWINE_USERNAME", ""), file=calls)
"""


class Checkout:
    """A clean checkout with a release to be, and what its scripts call."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.calls = folder / "calls"
        for name in ("deploy/images.sh", "deploy/publish.sh", "src/dips/core/release.py", "Dockerfile"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, self.root / name)
        (self.root / "CHANGELOG.md").write_text(f"## [{VERSION}]\n")
        (self.root / ".gitignore").write_text("dist\n")
        programs = folder / "bin"
        programs.mkdir()
        for name, text in (("docker", DOCKER), ("twine", TWINE)):
            (programs / name).write_text(f"#!{sys.executable}\n{text}")
            (programs / name).chmod(0o755)
        self.environment = {
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(folder),
            "STAND_IN": str(folder / "images"),
            "CALLS": str(self.calls),
            "GIT_CONFIG_GLOBAL": os.devnull,
        }
        self.git("init", "-q")
        self.commit()

    def git(self, *words: str) -> str:
        names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        done = subprocess.run(
            ["git", *names, *words], cwd=self.root, env=self.environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "a release")

    def run(self, script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.root / "deploy" / script), *words]
        environment = {**self.environment, **more}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def packages(self) -> None:
        for name in (WHEEL, ARCHIVE):
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text("")

    def called(self, *words: str) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if line.startswith(" ".join(words))]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_images_have_labels_and_their_names_are_printed(checkout: Checkout) -> None:
    done = checkout.run(
        "images.sh", IMAGES=REGISTRY, SOURCE_URL="https://me:secret@git.example.org/dips.git", TORCH_INDEX="https://cpu"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{REGISTRY}/dips-{role} {VERSION} sha256:abcd" for role in ROLES]
    builds = checkout.called("docker build")
    assert len(builds) == len(ROLES)
    labels = {
        "title": "dips-master",
        "version": VERSION,
        "licenses": "Apache-2.0",
        "source": "https://git.example.org/dips",
        "revision": checkout.git("rev-parse", "HEAD"),
    }
    for name, value in labels.items():
        assert f"--label org.opencontainers.image.{name}={value} " in builds[0]
    assert "--target master " in builds[0]
    assert "--build-arg TORCH_INDEX=https://cpu " in builds[0]


@pytest.mark.parametrize("quote", ["", '"', "'"])
def test_the_base_image_is_the_one_that_compose_reads_in_the_settings_file(checkout: Checkout, quote: str) -> None:
    (checkout.root / ".env").write_text(f"BASE=old\nBASE={quote}python:3.11-slim@sha256:1{quote}\n")
    assert checkout.run("images.sh", "master").returncode == 0
    [build] = checkout.called("docker build")
    assert "--build-arg BASE=python:3.11-slim@sha256:1 " in build


def test_an_image_says_that_it_has_what_is_not_committed(checkout: Checkout) -> None:
    (checkout.root / "Dockerfile").write_text((checkout.root / "Dockerfile").read_text() + "\n")
    assert checkout.run("images.sh", "master", "nothing").returncode == 2
    assert not checkout.called("docker build"), "there is no such role"
    done = checkout.run("images.sh", "master")
    assert done.stdout == f"dips/dips-master {VERSION} sha256:abcd\n"
    assert "set SOURCE_URL" in done.stderr
    [build] = checkout.called("docker build")
    assert f"revision={checkout.git('rev-parse', 'HEAD')}-dirty" in build
    assert "image.source" not in build


def test_a_dry_run_names_each_command_and_what_is_missing_and_does_nothing(checkout: Checkout) -> None:
    done = checkout.run("publish.sh", "--dry-run", IMAGES=REGISTRY)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:3] == [f"would run: docker push {REGISTRY}/dips-{role}:{VERSION}" for role in ROLES]
    assert lines[3].endswith(f"upload --non-interactive {WHEEL} {ARCHIVE}")
    make = f"make images IMAGES={REGISTRY} TAG={VERSION}"
    assert lines[4:] == [
        *(f"missing: there is no image {REGISTRY}/dips-{role}:{VERSION}: {make}" for role in ROLES),
        *(f"missing: there is no {name}: make dist" for name in (WHEEL, ARCHIVE)),
        "missing: there is no token of the package index: set TWINE_PASSWORD (for another than PyPI also "
        "TWINE_REPOSITORY_URL)",
    ]
    assert not checkout.called("docker push")
    assert not checkout.called("twine")


def test_a_release_is_published_packages_last(checkout: Checkout) -> None:
    checkout.run("images.sh", IMAGES=REGISTRY)
    checkout.packages()
    refused = checkout.run("publish.sh", IMAGES=REGISTRY, TWINE_PASSWORD="secret", REFUSES="1")
    assert refused.returncode == 2
    assert "was refused: docker login registry.example.org" in refused.stderr
    assert not checkout.called("twine upload")
    checkout.calls.unlink()
    done = checkout.run("publish.sh", IMAGES=REGISTRY, TWINE_PASSWORD="secret")
    assert done.returncode == 0, done.stderr
    published = [line for line in checkout.called("") if " push " in line or " upload " in line]
    assert published == [
        *(f"docker push {REGISTRY}/dips-{role}:{VERSION}" for role in ROLES),
        f"twine upload --non-interactive {WHEEL} {ARCHIVE} __token__",
    ]
    assert done.stdout.splitlines() == [
        "for the file of dips deploy:",
        f'images = "{REGISTRY}"',
        f'tag = "{VERSION}"',
        'digests = ["master=sha256:1234", "slave=sha256:1234", "worker=sha256:1234"]',
    ]
    assert "secret" not in done.stdout + done.stderr


def test_nothing_is_published_when_anything_is_missing(checkout: Checkout) -> None:
    checkout.run("images.sh", IMAGES=REGISTRY)
    checkout.packages()
    (checkout.root / "CHANGELOG.md").write_text("## [Unreleased]\n")
    checkout.commit()
    done = checkout.run("publish.sh", IMAGES=REGISTRY, TWINE_PASSWORD="secret")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"publish: CHANGELOG.md has no section [{VERSION}]: write it below the line of [Unreleased]",
        *(
            f"publish: the image {REGISTRY}/dips-{role}:{VERSION} is not of this commit and version: "
            f"make images IMAGES={REGISTRY} TAG={VERSION}"
            for role in ROLES
        ),
        "publish: nothing was published",
    ]
    assert not [line for line in checkout.called("") if " push " in line or " upload " in line]


@pytest.mark.parametrize("words", [["--now"], ["--only", "x"], ["--only"]])
def test_a_wrong_option_is_told(checkout: Checkout, words: list[str]) -> None:
    done = checkout.run("publish.sh", *words)
    assert done.returncode == 2
    assert "--only " in done.stderr
    assert done.stdout == ""
