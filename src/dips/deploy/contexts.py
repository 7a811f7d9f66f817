"""Finds and opens the Kubernetes clusters that this machine has access to: the contexts of the kubeconfig."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import urllib3
import yaml
from kubernetes import config
from kubernetes.client import VersionApi
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from dips.core.errors import ConfigError, RetryLater
from dips.deploy.kubernetes_api import CALL_S, KubernetesApi


def known_contexts() -> list[str] | None:
    """Names of all contexts; None when there is no kubeconfig. Raises ConfigError when it cannot be read."""
    try:
        found, _ = config.list_kube_config_contexts(_file())
    except ConfigException as error:
        if "No configuration found" in str(error) or "not found" in str(error).lower():
            return None
        raise _unreadable(error) from error
    except (OSError, yaml.YAMLError, TypeError, AttributeError, KeyError) as error:
        raise _unreadable(error) from error
    return [one["name"] for one in found]


def check_contexts(wanted: Iterable[str], known: list[str] | None) -> None:
    """Raise ConfigError for the first context that is not in the kubeconfig."""
    if known is None:
        raise ConfigError(
            "there is no kubeconfig: set KUBECONFIG to the file with your contexts, or bring it to ~/.kube/config"
        )
    for context in wanted:
        if context not in known:
            raise ConfigError(
                f"the kubeconfig has no context {context!r}; it has {', '.join(known) or 'none'}: correct the site's "
                "context, or add it to the kubeconfig"
            )


def open_context(context: str, namespace: str) -> KubernetesApi:
    """The API server of a context. No request is sent yet. Raises ConfigError."""
    try:
        client = config.new_client_from_config(_file(), context=context, persist_config=False)
    except (ConfigException, OSError, TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"context {context!r} of the kubeconfig cannot be used: {error}") from error
    return KubernetesApi(client, context, namespace)


def release_of(context: str) -> tuple[str, str]:
    """The release that a context's API server says it is, and its Date. Raises DipsError."""
    client = config.new_client_from_config(_file(), context=context, persist_config=False)
    client.configuration.retries = False
    try:
        version, _, headers = VersionApi(client).get_code_with_http_info(_request_timeout=CALL_S)
    except (ApiException, urllib3.exceptions.HTTPError) as error:
        raise RetryLater(f"context {context!r} does not give its release: {type(error).__name__}; try again") from error
    return str(version.git_version), str(headers.get("Date", ""))


def open_from_pod(namespace: str) -> KubernetesApi:
    """The API server of the cluster that this process is a pod of. Raises ConfigError outside of one."""
    from kubernetes.client import ApiClient, Configuration

    found: Any = Configuration()
    try:
        config.load_incluster_config(client_configuration=found)
    except ConfigException as error:
        raise ConfigError(f"this is no pod of Kubernetes ({error}): give --context NAME of a kubeconfig") from error
    return KubernetesApi(ApiClient(found), "this cluster", namespace)


def _file() -> str | None:
    """As the environment says now; the client reads it only once."""
    return os.environ.get("KUBECONFIG") or None


def _unreadable(error: Exception) -> ConfigError:
    return ConfigError(f"the kubeconfig cannot be read: {' '.join(str(error).split())}; check KUBECONFIG")
