"""The published schemas of Kubernetes, strict, as kubernetes-validate ships them; each is read once."""

from __future__ import annotations

import functools
from typing import Any

import jsonschema
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource


class Unfit(Exception):
    """An object that its schema refuses; the place and the reason."""


def check(document: dict[str, Any], version: str) -> None:
    """Raises Unfit. version: such as 1.31. FileNotFoundError: there is no published schema of the kind."""
    try:
        _validator(document["apiVersion"], document["kind"], version).validate(document)
    except jsonschema.ValidationError as error:
        raise Unfit(f"{'.'.join(str(part) for part in error.path)}: {error.message}") from error


@functools.cache
def _validator(api_version: str, kind: str, version: str) -> Any:
    group, _, rest = api_version.rpartition("/")
    name = f"{kind.lower()}-{group.split('.')[0]}-{rest}" if group else f"{kind.lower()}-{rest}"
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema = schema_contents(f"{folder}/{name}.json", version)
    registry = Resource.from_contents(schema) @ _definitions(folder, version)
    return jsonschema.Draft202012Validator(schema, registry=registry.crawl())


@functools.cache
def _definitions(folder: str, version: str) -> Any:
    return (Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version)) @ Registry()).crawl()
