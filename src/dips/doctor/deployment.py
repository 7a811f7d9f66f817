"""Checks a file of `dips deploy`, as far as the machine that deploys can see.

Nodes cannot be looked into from here: what they need is shown, and `dips deploy plan` shows it. Pods that train are
asked what they reach.
"""

from __future__ import annotations

import email.utils
import json
import time
from collections.abc import Iterator
from functools import partial

from dips.core.errors import ConfigError, DipsError
from dips.core.release import VERSION
from dips.core.units import format_bits_per_s, format_bytes, format_seconds, parse_seconds
from dips.deploy import identities, kubernetes_api
from dips.deploy.clusters import node_name
from dips.deploy.deploy_file import KEYS, DeployedClusterKnobs, Deployment
from dips.deploy.objects import Object, selector
from dips.doctor import host, network
from dips.doctor.findings import Check, Finding, Findings, Grade, fail, ok, warn
from dips.doctor.host import check_packages
from dips.doctor.network import check_identities
from dips.local.sizing import SizeKnobs, SizeTable
from dips.master.config import MasterConfig

ASK_S = 120.0
"""For the doctor in a pod: it waits for seconds at each slave that does not answer."""

CLOCKS_DIFFER_S = 5.0
"""The API server's Date has whole seconds, and an answer takes some time."""


def checks(deployment: Deployment, link_bits_per_s: float, facts: host.HostFacts) -> list[Check]:
    """All checks, in the order in which they are shown."""
    return [
        Check("packages", partial(check_packages, ("deploy",))),
        Check("images", partial(_images, deployment)),
        Check("keys", partial(_keys, deployment)),
        Check("contexts", partial(_contexts, deployment)),
        Check("addresses", partial(_addresses, deployment)),
        Check("sizes", partial(_sizes, deployment)),
        Check("times", partial(_times, deployment, link_bits_per_s)),
        Check("ranks", partial(_ranks, deployment)),
        Check("clock", lambda: [host.judge_clock(facts)]),
    ]


def _images(deployment: Deployment) -> Findings:
    tag = deployment.run.tag
    if tag.lstrip("v") != VERSION:
        sentence = f"images have the tag {tag}, and dips {VERSION} is installed here"
        yield warn("images", sentence, "use the same release on both sides, or see that the tag holds it")
    else:
        yield ok("images", f"{deployment.run.image('master')} and its siblings are of this release")


def _keys(deployment: Deployment) -> Findings:
    missing = identities.missing(deployment)
    if missing:
        names = ", ".join(one.name for one in missing)
        command = identities.how_to_make(deployment, missing)
        yield fail("keys", f"{deployment.run.keys} has no keys of {names}", f"`{command}`")
    yield from check_identities(one for one in identities.wanted(deployment) if one not in missing)


def _contexts(deployment: Deployment) -> Findings:
    """Each site's context is known, its API server answers and accepts us, and its clock agrees with ours."""
    known = kubernetes_api.known_contexts()
    if known is None:
        kubernetes_api.check_contexts([], known)
    for context in dict.fromkeys(site.context for site in deployment.sites if site.context):
        try:
            kubernetes_api.check_contexts([context], known)
            yield from _asked(context, deployment.run.namespace)
        except DipsError as error:
            yield Finding("contexts", Grade.FAIL, str(error))


def _asked(context: str, namespace: str) -> Findings:
    began_s = time.monotonic()
    api = kubernetes_api.open_context(context, namespace)
    found = api.get("Namespace", namespace)
    trip = format_seconds(time.monotonic() - began_s)
    there = f"namespace {namespace} is there" if found else f"`dips deploy apply` makes the namespace {namespace}"
    api.check_release()
    version, date = api.release()
    yield ok("contexts", f"{context}: Kubernetes {version} answers in {trip}; {there}")
    ahead_s = ahead_of_us_s(date, time.time())
    if ahead_s is not None and abs(ahead_s) > CLOCKS_DIFFER_S:
        sentence = f"{context}: its clock differs from this machine's by {format_seconds(abs(ahead_s))}"
        yield warn("clock", sentence, "let both follow a time server: certificates depend on it")


