"""A stand-in of the API server of Kubernetes: real HTTP on loopback, objects in memory, no cluster behind it.

It checks every object that is written against the published schemas of one version (kubernetes-validate, strict; of
the kinds of others, which have no published schema there, against their place only), knows dry runs, merge patches,
labels and rights, and plays the controllers' part in the crudest way: what is wanted is there at once, unless a test
says otherwise. It shows that the client's calls are well formed; it does not show that a real API server takes them.

What real servers were seen to do, and it does: rights are looked at before the kind, so that an unknown kind without a
right is refused with 403; who gives rights must have them, also in a dry run, and a role that was only rehearsed is not
there for its binding.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import select
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import yaml
from support.published_schemas import Unfit, check

from dips.deploy.deploy_file import STATE
from dips.deploy.objects import API_VERSIONS, MONITORS, PLURALS

Object = dict[str, Any]
TOKEN = "a-token-of-the-stand-in"
KIND_OF = {plural: kind for kind, plural in PLURALS.items()}
WITHOUT_SCHEMA = ("JobSet", *MONITORS)
EXEC = "pods/exec"
"""No kind, but rights have it."""


_VERBS = {"GET": "get", "POST": "create", "PATCH": "patch", "DELETE": "delete"}


def _resource(kind: str) -> str:
    return ".".join(part for part in (PLURALS[kind], _group(kind)) if part)


class Refusal(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Right:
    """One verb on one kind of object, as RBAC has it. names: only of those objects; empty: of all."""

    verb: str
    kind: str
    names: tuple[str, ...] = ()

    def covers(self, verb: str, kind: str, name: str) -> bool:
        return (self.verb, self.kind) == (verb, kind) and (not self.names or name in self.names)


def rights_of(role: Object) -> Iterator[Right]:
    for rule in role["rules"]:
        for resource in rule["resources"]:
            kind = resource if resource == EXEC else KIND_OF[resource]
            assert rule["apiGroups"] == [_group(kind)], f"{kind} is not in the group {rule['apiGroups']}"
            for verb in rule["verbs"]:
                yield Right(verb, kind, tuple(rule.get("resourceNames", ())))


def _group(kind: str) -> str:
    return API_VERSIONS.get(kind, "v1").rpartition("/")[0]


class StandIn:
    """One stand-in. objects: by (namespace, kind, name). unknown_kinds: of definitions that are not installed."""

    def __init__(self, version: str = "1.31") -> None:
        self.version = version
        self.told_version = version
        """What it says it is; objects are checked against the schemas of `version`."""
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.calls: list[tuple[str, str]] = []
        self.writes: list[tuple[str, str, str]] = []
        self.unknown_kinds: set[str] = set()
        self.forbidden: set[tuple[str, str]] = set()
        self.rights: Collection[Right] | None = None
        """What the user may do; None: everything."""
        self.used: set[tuple[str, str]] = set()
        """Verbs and kinds of which a right was needed."""
        self.in_pod: Callable[[str, list[str]], tuple[bytes, int]] = lambda pod, command: (b"", 127)
        """What a command in a pod prints, and its exit code."""
        self.volumes: Path | None = None
        """Where volumes are folders, by their claims: commands in pods that mount one run on them in this machine."""
        self.python_begins_with = ""
        """What the Python of these pods runs before its code, to be another one than that of this machine."""
        self.broken: Callable[[Object], None] | None = None
        self.lock = threading.RLock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> StandIn:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def of_kind(self, kind: str) -> list[str]:
        return sorted(name for _, found, name in self.objects if found == kind)

    def one(self, kind: str, name: str) -> Object:
        (found,) = [one for (_, k, n), one in self.objects.items() if (k, n) == (kind, name)]
        return found

    def command_in_pod(self, path: str, query: str) -> tuple[str, list[str], Path | None]:
        """Pod and command of a request, and the folder that is the pod's volume. Raises Refusal."""
        name = path.split("/")[-2]
        self.calls.append(("EXEC", "Pod"))
        for verb in ("get", "create"):  # the request is a GET; from 1.35 on a WebSocket needs the second one too
            if ("EXEC", "Pod") in self.forbidden or not self._may(verb, EXEC, name):
                raise Refusal(403, f'pods "{name}" is forbidden: User "tester" cannot {verb} resource "pods/exec"')
        pods = [one for (_, kind, found), one in self.objects.items() if (kind, found) == ("Pod", name)]
        if not pods:
            raise Refusal(404, f'pods "{name}" not found')
        folder = None
        for volume in pods[0].get("spec", {}).get("volumes", []):
            if self.volumes is not None and "persistentVolumeClaim" in volume:
                folder = self.volumes / volume["persistentVolumeClaim"]["claimName"]
                folder.mkdir(parents=True, exist_ok=True)
        return name, [word.replace(STATE, str(folder)) for word in parse_qs(query)["command"]], folder

    def serve(self, method: str, path: str, query: dict[str, str], body: Object | None) -> Object:
        if path.rstrip("/") == "/version":
            return self._release()
        kind, namespace, name = self._place(path)
        with self.lock:
            self.calls.append((method, kind))
            if (method, kind) in self.forbidden:
                raise Refusal(403, f'{PLURALS[kind]} is forbidden: User "tester" cannot {method.lower()} it')
            self._authorise(_VERBS[method] if name or method != "GET" else "list", kind, namespace, name)
            if kind in self.unknown_kinds:
                raise Refusal(404, "the server could not find the requested resource")
            dry = query.get("dryRun") == "All"
            if method == "GET":
                return self._get(kind, namespace, name) if name else self._list(kind, namespace, query)
            if method == "DELETE":
                return self._delete(kind, namespace, name, body or {})
            if method == "POST":
                return self._create(kind, namespace, body or {}, dry)
            return self._patch(kind, namespace, name, body or {}, dry)

    def _release(self) -> Object:
        major, minor = self.told_version.split(".")
        build = ("gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")
        told = dict.fromkeys(build, "stand-in")
        return {**told, "major": major, "minor": minor, "gitVersion": f"v{self.told_version}.0"}

    def _place(self, path: str) -> tuple[str, str, str]:
        parts = path.strip("/").split("/")
        root, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        if len(rest) <= 2:  # namespaces themselves
            kind, namespace, name = KIND_OF[rest[0]], "", (*rest, "")[1]
        else:
            kind, namespace, name = KIND_OF[rest[2]], rest[1], (*rest, "")[3]
        if API_VERSIONS[kind] != root:
            raise Refusal(404, "the server could not find the requested resource")
        return kind, namespace, name

    def _authorise(self, verb: str, kind: str, namespace: str, name: str) -> None:
        # A Role of a namespace may permit to get that very namespace, and nothing else of namespaces.
        here = namespace or (name if (verb, kind) == ("get", "Namespace") else "")
        if self.rights is None or (here and self._may(verb, kind, name)):
            return
        where = f' in the namespace "{namespace}"' if namespace else ""
        group = f'cannot {verb} resource "{PLURALS[kind]}" in API group "{_group(kind)}"{where}'
        raise Refusal(
            403, f'{_resource(kind)}{f" {json.dumps(name)}" if name else ""} is forbidden: User "tester" {group}'
        )

    def _may(self, verb: str, kind: str, name: str) -> bool:
        self.used.add((verb, kind))
        return self.rights is None or any(right.covers(verb, kind, name) for right in self.rights)

    def _check_escalation(self, kind: str, namespace: str, body: Object) -> None:
        """Who gives a right must have it. An administrator of the cluster is not even asked which rights these are."""
        if self.rights is None:
            return
        role = body if kind == "Role" else self._get("Role", namespace, body["roleRef"]["name"])
        lacking = [
            right
            for right in rights_of(role)
            if not all(self._may(right.verb, right.kind, name) for name in right.names or ("",))
        ]
        if lacking:
            name, of = body["metadata"]["name"], lacking[0].kind
            verbs = [right.verb for right in lacking]
            what = f"{{APIGroups:[{json.dumps(_group(of))}], Resources:[{PLURALS[of]}], Verbs:{verbs}}}"
            raise Refusal(
                403,
                f'{_resource(kind)} "{name}" is forbidden: user "tester" is attempting to grant RBAC permissions not '
                f"currently held: {what}",
            )

    def _get(self, kind: str, namespace: str, name: str) -> Object:
        found = self.objects.get((namespace, kind, name))
        if found is None:
            raise Refusal(404, f'{_resource(kind)} "{name}" not found')
        return found

    def _list(self, kind: str, namespace: str, query: dict[str, str]) -> Object:
        wanted = [part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part]
        items = [
            {key: value for key, value in one.items() if key not in ("kind", "apiVersion")}
            for (where, of_kind, _), one in self.objects.items()
            if (where, of_kind) == (namespace, kind)
            and all(one["metadata"].get("labels", {}).get(key) == value for key, value in wanted)
        ]
        return {"apiVersion": API_VERSIONS[kind], "kind": f"{kind}List", "metadata": {}, "items": items}

    def _create(self, kind: str, namespace: str, body: Object, dry: bool) -> Object:
        name = body["metadata"]["name"]
        if namespace:
            self._get("Namespace", "", namespace)
        if kind in ("Role", "RoleBinding"):
            self._check_escalation(kind, namespace, body)
        if (namespace, kind, name) in self.objects:
            raise Refusal(409, f'{PLURALS[kind]} "{name}" already exists')
        if body["metadata"].get("namespace", "") != namespace:
            raise Refusal(400, "the namespace of the object does not match the request")
        self._check(kind, name, body)
        return self._keep(kind, namespace, copy.deepcopy(body), dry, {"uid": uuid.uuid4().hex, "generation": 1})

    def _patch(self, kind: str, namespace: str, name: str, patch: Object, dry: bool) -> Object:
        old = self._get(kind, namespace, name)
        merged = _merged(copy.deepcopy(old), patch)
        sent = {key: value for key, value in merged.items() if key != "status"}
        self._check(kind, name, sent)
        if kind == "Role":
            self._check_escalation(kind, namespace, merged)
        if kind in ("Job", "JobSet") and merged["spec"] != old["spec"]:
            raise Refusal(422, f'{kind} "{name}" is invalid: spec.template: Invalid value: field is immutable')
        fresh = int(merged["spec"] != old["spec"]) if "spec" in old else 0
        return self._keep(kind, namespace, merged, dry, {"generation": old["metadata"].get("generation", 0) + fresh})

    def _delete(self, kind: str, namespace: str, name: str, options: Object) -> Object:
        old = self._get(kind, namespace, name)
        uid = options.get("preconditions", {}).get("uid")
        if uid and uid != old["metadata"]["uid"]:
            raise Refusal(409, "the UID in the precondition does not match the UID in record")
        self.writes.append(("DELETE", kind, name))
        if kind == "Namespace":
            self.objects = {key: one for key, one in self.objects.items() if key[0] != name}
        del self.objects[(namespace, kind, name)]
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _keep(self, kind: str, namespace: str, body: Object, dry: bool, metadata: Object) -> Object:
        body["metadata"].update(metadata)
        if kind == "Service":
            body["spec"] = {"type": "ClusterIP", "clusterIP": "10.0.0.1", "sessionAffinity": "None"} | body["spec"]
        if dry:
            return body
        name = body["metadata"]["name"]
        self.writes.append(("WRITE", kind, name))
        self.objects[(namespace, kind, name)] = body
        self._control(kind, namespace, body)
        if self.broken is not None:
            self.broken(body)
        return body

    def _check(self, kind: str, name: str, body: Object) -> None:
        if body.get("kind") != kind or body.get("apiVersion") != API_VERSIONS[kind]:
            raise Refusal(400, f"the object provided is unrecognized: {body.get('kind')} {body.get('apiVersion')}")
        if kind in WITHOUT_SCHEMA:
            return
        try:
            check(_without_nothing(body), self.version)
        except Unfit as error:
            raise Refusal(422, f'{kind} "{name}" is invalid: {error}') from error

    def _control(self, kind: str, namespace: str, body: Object) -> None:
        spec, generation = body.get("spec", {}), body["metadata"].get("generation", 1)
        if kind in ("StatefulSet", "Deployment"):
            n = spec.setdefault("replicas", 1)
            spec["template"]["spec"].setdefault("dnsPolicy", "ClusterFirst")
            body["status"] = {"readyReplicas": n, "updatedReplicas": n, "observedGeneration": generation}
        if kind == "StatefulSet":
            spec.setdefault("updateStrategy", {"type": "RollingUpdate"})
            self._claims(namespace, body)
        if kind == "Pod":
            body["status"] = {"phase": "Running"}
        if kind == "Job":
            n = 0 if spec.get("suspend") else spec.get("parallelism", 1)
            body["status"] = {"active": n, "ready": n}

    def _claims(self, namespace: str, body: Object) -> None:
        labels = body["spec"]["selector"]["matchLabels"]
        for template in body["spec"].get("volumeClaimTemplates", []):
            for index in range(body["spec"]["replicas"]):
                name = f"{template['metadata']['name']}-{body['metadata']['name']}-{index}"
                claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": template["spec"]}
                claim["metadata"] = {"name": name, "labels": labels, "uid": uuid.uuid4().hex}
                self.objects.setdefault((namespace, "PersistentVolumeClaim", name), claim)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # One write for headers and body: two of them wait for each other's acknowledgement.
            wbufsize = 1 << 16
            disable_nagle_algorithm = True

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                raw = self.rfile.read(length)
                parts = urlsplit(self.path)
                query = {key: values[0] for key, values in parse_qs(parts.query).items()}
                try:
                    if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                        raise Refusal(401, "Unauthorized")
                    if self.headers.get("Upgrade", "").lower() == "websocket":
                        return self._execute(*stand_in.command_in_pod(parts.path, parts.query))
                    if self.command == "PATCH" and "merge-patch+json" not in self.headers["Content-Type"]:
                        raise Refusal(415, "only merge patches are known here")
                    body = json.loads(raw) if raw else None
                    self._send(200, stand_in.serve(self.command, parts.path, query, body))
                except Refusal as refusal:
                    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": refusal.message}
                    self._send(refusal.code, {**status, "code": refusal.code})

            def _execute(self, name: str, command: list[str], folder: Path | None) -> None:
                """A command in a pod: WebSocket (RFC 6455), and the channels of Kubernetes' v4 protocol."""
                key = self.headers["Sec-WebSocket-Key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
                self.send_response(101)
                self.send_header("Upgrade", "websocket")
                self.send_header("Connection", "Upgrade")
                self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
                self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
                self.end_headers()
                self.wfile.flush()
                if folder is None:
                    printed, code = stand_in.in_pod(name, command)
                    self._frame(1, printed)
                else:
                    code = self._run(command)
                failed = {"status": "Failure", "details": {"causes": [{"message": str(code)}]}}
                self._frame(3, json.dumps({"status": "Success"} if code == 0 else failed).encode())
                self.wfile.write(b"\x88\x02\x03\xe8")
                self.wfile.flush()
                # As a real one: it reads no more, and the connection stays until the client ends it.
                ended = select.poll()
                ended.register(self.connection, select.POLLRDHUP)
                ended.poll(20_000)
                self.close_connection = True

            def _run(self, command: list[str]) -> int:
                pipe = subprocess.PIPE
                if command[0] == "python":
                    command = [sys.executable, "-c", f"{stand_in.python_begins_with}\n{command[2]}", *command[3:]]
                with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
                    assert process.stdin is not None
                    assert process.stdout is not None
                    assert process.stderr is not None
                    threading.Thread(target=self._feed, args=(process.stdin,), daemon=True).start()
                    while data := process.stdout.read(1 << 16):
                        self._frame(1, data)
                    self._frame(2, process.stderr.read())
                    return process.wait()

            def _feed(self, pipe: IO[bytes]) -> None:
                with contextlib.suppress(OSError, ValueError):
                    while len(head := self.rfile.read(2)) == 2:
                        size = head[1] & 0x7F
                        wide = {126: 2, 127: 8}.get(size, 0)
                        size = int.from_bytes(self.rfile.read(wide)) if wide else size
                        mask, body = self.rfile.read(4), self.rfile.read(size)
                        plain = np.frombuffer(body, np.uint8) ^ np.resize(np.frombuffer(mask, np.uint8), size)
                        if plain.size and plain[0] == 0:
                            pipe.write(plain[1:].tobytes())
                            pipe.flush()

            def _frame(self, channel: int, data: bytes) -> None:
                data = bytes([channel]) + data
                size = b"\x7f" + len(data).to_bytes(8, "big") if len(data) > 125 else bytes([len(data)])
                self.wfile.write(b"\x82" + size + data)
                self.wfile.flush()

            def _send(self, code: int, document: Object) -> None:
                data = json.dumps(document).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PATCH = do_DELETE = _answer

            def log_message(self, *words: object) -> None:
                pass

        return Handler


def write_kubeconfig(file: Path, urls: dict[str, str]) -> None:
    clusters = [{"name": name, "cluster": {"server": url}} for name, url in urls.items()]
    contexts = [{"name": name, "context": {"cluster": name, "user": "tester"}} for name in urls]
    users = [{"name": "tester", "user": {"token": TOKEN}}]
    top = {"apiVersion": "v1", "kind": "Config", "clusters": clusters, "contexts": contexts, "users": users}
    file.write_text(yaml.safe_dump({**top, "current-context": next(iter(urls), "")}))


def _merged(target: Object, patch: Object) -> Object:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            old = target.get(key)
            target[key] = _merged(old if isinstance(old, dict) else {}, value)
        else:
            target[key] = value
    return target


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nothing(item) for key, item in value.items() if item is not None}
    return [_without_nothing(item) for item in value] if isinstance(value, list) else value
