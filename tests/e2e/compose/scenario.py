"""What is done to the containers, step by step, and what must hold after each step."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stack import (
    CLUSTERS,
    EVALUATOR,
    NODES,
    PROJECT,
    RANKS,
    RANKS_FILE,
    ROLES,
    Stack,
    StepFailed,
    command,
    copy_records,
    wait,
)

GROWS = 2
"""Versions: one round could have been under way already."""

UNTRAINED_NATS = 5.5
"""Of a byte model that has learned nothing: ln 256."""

SLOWEST_BITS_PER_S = 2 * 10e6
"""Twice LINK_C: a burst may pass, and each slave's part is measured from the push's beginning to its own end."""

CUT_OFF = "cluster-b"
SITE = "site-b"


class Report:
    """One line for each step, and how many checks held."""

    def __init__(self) -> None:
        self.checks = 0
        self._begin_s = time.monotonic()

    def say(self, sentence: str) -> None:
        print(f"[{time.monotonic() - self._begin_s:4.0f} s] {sentence}", flush=True)

    def check(self, held: bool, sentence: str) -> None:
        """Say what holds. Raises StepFailed when it does not."""
        if not held:
            raise StepFailed(f"this does not hold: {sentence}")
        self.checks += 1
        self.say(sentence)


def play(stack: Stack, report: Report, ports: Mapping[str, str], records: Path, build_first: bool) -> None:
    """Everything, from images to the run's records. Raises StepFailed at the first thing that fails."""
    if build_first:
        build(stack, report)
    images(report)
    first_version(stack, report)
    everybody_is_healthy(stack, report)
    links_differ(stack, report)
    for service in ROLES:
        kill(stack, report, service)
    kill_watchers(stack, report)
    restart_by_policy(stack, report)
    disconnect(stack, report)
    ranks(stack, report)
    watched(stack, report, ports)
    end(stack, report, records)
    nothing_is_left(stack, report)


def build(stack: Stack, report: Report) -> None:
    begin_s = time.monotonic()
    stack.compose("build", timeout_s=None)
    report.say(f"images built in {time.monotonic() - begin_s:.0f} s")


def images(report: Report) -> None:
    names = ("dips-master", "dips-slave", "dips-worker")
    sizes = [f"{name} {int(_inspect(name, '{{.Size}}')) / 1e6:.0f} MB" for name in names]
    report.say(f"sizes: {', '.join(sizes)}")
    for name in ("dips-master", "dips-slave"):
        found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is not None)"
        command("docker", "run", "--rm", "--network", "none", name, "python", "-c", found)
    report.check(True, "the images of master and slave hold no torch")
    for name in names:
        found = "find / -xdev -type f -perm /6000 2>/dev/null; python -c 'import pip' 2>/dev/null && echo pip; true"
        told = command("docker", "run", "--rm", "--network", "none", "--entrypoint", "sh", name, "-c", found)
        report.check(not told.split(), f"{name} holds no setuid file and no pip {' '.join(told.split()[:5])}")


def first_version(stack: Stack, report: Report) -> None:
    begin_s = time.monotonic()
    stack.compose("up", "--detach")
    wait("a first published version", lambda: stack.version() >= 0)
    took_s = time.monotonic() - begin_s
    report.check(True, f"first version {stack.version()} published {took_s:.0f} s after `up`")


def everybody_is_healthy(stack: Stack, report: Report) -> None:
    services = (*ROLES, EVALUATOR, "link-a", "link-b", "link-c", "prometheus")
    for service in services:
        wait(f"{service} healthy", partial(stack.is_healthy, service))
    report.check(True, f"{len(services)} services are healthy; version {stack.version()}")
    for service in (*ROLES, EVALUATOR):
        _is_confined(stack, service)
    report.check(True, "all roles run as user 10001 without capabilities, on read-only root file systems")


