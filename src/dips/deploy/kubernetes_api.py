"""A client of one API server: gets, lists, creates, patches and deletes objects; errors become sentences.

The only module of the deployment, with contexts.py, that knows the client of Kubernetes. It asks for no discovery:
the kinds are those of objects.py. It must never retry by itself, and never print what is in a secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import urllib3
from kubernetes.client import ApiClient
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient

from dips.core.errors import ConfigError, DipsError, FatalError, RetryLater
from dips.deploy.objects import API_VERSIONS, Object

CALL_S = 15.0
MERGE_PATCH = "application/merge-patch+json"
NOT_FOUND, CONFLICT, UNAUTHORIZED, FORBIDDEN, INVALID, TOO_MANY = 404, 409, 401, 403, 422, 429

PLURALS = {kind: f"{kind.lower()}s" for kind in API_VERSIONS}
PLURALS |= {"NetworkPolicy": "networkpolicies", "Pod": "pods"}


class KubernetesApi:
    """The API server of one context, in one namespace. Every call raises DipsError with a sentence."""

    def __init__(self, client: ApiClient, context: str, namespace: str) -> None:
        client.configuration.retries = False
        self.context = context
        self.namespace = namespace
        self._host = str(client.configuration.host)
        self._client: Any = DynamicClient(client, discoverer=_NoDiscovery)

    def get(self, kind: str, name: str) -> Object | None:
        """None when it is not there."""
        return self._call("get", f"{self._folder(kind)}/{name}", f"{kind} {name}", missing_is_none=True)

    def list(self, kind: str, labels: Mapping[str, str]) -> list[Object]:
        """Those of this namespace with all of the labels; none when the API server does not know the kind."""
        wanted = ",".join(f"{key}={value}" for key, value in labels.items())
        found = self._call(
            "get", self._folder(kind), f"the list of {PLURALS[kind]}", missing_is_none=True, label_selector=wanted
        )
        version = API_VERSIONS.get(kind, "v1")
        return [{"apiVersion": version, "kind": kind, **item} for item in (found or {}).get("items") or []]

    def create(self, document: Object, dry_run: bool = False) -> Object | None:
        return self._write("post", self._folder(document["kind"]), document, dry_run, body=document)

    def patch(self, document: Object, patch: Object, dry_run: bool = False) -> Object | None:
        """A merge patch of the object of that kind and name."""
        path = f"{self._folder(document['kind'])}/{document['metadata']['name']}"
        return self._write("patch", path, document, dry_run, body=patch, content_type=MERGE_PATCH)

    def delete(self, kind: str, name: str, uid: str = "") -> bool:
        """Delete it with all that belongs to it; False when it is not there. uid: only that very object."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if uid:
            body["preconditions"] = {"uid": uid}
        path = f"{self._folder(kind)}/{name}"
        return self._call("delete", path, f"{kind} {name}", missing_is_none=True, body=body) is not None

    def _write(self, verb: str, path: str, document: Object, dry_run: bool, **more: Any) -> Object | None:
        dry: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        what = f"{document['kind']} {document['metadata']['name']}"
        return self._call(verb, path, what, field_manager="dips", **dry, **more)

    def _folder(self, kind: str) -> str:
        version = API_VERSIONS.get(kind, "v1")
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        return f"{root}/namespaces" if kind == "Namespace" else f"{root}/namespaces/{self.namespace}/{PLURALS[kind]}"

    def _call(self, verb: str, path: str, what: str, missing_is_none: bool = False, **more: Any) -> Object | None:
        try:
            answer = self._client.request(
                verb, path, query_params=[], header_params={}, _request_timeout=CALL_S, **more
            )
        except ApiException as error:
            if error.status == NOT_FOUND and missing_is_none:
                return None
            raise self._sentence(error, what) from error
        except urllib3.exceptions.HTTPError as error:
            raise RetryLater(
                f"the API server of context {self.context!r} at {self._host} does not answer: check that it runs and "
                f"that this machine reaches it ({_innermost(error)})"
            ) from error
        found: Object = answer.to_dict()
        return found

    def _sentence(self, error: ApiException, what: str) -> DipsError:
        words, where = _message(error), f"context {self.context!r}"
        match error.status:
            case 0:
                return ConfigError(f"the API server of {where} at {self._host} cannot be trusted: {words}")
            case 401:
                return ConfigError(f"{where} does not know who you are: renew its credentials in the kubeconfig")
            case 403:
                return ConfigError(f"{where} does not permit it: {words}; ask its administrator for that right")
            case 404:
                return ConfigError(f"{where} has no place for {what}: {words}; {_not_known(what)}")
            case 422 if "already allocated" in words:
                return ConfigError(
                    f"{where}: a port of {what} is taken by another service: choose other master_port and data_port "
                    f"({words})"
                )
            case 409 | 400 | 422:
                return ConfigError(f"{where} refuses {what}: {words}; correct the file")
            case 429 | 500 | 502 | 503 | 504:
                return RetryLater(f"{where} is busy: {words}; try again")
        return FatalError(f"{where} answers {error.status} to {what}: {words}")


class _NoDiscovery:
    """In the place of a discoverer: the kinds are known."""

    def __init__(self, client: object, cache_file: object) -> None:
        pass


def _not_known(what: str) -> str:
    if what.startswith("ServiceMonitor"):
        return "install the Prometheus operator there, or set service_monitor = false"
    if what.startswith("JobSet"):
        return "install JobSet there, or set starts = 'job'"
    return "make the namespace, or check the context"


def _message(error: ApiException) -> str:
    """The server's own sentence, without the whole answer."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return " ".join(str(error.reason).split())


def _innermost(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return _innermost(reason) if isinstance(reason, BaseException) else str(error)
