"""A lease in etcd, or in a Lease object of Kubernetes, by which a standby takes over without a person.

It says who may try to serve the run, and nothing more: that two masters never publish rests on the slaves, which
promise the newest epoch. The master writes it again and again. A standby whose stream has ended, and that sees no
write for as long, takes it and takes over. Only changes count, by this process's monotonic clock: clocks that differ or
jump decide nothing. Who finds that another process has the lease ends.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import logging
import math
import os
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from dips.core.clock import Clock
from dips.core.errors import ConfigError, RetryLater
from dips.core.net.addresses import is_loopback
from dips.core.observe.logs import ChangeLogger
from dips.master.config import MasterConfig
from dips.master.shell import MasterShell
from dips.master.state.effects import Halt, ReplicaNews
from dips.master.state.slaves import NEWER_EPOCH_EXIT

WRITES = 3
"""In the time after which a lease counts as let go."""

MOST_BYTES = 1 << 20
"""Of a store's answer."""

OVER = "no one: the run is over"
"""The last holder."""

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_logger = logging.getLogger(__name__)
_changes = ChangeLogger(_logger)


@dataclass(frozen=True)
class Held:
    """What stands in a store. mark: another one after each write."""

    holder: str
    mark: str
    transitions: int = 0  # how often it went to another holder


class Store(Protocol):
    """A place for one lease. Both methods raise RetryLater where the store does not answer, or does not let us."""

    name: str

    def read(self) -> Held | None:
        """None: it was never written."""

    def write(self, holder: str, instead_of: Held | None) -> Held | None:
        """None: it is no longer what it was, so that nothing was written."""


# ---- stores ----------------------------------------------------------------------------------------------------------


class Etcd:
    """A key of etcd, by the JSON gateway of its version 3, at the first of several endpoints that answers."""

    def __init__(self, endpoints: str, run_id: str, limit_s: float) -> None:
        self._endpoints = endpoints.split(",")
        self.name = f"etcd at {endpoints}"
        self._key = _base64(f"dips/{run_id}/master")
        for endpoint in self._endpoints:
            parts = urlsplit(endpoint)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(f"lease has the endpoint {endpoint!r}: give etcd:https://HOST:PORT")
            if parts.scheme == "http" and not is_loopback(parts.hostname):
                raise ConfigError(f"lease has {endpoint}, without encryption and not on this machine: give https")
        self._limit_s = limit_s / WRITES / len(self._endpoints)

    def read(self) -> Held | None:
        found = self._call("range", {"key": self._key}).get("kvs")
        if not found:
            return None
        with _understood(self.name):
            return Held(base64.b64decode(found[0]["value"]).decode(), str(int(found[0]["mod_revision"])))

    def write(self, holder: str, instead_of: Held | None) -> Held | None:
        expected = "0" if instead_of is None else instead_of.mark
        answer = self._call(
            "txn",
            {
                "compare": [{"key": self._key, "target": "MOD", "result": "EQUAL", "mod_revision": expected}],
                "success": [{"request_put": {"key": self._key, "value": _base64(holder)}}],
            },
        )
        if answer.get("succeeded") is not True:
            return None
        with _understood(self.name):
            return Held(holder, str(int(answer["header"]["revision"])))

    def _call(self, method: str, body: Mapping[str, Any]) -> dict[str, Any]:
        # The variables of etcdctl. Read each time: certificates are renewed while a run goes on.
        files = [os.environ.get(f"ETCDCTL_{name}") or None for name in ("CACERT", "CERT", "KEY")]
        failed = []
        for endpoint in self._endpoints:
            try:
                found = _json(f"{endpoint}/v3/kv/{method}", "POST", body, self._limit_s, *files)
                assert found is not None, "no status code stands for none here"
                return found
            except RetryLater as error:
                failed.append(str(error))
        raise RetryLater("; ".join(failed))