def ahead_of_us_s(date: str, now_s: float) -> float | None:
    """By how much an HTTP date is ahead of this machine's clock, in seconds; None for what is no date."""
    try:
        return email.utils.parsedate_to_datetime(date).timestamp() - now_s
    except ValueError:
        return None


# ---- where the servers will be ----


def _addresses(deployment: Deployment) -> Findings:
    """Clusters elsewhere dial these. Before the first rollout a load balancer has no name yet."""
    if deployment.run.expose == "inside":
        yield ok("addresses", f"the servers are reached within {deployment.server_site.context!r} only")
        return
    places = [(f"the {one.component}", one.address, "address of its site") for one in deployment.masters]
    places += [
        (f"slave {name}", deployment.slave_address(index), "address of its site")
        for index, name in enumerate(deployment.slave_ids)
    ]
    masters = {one.address: network.dialled(one.address) for one in deployment.masters}
    one_serves = any(reached.listens for reached in masters.values())
    for who, address, setting in places:
        found = network.check_name_found(who, address, setting)
        if found.remedy:
            yield warn("addresses", found.sentence, f"once the servers are rolled out: {found.remedy}")
            continue
        yield found
        reached = masters[address] if address in masters else network.dialled(address)
        if reached.listens:
            yield network.judge_reached(who, address, reached, must_listen=True)
        elif address in masters and one_serves and reached.round_trip_s is not None:
            yield ok("reach", f"{who} at {address}: its host answers; the port is closed while the other one serves")
        else:
            sentence = f"{who} at {address} does not answer yet ({reached.why})"
            yield warn("reach", sentence, "roll it out, and open the way from each cluster's site")


# ---- what the pods of clusters reach ----


def _ranks(deployment: Deployment) -> Findings:
    """Every pod of a cluster of several ranks dials the master and all slaves, with the keys and from where its ranks
    do; one finding for each that cannot. Before the cluster runs nothing can be asked.
    """
    for cluster in deployment.clusters:
        if cluster.ranks == 1:
            continue
        context = deployment.site(cluster.site).context
        if not context or cluster.starts not in ("job", "jobset"):
            sentence = f"the {cluster.ranks} ranks of cluster {cluster.id} are not asked: no API server knows its nodes"
            yield warn("ranks", sentence, f"on each node: `{' '.join(_joins(deployment, 'KEYS'))}`")
            continue
        yield from _asked_pods(deployment, cluster, kubernetes_api.open_context(context, deployment.run.namespace))


def _asked_pods(deployment: Deployment, cluster: DeployedClusterKnobs, api: kubernetes_api.KubernetesApi) -> Findings:
    pods = api.list("Pod", selector(deployment, "cluster", cluster.id))
    running = {_index(pod): pod["metadata"]["name"] for pod in pods if pod.get("status", {}).get("phase") == "Running"}
    reached = 0
    # torchrun numbers the ranks by its nodes' names, in the order of texts.
    by_name = sorted(range(cluster.nodes), key=lambda one: node_name(deployment, cluster, str(one)))
    for index in range(cluster.nodes):
        first, each = by_name.index(index) * cluster.node_ranks, cluster.node_ranks
        ranks = f"rank {first}" if each == 1 else f"ranks {first} to {first + each - 1}"
        who = f"cluster {cluster.id}, {ranks}"
        if index not in running:
            yield warn("ranks", f"{who}: pod {index} does not run, so it is not asked", "ask again when it does")
            continue
        try:
            wrong = list(_wrong(api.output_of(running[index], _joins(deployment, KEYS), ASK_S)))
        except DipsError as error:
            yield Finding("ranks", Grade.FAIL, f"{who}: {error}")
            continue
        for sentence, remedy in wrong:
            yield fail("ranks", f"{who}, pod {running[index]}: {sentence}", remedy)
        reached += not wrong
    if reached:
        all_of = "the" if reached == cluster.nodes else f"{reached} of {cluster.nodes}"
        yield ok("ranks", f"cluster {cluster.id}: {all_of} pods of its {cluster.ranks} ranks reach master and slaves")


