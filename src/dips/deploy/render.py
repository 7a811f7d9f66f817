"""Writes a deployment as files: a folder for each context with a kustomization, and scripts for other sites."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from dips.core.errors import ConfigError
from dips.deploy import plan
from dips.deploy.deploy_file import Deployment
from dips.deploy.objects import Object, as_yaml
from dips.deploy.scripts import script

MARK = "# Written by `dips deploy render` from {file}: change that, or patch this in an overlay.\n"


def write_folders(deployment: Deployment, output: Path) -> Iterator[Path]:
    """DIR/servers, DIR/cluster-ID, and DIR/scripts; yields each file. Raises ConfigError when one cannot be written."""
    for folder, objects in folders(deployment).items():
        yield from write_kustomization(output / folder, objects, str(deployment.file))
    for cluster in plan.elsewhere(deployment):
        name, text = script(deployment, cluster)
        yield _write(output / "scripts" / name, text, 0o755)


def folders(deployment: Deployment) -> dict[str, list[Object]]:
    """The objects by folder, without secrets. Namespaces too: the one who applies the files decides about them."""
    found: dict[str, list[Object]] = {}
    for stage in plan.stages(deployment):
        name = f"cluster-{stage.title.split()[1]}" if stage.title.startswith("cluster ") else "servers"
        kept = [one for one in stage.objects if one["kind"] not in ("Secret", "Namespace")]
        found.setdefault(name, []).extend(kept)
    return found


def write_kustomization(folder: Path, objects: Iterable[Object], file: str) -> Iterator[Path]:
    """One file for each kind, and a kustomization that lists them."""
    by_kind: dict[str, list[Object]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"].lower(), []).append(one)
    mark = MARK.format(file=file)
    for kind, ones in by_kind.items():
        yield _write(folder / f"{kind}.yaml", mark + as_yaml(*ones))
    top = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [f"{kind}.yaml" for kind in by_kind],
    }
    yield _write(folder / "kustomization.yaml", mark + as_yaml(top))


def _write(file: Path, text: str, mode: int = 0o644) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another folder") from error
    return file
