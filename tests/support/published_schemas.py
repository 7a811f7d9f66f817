"""The published schemas of Kubernetes, strict, as kubernetes-validate ships them, and the definitions of the Prometheus
operator, as cloudcoil ships them; each is read once."""

from __future__ import annotations

import functools
import importlib
import importlib.util
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


# ---- the Prometheus operator ----


OPERATOR_MODELS = "cloudcoil.models.prometheus_operator"
OPERATOR_GROUP = "monitoring.coreos.com/"


def has_operator_models() -> bool:
    try:
        return importlib.util.find_spec(OPERATOR_MODELS) is not None
    except ModuleNotFoundError:  # of its parent
        return False


def check_of_operator(document: dict[str, Any]) -> None:
    """Raises Unfit for an object of monitoring.coreos.com that its definition refuses, or has no place for."""
    version = document["apiVersion"].removeprefix(OPERATOR_GROUP)
    model = getattr(importlib.import_module(f"{OPERATOR_MODELS}.{version}"), document["kind"])
    try:
        read = model.model_validate(document)
    except ValueError as error:
        raise Unfit(" ".join(str(error).split())) from error
    # The models drop a field that they do not know, as an API server does.
    kept = read.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if lost := sorted(_leaves(document) - _leaves(kept)):
        raise Unfit(f"{document['kind']} has no such field: {', '.join(lost)}")


def _leaves(value: Any, path: str = "") -> set[str]:
    """Each value of a document with its path."""
    if isinstance(value, dict):
        return {leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}")}
    if isinstance(value, list):
        return {leaf for index, item in enumerate(value) for leaf in _leaves(item, f"{path}[{index}]")}
    return {f"{path} = {value!r}"}