def _is_confined(stack: Stack, service: str) -> None:
    status = stack.execute(service, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    if fields["Uid"].split()[0] != "10001" or int(fields["CapEff"], 16) or int(fields["CapBnd"], 16):
        raise StepFailed(
            f"{service} runs with uid {fields['Uid']}, capabilities {fields['CapEff']} of {fields['CapBnd']}"
        )
    if fields["NoNewPrivs"].strip() != "1":
        raise StepFailed(f"{service} may gain privileges")
    if _succeeds(stack, service, "touch", "/opt/dips/x"):
        raise StepFailed(f"{service} can write to its root file system")


def _succeeds(stack: Stack, service: str, *words: str) -> bool:
    try:
        stack.execute(service, *words)
    except StepFailed:
        return False
    return True


def links_differ(stack: Stack, report: Report) -> None:
    for cluster in CLUSTERS:
        link = cluster.replace("cluster", "link")
        lines = [line for line in stack.logs(link).splitlines() if line.startswith(f"link of {cluster}")]
        if not lines:
            raise StepFailed(f"{link} says nothing of its link")
        report.check("pushes" in lines[-1] and "pulls" in lines[-1], f"{link} says: {lines[-1]}")
    if "NOT limited" in "".join(stack.logs(f"link-{name}").partition("pulls")[0] for name in "abc"):
        report.say("this kernel cannot limit what a container sends: rates are NOT compared")
        return
    wait("push rates of all links", lambda: len(_push_rates(stack)) == len(CLUSTERS))
    rates: dict[str, float] = {}

    def slow() -> bool:  # a single push may have found the bucket full
        rates.update(_push_rates(stack))
        return rates["cluster-c"] * 8 < SLOWEST_BITS_PER_S

    wait("a push of cluster-c that is as slow as its link", slow)
    told = ", ".join(f"{name} {rate * 8 / 1e6:.1f} Mbit/s" for name, rate in sorted(rates.items()))
    report.check(rates["cluster-c"] < rates["cluster-a"], f"pushes as the master measures them: {told}")


def _push_rates(stack: Stack) -> dict[str, float]:
    """Bytes a second of each cluster's last push, to all slaves together."""
    found = stack.metrics("dips_master_link_push_bytes_per_second")
    rates: dict[str, float] = {}
    for name, value in found.items():
        cluster = name.partition('cluster="')[2].partition('"')[0]
        rates[cluster] = rates.get(cluster, 0.0) + value
    return rates


# ---- harm ----


def kill(stack: Stack, report: Report, service: str) -> None:
    """`docker kill`, which compose's restart policy respects as an operator's wish, and `up -d`."""
    before, begin_s = stack.version(), time.monotonic()
    command("docker", "kill", stack.container(service))
    if stack.state(service)["Running"]:
        raise StepFailed(f"{service} still runs after docker kill")
    stack.compose("up", "--detach")
    after = _published_again(stack, service, before)
    took_s = time.monotonic() - begin_s
    report.check(
        after >= before + GROWS, f"docker kill {service}, up -d: version {before} -> {after} in {took_s:.0f} s"
    )


def kill_watchers(stack: Stack, report: Report) -> None:
    """What only looks at the run, or limits it, is not missed by it, and comes back."""
    names = ("link-a", EVALUATOR, "prometheus")
    before = stack.version()
    for name in names:
        command("docker", "kill", stack.container(name))
    wait("versions without them", lambda: stack.version() >= before + GROWS)
    after = stack.version()
    stack.compose("up", "--detach")
    for name in names:
        wait(f"{name} healthy again", partial(stack.is_healthy, name))
    report.check(
        True, f"docker kill {' and '.join(names)}: version {before} -> {after} without them; up -d: healthy again"
    )


def restart_by_policy(stack: Stack, report: Report) -> None:
    """A process that dies by itself is started again by its restart policy, without help."""
    for service in ("slave-1", "cluster-c"):
        before, begin_s = stack.version(), time.monotonic()
        restarts = stack.state(service)["RestartCount"]
        try:
            stack.execute(service, "sh", "-c", "kill -9 -1")
        except StepFailed:
            pass  # the shell may die with its container
        wait(f"{service} restarted", lambda: stack.state(service)["RestartCount"] != restarts)  # noqa: B023
        after = _published_again(stack, service, before)
        took_s = time.monotonic() - begin_s
        grown = f"version {before} -> {after} in {took_s:.0f} s"
        report.check(after >= before + GROWS, f"kill -9 inside {service}, restart policy: {grown}")


def _published_again(stack: Stack, service: str, before: int) -> int:
    """The version once it has grown and the harmed service takes part again."""
    wait(f"{service} running", lambda: bool(stack.state(service)["Running"]))
    if service in CLUSTERS:
        wait(f"{service} a member", lambda: stack.is_member(service))
        merged = stack.applied(service)
        wait(f"another push of {service} merged", lambda: stack.applied(service) > merged)
    wait(f"versions after {before}", lambda: stack.version() >= before + GROWS)
    return stack.version()


def disconnect(stack: Stack, report: Report) -> None:
    """One site's network goes away and comes back; the others go on meanwhile."""
    network, container = f"{PROJECT}_{SITE}", stack.container(CUT_OFF)
    before = stack.version()
    command("docker", "network", "disconnect", network, container)
    wait(f"{CUT_OFF} away", lambda: not stack.is_member(CUT_OFF))
    cut = stack.version()
    wait("versions without it", lambda: stack.version() >= cut + GROWS)
    report.check(True, f"{CUT_OFF} disconnected: evicted, and version {before} -> {stack.version()} without it")
    before = stack.version()
    command("docker", "network", "connect", "--alias", CUT_OFF, network, container)
    after = _published_again(stack, CUT_OFF, before)
    report.check(after >= before + GROWS, f"{CUT_OFF} connected again: it pushes, version {before} -> {after}")
    link = CUT_OFF.replace("cluster", "link")
    lines = stack.logs(link).count(f"link of {CUT_OFF}, ")
    wait("its link limited again", lambda: stack.logs(link).count(f"link of {CUT_OFF}, ") >= 2)
    report.check(lines >= 1, f"{link} limits the new interface")


# ---- a cluster of two containers ----


def ranks(stack: Stack, report: Report) -> None:
    """A cluster of two containers joins the run. Each of them is killed, also that where both find each other."""
    before, begin_s = stack.version(), time.monotonic()
    stack.add(RANKS_FILE)
    stack.compose("up", "--detach")
    after = _ranks_publish(stack, before)
    took_s = time.monotonic() - begin_s
    report.check(
        after >= before + GROWS, f"{RANKS} of two containers joins: version {before} -> {after} in {took_s:.0f} s"
    )
    for node in NODES:
        _is_confined(stack, node)
    [told] = [one for one in _clusters(stack) if one["cluster_id"] == RANKS]
    report.check(told["ranks"] == len(NODES), f"{RANKS} has {told['ranks']} ranks, which run as confined as all roles")
    for killed, other in (NODES, NODES[::-1]):
        _kill_node(stack, report, killed, other)


def _kill_node(stack: Stack, report: Report, killed: str, other: str) -> None:
    before, begin_s = stack.version(), time.monotonic()
    left = stack.ranks(other)
    if len(left) != 1:
        raise StepFailed(f"{other} has {len(left)} ranks")
    command("docker", "kill", "-s", "KILL", stack.container(killed))
    wait(f"the rank of {other} notices that {killed} is lost, and ends", lambda: not left & stack.ranks(other))
    wait(f"{RANKS} away", lambda: not stack.is_member(RANKS))
    noticed_s, cut = time.monotonic() - begin_s, stack.version()
    wait("versions without it", lambda: stack.version() >= cut + GROWS)
    stack.compose("up", "--detach")
    after = _ranks_publish(stack, before)
    took_s = time.monotonic() - begin_s
    grown = f"version {before} -> {cut} -> {after} in {took_s:.0f} s"
    report.check(
        after >= cut + GROWS,
        f"docker kill {killed}: the rank of {other} ends, {RANKS} is away after {noticed_s:.0f} s; up -d: {grown}",
    )


def _ranks_publish(stack: Stack, before: int) -> int:
    """The version once it has grown, and another push of the two containers was merged."""
    wait(f"{RANKS} a member", lambda: stack.is_member(RANKS))
    merged = stack.applied(RANKS)
    wait(f"another push of {RANKS} merged", lambda: stack.applied(RANKS) > merged)
    wait(f"versions after {before}", lambda: stack.version() >= before + GROWS)
    for node in NODES:
        if not stack.state(node)["Running"]:
            raise StepFailed(f"{node} does not run, and {RANKS} pushes")
    return stack.version()


# ---- watching and ending ----


def watched(stack: Stack, report: Report, ports: Mapping[str, str]) -> None:
    """Prometheus has data of every process; the master's page answers."""
    port = ports["PROMETHEUS_PORT"]
    n_processes = len([*ROLES, RANKS, EVALUATOR])  # of several ranks the leader has the metrics
    wait("Prometheus scrapes all", lambda: len(_query(port, 'up{run="compose"} == 1')) == n_processes)
    report.check(True, f"Prometheus: {n_processes} of {n_processes} processes are up")
    version = _query(port, "dips_master_version")
    report.check(
        bool(version), f"Prometheus: dips_master_version is {version[0]['value'][1] if version else 'not there'}"
    )
    rules = _json(f"http://127.0.0.1:{port}/api/v1/rules")["data"]["groups"]
    ill = [rule["name"] for group in rules for rule in group["rules"] if rule["health"] == "err"]
    report.check(
        bool(rules) and not ill, f"Prometheus: {sum(len(group['rules']) for group in rules)} rules, none with an error"
    )
    page = _get(f"https://127.0.0.1:{ports['PAGE_PORT']}/healthz")
    report.check("ok" in page, "the status page answers on this machine's loopback")
    link = stack.execute("master", "cat", "/var/lib/dips/page.json")
    report.check("https://" in link, "the page's link is in page.json")
    heldout_loss(stack, report, ports)


def heldout_loss(stack: Stack, report: Report, ports: Mapping[str, str]) -> None:
    """The evaluator goes on after its own death; what it measures is in Prometheus and on the page."""
    newer, old = f"dips_worker_heldout_version > {stack.version()}", _heldout_on_page(stack, ports)
    wait("a later version measured", lambda: bool(_query(ports["PROMETHEUS_PORT"], newer)))
    [found] = _query(ports["PROMETHEUS_PORT"], "dips_worker_heldout_loss")
    loss = float(found["value"][1])
    report.check(loss < UNTRAINED_NATS, f"Prometheus: held-out loss {loss:.3f} nats per byte")
    wait("a later loss on the page", lambda: _heldout_on_page(stack, ports) > old)
    report.check(True, f"the status page draws {_heldout_on_page(stack, ports)} held-out losses")


def _heldout_on_page(stack: Stack, ports: Mapping[str, str]) -> int:
    """How many losses the status page draws, for whoever has the link: it becomes a cookie, as in a browser."""
    query = urllib.parse.urlsplit(json.loads(stack.execute("master", "cat", "/var/lib/dips/page.json"))["url"]).query
    page, cookies = f"https://127.0.0.1:{ports['PAGE_PORT']}", urllib.request.HTTPCookieProcessor()
    _get(f"{page}/?{query}", cookies)
    return len(json.loads(_get(f"{page}/snapshot.json", cookies))["history"]["heldout"])


def end(stack: Stack, report: Report, records: Path) -> None:
    """The operator asks and stops; every process ends by itself; the records prove the promises."""
    live = [cluster["cluster_id"] for cluster in _clusters(stack)]
    report.check({*CLUSTERS, RANKS} <= set(live), f"`operator status` shows {', '.join(live)}")
    before = stack.version()
    _operator(stack, "stop")
    for service in (*ROLES, *NODES, EVALUATOR):
        wait(f"{service} ended", partial(stack.has_ended, service))
        code = stack.state(service)["ExitCode"]
        if code != 0:
            raise StepFailed(f"{service} ended with {code}")
    report.check(True, f"`operator stop` at version {before}: all roles ended with 0, and stay ended")
    copy_records(stack, records)
    done = subprocess.run(
        [sys.executable, "-m", "dips.cli", "verify", str(records), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise StepFailed(f"dips verify ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    told = json.loads(done.stdout)
    report.check(told["verdict"] == "ok", f"dips verify {records.name}: {told['verdict']}")
    said = _operator(stack, "verify", "/run-of-compose").strip().splitlines()
    report.check(said[-1].endswith(": ok"), f"`operator verify`, in a container: {said[-1]}")


def nothing_is_left(stack: Stack, report: Report) -> None:
    had = stack.left()
    stack.remove()
    report.check(not stack.left(), f"down -v: {len(had)} containers, networks and volumes are gone, none is left")


def _clusters(stack: Stack) -> list[dict[str, Any]]:
    """As `dips status` shows them."""
    found: list[dict[str, Any]] = json.loads(_operator(stack, "status", "--json"))["clusters"]
    return found


def _operator(stack: Stack, *words: str) -> str:
    return stack.compose("run", "--rm", "--no-deps", "operator", *words)


def _inspect(image: str, template: str) -> str:
    return command("docker", "image", "inspect", "--format", template, image).strip()


def _query(port: str, expression: str) -> list[Any]:
    words = urllib.parse.urlencode({"query": expression})
    found: list[Any] = _json(f"http://127.0.0.1:{port}/api/v1/query?{words}")["data"]["result"]
    return found


def _json(url: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_get(url))
    return found


def _get(url: str, *handlers: urllib.request.BaseHandler) -> str:
    """The page's certificate is the run's own, which is no matter here. Raises StepFailed."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), *handlers)
    try:
        with opener.open(url, timeout=10.0) as answer:
            text: str = answer.read().decode()
            return text
    except OSError as error:
        raise StepFailed(f"{url} does not answer: {error}") from error
