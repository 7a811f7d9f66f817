"""The published schemas of Kubernetes, strict, as kubernetes-validate ships them, and the definitions of the Prometheus
operator, as cloudcoil ships them; each is read once. A JobSet's own fields are written here: no package has them."""

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


JOBSET_GROUP = "jobset.x-k8s.io/"

_STRING, _YES_OR_NO, _COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}


def _fields(required: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def _list_of(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": kind}


_REASONS = {
    "enum": [
        *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded"),
        "PodFailurePolicy",
    ]
}
_FAILURE_RULE = _fields(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
    action={"enum": ["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]},
    onJobFailureReasons=_list_of(_REASONS),
    targetReplicatedJobs=_list_of(_STRING),
)
_JOBSET_SPEC = _fields(
    ("replicatedJobs",),
    suspend=_YES_OR_NO,
    network=_fields(enableDNSHostnames=_YES_OR_NO, publishNotReadyAddresses=_YES_OR_NO, subdomain=_STRING),
    failurePolicy=_fields(
        maxRestarts=_COUNT,
        restartStrategy={"enum": ["Recreate", "BlockingRecreate"]},
        rules=_list_of(_FAILURE_RULE),
    ),
    replicatedJobs=_list_of(_fields(("name", "template"), name=_STRING, replicas=_COUNT, template={"type": "object"})),
)
"""What `dips deploy` may write of a jobset.x-k8s.io/v1alpha2 JobSet: names, types and rules as its definition
(kubernetes-sigs/jobset, config/components/crd) and its webhook have them; other fields are left out."""


def check_of_jobset(document: dict[str, Any], version: str) -> None:
    """Raises Unfit for a JobSet with a field or a value that it does not have, or whose Job does not fit."""
    try:
        jsonschema.Draft202012Validator(_JOBSET_SPEC).validate(document["spec"])
    except jsonschema.ValidationError as error:
        raise Unfit(f"{'.'.join(str(part) for part in error.path)}: {error.message}") from error
    for job in document["spec"]["replicatedJobs"]:
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]}, version)