def _joins(deployment: Deployment, keys: str) -> list[str]:
    asks = ["python", "-m", "dips.cli", "doctor", "--master", deployment.master_address]
    return [*asks, "--keys", keys, "--json"]


def _index(pod: Object) -> int:
    found = pod["metadata"].get("annotations", {}).get("batch.kubernetes.io/job-completion-index", "")
    return int(found) if found.isdecimal() else -1


def _wrong(output: str) -> Iterator[tuple[str, str]]:
    """Sentence and remedy of each thing that would fail, by what the doctor in the pod has printed."""
    try:
        found = json.loads(output)["findings"]
        wrong = [(str(one["sentence"]), str(one["remedy"])) for one in found if one["grade"] == Grade.FAIL.value]
    except (ValueError, KeyError, TypeError) as error:
        said = " ".join(output.split())[:200] or "nothing"
        raise ConfigError(f"its doctor said {said}: install dips {VERSION} in its image") from error
    yield from wrong


# ---- how large, how long ----


def _sizes(deployment: Deployment) -> Findings:
    yield ok("placement", f"the servers go to {deployment.server_site.name}: {deployment.why_there}")
    for line in deployment.sizes.explain():
        yield ok("sizes", f"each {line} (nodes must have that free)")
    for cluster in deployment.clusters:
        yield _cluster_memory(deployment, cluster)


def _cluster_memory(deployment: Deployment, cluster: DeployedClusterKnobs) -> Finding:
    needed, have = deployment.sizes.node_bytes[cluster.id], cluster.memory
    ranks = f", {cluster.node_ranks} ranks on each" if cluster.ranks > 1 else ""
    sentence = (
        f"cluster {cluster.id}: {cluster.nodes} nodes of {format_bytes(have)}{ranks}, of which Di-PS takes "
        f"{format_bytes(needed)} in addition to the training"
    )
    if needed > have:
        return fail("memory", sentence, "give [[clusters]] more memory or nodes, or lower what the model takes")
    if needed > 0.5 * have:
        return warn("memory", f"{sentence}, more than half", "see that the model and its batches fit as well")
    return ok("memory", sentence)


def _times(deployment: Deployment, link_bits_per_s: float) -> Findings:
    found = _table(deployment, link_bits_per_s)
    sentence = (
        f"at {format_bits_per_s(link_bits_per_s)} a push takes {format_seconds(found['push_s'].value)}, an update "
        f"{format_seconds(found['update_s'].value)}, a pull {format_seconds(found['pull_s'].value)} (`dips size` has "
        "the formulas)"
    )
    timeout_s = deployment.tables["master"].get("round_timeout_s", MasterConfig.model_fields["round_timeout_s"].default)
    if found["update_s"].value > parse_seconds(timeout_s):
        remedy = "measure your slaves' rates; then raise round_timeout_s in [master], or give more slaves"
        yield warn("times", f"{sentence}; round_timeout_s is {timeout_s}: rounds may be given up at first", remedy)
    else:
        yield ok("times", sentence)


def _table(deployment: Deployment, link_bits_per_s: float) -> SizeTable:
    clusters = len(deployment.clusters)
    return SizeTable(
        SizeKnobs(
            params=deployment.model.parameters,
            clusters=clusters,
            slaves=deployment.run.slaves,
            link=link_bits_per_s,
            wire=str(deployment.tables["worker"].get("wire_dtype", "float32")),
            pull_wire=str(deployment.tables["master"].get("pull_wire", "float32")),
        )
    )