class KubernetesLease:
    """A Lease object, as a pod with its own service account reads and writes it."""

    def __init__(self, where: str, limit_s: float) -> None:
        namespace, separator, name = where.partition("/")
        if not separator or not namespace or not name:
            raise ConfigError(f"lease is kubernetes:{where}: give kubernetes:NAMESPACE/NAME")
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host:
            raise ConfigError(
                "lease is in Kubernetes, and this process runs in no pod of it: give etcd:https://HOST:PORT"
            )
        self.name = f"Lease {where}"
        self._server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self._leases = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._name, self._limit_s = name, limit_s

    def read(self) -> Held | None:
        found = self._call("GET", f"/{self._name}", (404,))
        return None if found is None else self._held(found)

    def write(self, holder: str, instead_of: Held | None) -> Held | None:
        transitions = 0 if instead_of is None else instead_of.transitions + (holder != instead_of.holder)
        wanted: dict[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": math.ceil(self._limit_s),
                "renewTime": time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", time.gmtime()),
                "leaseTransitions": transitions,
            },
        }
        if instead_of is None:
            made = self._call("POST", "", (409,), wanted)
        else:
            wanted["metadata"]["resourceVersion"] = instead_of.mark
            made = self._call("PATCH", f"/{self._name}", (404, 409), wanted)
        return None if made is None else self._held(made)

    def _held(self, lease: Mapping[str, Any]) -> Held:
        with _understood(self.name):
            spec = lease.get("spec") or {}  # empty: made for us, and not written yet
            return Held(
                str(spec.get("holderIdentity") or ""),
                str(lease["metadata"]["resourceVersion"]),
                int(spec.get("leaseTransitions") or 0),
            )

    def _call(
        self, method: str, path: str, none_for: Sequence[int], body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        try:
            token = (ACCOUNT / "token").read_text()  # another one every hour
        except OSError as error:
            raise RetryLater(f"the service account's token cannot be read: {error}") from error
        url, ca = self._server + self._leases + path, str(ACCOUNT / "ca.crt")
        return _json(url, method, body, self._limit_s / WRITES, ca, token=token, none_for=none_for)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@contextlib.contextmanager
def _understood(name: str) -> Iterator[None]:
    """Context in which a store's answer is taken apart. Raises RetryLater for one of another form."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise RetryLater(f"{name} gave an answer that cannot be read: {type(error).__name__}: {error}") from error


def _json(
    url: str, method: str, body: Mapping[str, Any] | None, limit_s: float, ca: str | None, *pair: str | None,
    token: str = "", none_for: Sequence[int] = (),
) -> dict[str, Any] | None:  # fmt: skip
    """A request and its answer; None for these status codes. Raises RetryLater for every other trouble.

    ca, pair: files of the authority's certificate, and of this process's certificate and key.
    """
    form = "application/merge-patch+json" if method == "PATCH" else "application/json"
    headers = {"Content-Type": form, **({"Authorization": f"Bearer {token}"} if token else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        context = ssl.create_default_context(cafile=ca)
        if pair and pair[0]:
            context.load_cert_chain(pair[0], pair[1])
        # No proxy of the environment: what decides about the run goes to the store itself.
        opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler({})
        )
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with opener.open(request, timeout=limit_s) as answer:
                found = json.loads(answer.read(MOST_BYTES))
        except urllib.error.HTTPError as error:
            if error.code in none_for:
                return None
            said = error.read(200).decode(errors="replace").strip()
            raise RetryLater(f"{url} answers {error.code} {error.reason}: {said}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise RetryLater(f"{url} cannot be used: {error}") from error
    if not isinstance(found, dict):
        raise RetryLater(f"{url} gave an answer that cannot be read: {found!s:.80}")
    return found


# ---- this process's part ---------------------------------------------------------------------------------------------


class Lease:
    """One process's part in the lease, for its event loop."""

    def __init__(self, store: Store, holder: str, limit_s: float, clock: Clock) -> None:
        """holder: this process's name in it, the same after a restart. limit_s: one that is not written for so long
        counts as let go."""
        self.store, self._holder, self._limit_s, self._clock = store, holder, limit_s, clock
        self._pause_s = limit_s / WRITES
        self._seen: Held | None = None
        self._changed_s = -math.inf  # when `seen` was first seen
        self._looked = self._is_ours = self._by_person = False

    @classmethod
    def of(cls, config: MasterConfig, clock: Clock) -> Lease | None:
        """None: the settings name no store. Raises ConfigError for one that cannot be."""
        if config.lease is None:
            return None
        holder = f"{socket.gethostname()} {config.listen} {config.directory}"
        return cls(store_of(config.lease, config.run_id, config.lease_s), holder, config.lease_s, clock)

    async def claim(self, *, by_person: bool) -> None:
        """Before the run is served: takes the lease, from another holder once that one has let it go, or at once if a
        person says that this master is to serve. Raises ConfigError while the other one writes it. A store that does
        not answer does not keep a run from being served.
        """
        self._by_person = by_person
        try:
            while not await asyncio.to_thread(self._own):
                _changes.report("lease", f"waits: {self._of_another()} It is taken once that one does not renew it")
                await asyncio.sleep(self._pause_s)
        except RetryLater as error:
            _changes.report("lease", f"the lease cannot be had yet: {error}", logging.WARNING)

    async def keep(self, shell: MasterShell) -> None:
        """Writes the lease for as long as this master serves, and ends it where another process has it."""
        told = ""
        while True:
            try:
                await asyncio.to_thread(self._renew)
                trouble = ""
                _changes.report("lease", f"holds {self.store.name}")
            except RetryLater as error:
                trouble = str(error)
                _changes.report("lease", f"the lease is not renewed: {trouble}", logging.WARNING)
            except ConfigError as error:
                _logger.critical("%s", error)
                shell.stop(Halt(NEWER_EPOCH_EXIT, str(error)))
                return
            if bool(trouble) != bool(told):
                told = trouble
                shell.dispatch(ReplicaNews(trouble, of_lease=True))
            await asyncio.sleep(self._pause_s)

    async def end(self) -> None:
        """The run is over: no standby is to take over."""
        try:
            await asyncio.to_thread(self._end)
        except RetryLater as error:
            _logger.warning("the lease does not say that the run is over, so that a standby may take over: %s", error)

    async def take(self, lost_s: Callable[[], float]) -> bool:
        """For a standby: True once this process has taken the lease from the master, False where the run is over.

        lost_s: when the master was lost (monotonic): inf while it is followed, -inf where this standby has not had all
        decisions since it was started.
        """
        while True:
            await asyncio.sleep(self._pause_s)
            try:
                await asyncio.to_thread(self._look)
            except RetryLater as error:
                _changes.report("lease", f"cannot take over by itself now: {error}", logging.WARNING)
                continue
            now_s, since_s = self._clock.monotonic_s(), lost_s()
            if self._seen is not None and self._seen.holder == OVER:
                _logger.info("%s says that the run is over", self.store.name)
                return False
            if since_s == math.inf or self._seen is None or not self._seen.holder:
                is_held = self._seen is not None and self._seen.holder
                said = "takes over by itself once it is not renewed" if is_held else "no master has written it"
                _changes.report("lease", f"watches {self.store.name}: {said}")
            elif since_s == -math.inf or self._changed_s - since_s > self._limit_s:
                # Decisions may have been made without this standby.
                what = "has not followed since its start" if since_s == -math.inf else "lost it before its last renewal"
                said = f"this standby {what}: a person must ask it to take over"
                _changes.report("lease", f"{self._of_another()} {said}", logging.WARNING)
            elif now_s - max(since_s, self._changed_s) >= self._limit_s and await self._take():
                _logger.warning("took %s: the master is away since %.0f s", self.store.name, now_s - since_s)
                return True

    async def _take(self) -> bool:
        try:
            return await asyncio.to_thread(self._write)
        except RetryLater as error:
            _changes.report("lease", f"cannot take over by itself now: {error}", logging.WARNING)
            return False

    # ---- another thread ----

    def _look(self) -> None:
        found = self.store.read()
        if found != self._seen or not self._looked:
            self._changed_s = self._clock.monotonic_s()
        self._seen, self._looked = found, True

    def _write(self) -> bool:
        """False: it is not what was seen."""
        if (written := self.store.write(self._holder, self._seen)) is not None:
            self._seen, self._is_ours = written, True
        return written is not None

    def _own(self) -> bool:
        """Takes the lease if it may be taken. Raises ConfigError where another process writes it."""
        before, looked = self._seen, self._looked
        self._look()
        seen = self._seen
        if seen is not None and seen.holder not in (self._holder, OVER, "") and not self._by_person:
            if looked and seen != before:
                raise ConfigError(
                    f"{self._of_another()} It serves the run: start a standby of it here, of an empty directory, "
                    "or let this one take over with --take-over"
                )
            if self._clock.monotonic_s() - self._changed_s < self._limit_s:
                return False
        return self._write()

    def _renew(self) -> None:
        """Raises ConfigError where another process has it, RetryLater where it cannot be written now."""
        if self._is_ours and self._write():
            return
        if self._is_ours:
            self._look()
            if self._seen is not None and self._seen.holder != self._holder:
                raise ConfigError(f"{self._of_another()} It takes the run over, so that this master ends")
            self._is_ours = self._write()
        if not self._is_ours and not self._own():
            raise RetryLater(self._of_another())

    def _end(self) -> None:
        for _ in range(3):  # a renewal may be under way
            self._look()
            if self._seen is None or self._seen.holder != self._holder or self.store.write(OVER, self._seen):
                return

    def _of_another(self) -> str:
        return f"{self.store.name} is held by {'no one' if self._seen is None else self._seen.holder}."


def store_of(lease: str, run_id: str, limit_s: float) -> Store:
    """The place that a setting names. Raises ConfigError for none."""
    kind, _, where = lease.partition(":")
    if kind == "etcd":
        return Etcd(where, run_id, limit_s)
    if kind == "kubernetes":
        return KubernetesLease(where, limit_s)
    raise ConfigError(f"lease is {lease!r}: give etcd:https://HOST:PORT or kubernetes:NAMESPACE/NAME")
