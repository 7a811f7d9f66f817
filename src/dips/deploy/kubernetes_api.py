"""A client of one API server: gets, lists, creates, patches and deletes objects, and runs commands in pods; errors
become sentences.

The only module of the deployment that knows the client of Kubernetes. It asks for no discovery:
the kinds are those of objects.py. It must never retry by itself, and never print what is in a secret.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import urllib3
import yaml
from kubernetes import config
from kubernetes.client import ApiClient, CoreV1Api, VersionApi
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from kubernetes.dynamic import DynamicClient
from kubernetes.stream import stream
from kubernetes.stream.ws_client import ERROR_CHANNEL, STDERR_CHANNEL, STDIN_CHANNEL, STDOUT_CHANNEL
from websocket import ABNF, WebSocketException

from dips.core.errors import ConfigError, DipsError, FatalError, RetryLater
from dips.deploy.objects import API_VERSIONS, EXTENSIONS, PLURALS, Object

CALL_S = 15.0
STALL_S = 300.0
"""A command that reads or writes nothing for so long is given up."""

MOST_SAID_BYTES = 2000
"""Of what a failed command says, its end."""

MERGE_PATCH = "application/merge-patch+json"
OLDEST = (1, 28)
"""Release of Kubernetes: slaves find their settings by a label that pods of a StatefulSet have since then."""

OLD_RELEASES_VARIABLE = "DIPS_OLD_KUBERNETES"
"""Set to 1, older releases are tried all the same."""


class NotPermitted(ConfigError):
    """The API server refuses a request for want of a right."""


class NotThere(ConfigError):
    """The API server does not know the object, or its kind."""


class KubernetesApi:
    """The API server of one context, in one namespace. Every call raises DipsError with a sentence."""

    def __init__(self, client: ApiClient, context: str, namespace: str) -> None:
        client.configuration.retries = False
        self.context = context
        self.namespace = namespace
        self._host = str(client.configuration.host)
        self._client: Any = DynamicClient(client, discoverer=_NoDiscovery)
        self._plain = client

    def release(self) -> tuple[str, str]:
        """The release that the API server says it is, and its Date."""
        told, _, headers = self._answer(
            "its release", lambda: VersionApi(self._plain).get_code_with_http_info(_request_timeout=CALL_S)
        )
        return str(told.git_version), str(headers.get("Date", ""))

    def check_release(self) -> None:
        """Raise ConfigError when the API server is older than OLDEST."""
        version, _ = self.release()
        found = re.match(r"v?(\d+)\.(\d+)", version)
        if found and tuple(map(int, found.groups())) < OLDEST and os.environ.get(OLD_RELEASES_VARIABLE) != "1":
            raise ConfigError(
                f"context {self.context!r} is Kubernetes {version}, and {'.'.join(map(str, OLDEST))} or newer is "
                f"needed: update it, or set {OLD_RELEASES_VARIABLE}=1 to try"
            )

    def get(self, kind: str, name: str) -> Object | None:
        """None when it is not there. A namespace that the user may use but not see is taken to be there."""
        try:
            return self._call("get", f"{self._folder(kind)}/{name}", f"{kind} {name}", missing_is_none=True)
        except NotPermitted:
            if kind != "Namespace":
                raise
            return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}

    def list(self, kind: str, labels: Mapping[str, str]) -> list[Object]:
        """Those of this namespace with all of the labels. None when the API server does not know the kind; of an
        extension's kind also when the user may not list it, since a run need not use it.
        """
        wanted = ",".join(f"{key}={value}" for key, value in labels.items())
        what = f"the list of {PLURALS[kind]}"
        try:
            found = self._call("get", self._folder(kind), what, missing_is_none=True, label_selector=wanted)
        except NotPermitted:
            if kind not in EXTENSIONS:
                raise
            return []
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

    def output_of(self, pod: str, command: Sequence[str], wait_s: float) -> str:
        """What a command prints that is run in the only container of a pod, whatever its exit code is. Raises DipsError
        when it cannot be run, or has not ended after wait_s.
        """
        with self._running(pod, command) as running:
            running.run_forever(timeout=wait_s)
            if running.is_open():
                raise RetryLater(
                    f"{self._pod(pod)}: `{' '.join(command)}` has not ended after {wait_s:.0f} s: try again"
                )
            return str(running.read_stdout())

    def printed(self, pod: str, command: Sequence[str]) -> Iterator[bytes]:
        """What such a command prints, piece by piece. Raises DipsError, at the end also when it failed."""
        with self._running(pod, command, stderr=True) as running:
            streams = _Streams(running.sock, self._pod(pod), command)
            while not streams.ended:
                if data := streams.take():
                    yield data

    def feed(self, pod: str, command: Sequence[str], chunks: Iterable[bytes]) -> None:
        """Run a command with these bytes as its standard input. It must know by itself when it has all, as tar does.

        Raises DipsError when it cannot be run, or as soon as it fails.
        """
        with self._running(pod, command, stdin=True, stderr=True) as running:
            streams = _Streams(running.sock, self._pod(pod), command)
            for chunk in chunks:
                streams.write(chunk)
            while not streams.ended:
                streams.take()

    @contextlib.contextmanager
    def _running(self, pod: str, command: Sequence[str], stdin: bool = False, stderr: bool = False) -> Iterator[Any]:
        """The connection to a command that runs in a pod. Raises ConfigError when it cannot be run or breaks."""
        # A client of its own: stream() leaves its way to send in the one that it was given.
        pods: Any = CoreV1Api(ApiClient(self._plain.configuration))
        try:
            running = stream(
                pods.connect_get_namespaced_pod_exec, pod, self.namespace, command=list(command), stdout=True,
                stderr=stderr, stdin=stdin, tty=False, _preload_content=False, _request_timeout=CALL_S,
            )  # fmt: skip
            running.sock.settimeout(STALL_S)
            try:
                yield running
            finally:
                running.sock.shutdown()  # close() leaves the socket open where the server has ended the stream
        except (ApiException, OSError, WebSocketException) as error:
            why = " ".join(str(getattr(error, "reason", None) or error).split())
            raise ConfigError(
                f"{self._pod(pod)}: no command can be run there ({why}): see that the pod runs, and that your user may "
                "get and create pods/exec"
            ) from error

    def _pod(self, name: str) -> str:
        return f"context {self.context!r}, pod {name}"

    def _write(self, verb: str, path: str, document: Object, dry_run: bool, **more: Any) -> Object | None:
        dry: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        what = f"{document['kind']} {document['metadata']['name']}"
        return self._call(verb, path, what, field_manager="dips", **dry, **more)

    def _folder(self, kind: str) -> str:
        version = API_VERSIONS.get(kind, "v1")
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        return f"{root}/namespaces" if kind == "Namespace" else f"{root}/namespaces/{self.namespace}/{PLURALS[kind]}"

    def _call(self, verb: str, path: str, what: str, missing_is_none: bool = False, **more: Any) -> Object | None:
        send = functools.partial(
            self._client.request, verb, path, query_params=[], header_params={}, _request_timeout=CALL_S, **more
        )
        try:
            found: Object = self._answer(what, send).to_dict()
        except NotThere:
            if missing_is_none:
                return None
            raise
        return found

    def _answer(self, what: str, send: Callable[[], Any]) -> Any:
        """What the client gives for a request. Raises DipsError."""
        try:
            return send()
        except ApiException as error:
            raise self._sentence(error, what) from error
        except urllib3.exceptions.HTTPError as error:
            raise RetryLater(
                f"the API server of context {self.context!r} at {self._host} does not answer: check that it runs and "
                f"that this machine reaches it ({_innermost(error)})"
            ) from error

    def _sentence(self, error: ApiException, what: str) -> DipsError:
        try:  # the server's own sentence, without the whole answer
            words = str(json.loads(error.body or "")["message"])
        except (TypeError, ValueError, KeyError):
            words = " ".join(str(error.reason).split())
        where = f"context {self.context!r}"
        match error.status:
            case 0:
                return ConfigError(f"the API server of {where} at {self._host} cannot be trusted: {words}")
            case 401:
                return ConfigError(f"{where} does not know who you are: renew its credentials in the kubeconfig")
            case 403 if "is being terminated" in words:
                return RetryLater(f"{where}: {words}; try again when it is gone")
            case 403:
                return NotPermitted(
                    f"{where} does not permit it: {words}; ask its administrator for that right (docs/deploy.md, "
                    "Rights: what `dips deploy rights` prints, and what `dips doctor` needs more)"
                )
            case 404:
                remedy = EXTENSIONS.get(what.split()[0], "make the namespace, or check the context")
                return NotThere(f"{where} has no place for {what}: {words}; {remedy}")
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


class _Streams:
    """The standard streams of a command that runs in a pod, over one WebSocket, in the channels of Kubernetes.

    The client's own reading gathers all that is there before it gives anything back, and its writing reads nothing.
    """

    def __init__(self, web_socket: Any, where: str, command: Sequence[str]) -> None:
        self.ended = False
        self._web_socket = web_socket
        self._where = where
        self._command = " ".join(" ".join(command).split())
        self._said = b""

    def take(self) -> bytes:
        """What the next message has of standard output; ended after the last. Raises ConfigError with the command's own
        words when its exit code is not 0.
        """
        kind, frame = self._web_socket.recv_data_frame(True)
        data = bytes(frame.data)
        if kind == ABNF.OPCODE_CLOSE:
            raise RetryLater(f"{self._where}: the connection ended before `{self._command}` did: try again")
        if kind not in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) or len(data) < 2:
            return b""
        if data[0] == STDERR_CHANNEL:
            self._said = (self._said + data[1:])[-MOST_SAID_BYTES:]
        elif data[0] == ERROR_CHANNEL:
            self.ended = True
            if json.loads(data[1:]).get("status") != "Success":
                words = " ".join(self._said.decode(errors="replace").split()) or data[1:].decode(errors="replace")
                raise ConfigError(f"{self._where}: `{self._command}` failed: {words}")
        return data[1:] if data[0] == STDOUT_CHANNEL else b""

    def write(self, data: bytes) -> None:
        """Send bytes to standard input, and take meanwhile what the command says: when it has ended the server reads no
        more, and who only sends would wait until the stall time-out and never read why. Raises as take() does.
        """
        tcp = self._web_socket.sock
        frame = memoryview(ABNF.create_frame(bytes([STDIN_CHANNEL]) + data, ABNF.OPCODE_BINARY).format())
        poll = select.poll()
        poll.register(tcp, select.POLLIN | select.POLLOUT)
        tcp.settimeout(0)
        while frame and not self.ended:
            decrypted = isinstance(tcp, ssl.SSLSocket) and tcp.pending()
            events = [(0, select.POLLIN)] if decrypted else poll.poll(STALL_S * 1000)
            if not events:
                raise TimeoutError(f"it has read nothing for {STALL_S:.0f} s")
            # What can be read may be a part of a message, which the client keeps, or a ticket of TLS.
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                if events[0][1] & ~select.POLLOUT:
                    self.take()
                else:
                    frame = frame[tcp.send(frame) :]
        tcp.settimeout(STALL_S)


class _NoDiscovery:
    """In the place of a discoverer: the kinds are known."""

    def __init__(self, client: object, cache_file: object) -> None:
        pass


def _innermost(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return _innermost(reason) if isinstance(reason, BaseException) else str(error)


# ---- contexts --------------------------------------------------------------------------------------------------------
#
# Finds and opens the Kubernetes clusters that this machine has access to: the contexts of the kubeconfig.


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
