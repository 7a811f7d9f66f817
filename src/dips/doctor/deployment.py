"""Checks a file of `dips deploy`, as far as the machine that deploys can see.

Nodes and pods of Kubernetes cannot be looked into from here: what they need is shown, and `dips deploy plan` shows it.
"""

from __future__ import annotations

import email.utils
import time
from functools import partial

from dips.core.errors import DipsError
from dips.core.release import VERSION
from dips.core.units import format_bits_per_s, format_bytes, format_seconds, parse_seconds
from dips.deploy import identities, kubernetes_api
from dips.deploy.deploy_file import DeployedClusterKnobs, Deployment
from dips.doctor import host, network
from dips.doctor.findings import Check, Finding, Findings, Grade, fail, ok, warn
from dips.doctor.host import check_packages
from dips.doctor.network import check_identities
from dips.local.sizing import SizeKnobs, SizeTable, size
from dips.master.config import MasterConfig

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
    found = kubernetes_api.open_context(context, namespace).get("Namespace", namespace)
    trip = format_seconds(time.monotonic() - began_s)
    there = f"namespace {namespace} is there" if found else f"`dips deploy apply` makes the namespace {namespace}"
    version, date = kubernetes_api.release_of(context)
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
    places = [("the master", deployment.master_address, "address of its site")]
    places += [
        (f"slave {name}", deployment.slave_address(index), "address of its site")
        for index, name in enumerate(deployment.slave_ids)
    ]
    for who, address, setting in places:
        found = network.check_name_found(who, address, setting)
        if found.remedy:
            yield warn("addresses", found.sentence, f"once the servers are rolled out: {found.remedy}")
            continue
        yield found
        reached = network.dialled(address)
        if reached.listens:
            yield network.judge_reached(who, address, reached, must_listen=True)
        else:
            sentence = f"{who} at {address} does not answer yet ({reached.why})"
            yield warn("reach", sentence, "roll it out, and open the way from each cluster's site")


# ---- how large, how long ----


def _sizes(deployment: Deployment) -> Findings:
    yield ok("placement", f"the servers go to {deployment.server_site.name}: {deployment.why_there}")
    for line in deployment.sizes.explain():
        yield ok("sizes", f"each {line} (nodes must have that free)")
    for cluster in deployment.clusters:
        yield _cluster_memory(deployment, cluster)


def _cluster_memory(deployment: Deployment, cluster: DeployedClusterKnobs) -> Finding:
    needed = _table(deployment, 10e9).whole("cluster_memory_bytes")
    have = cluster.memory * cluster.nodes
    sentence = (
        f"cluster {cluster.id}: {cluster.nodes} nodes of {format_bytes(cluster.memory)}, of which Di-PS takes "
        f"{format_bytes(needed)} in addition to the training"
    )
    if needed > have:
        return fail("memory", sentence, "give [[clusters]] more memory or nodes, or lower what the model takes")
    if cluster.nodes > 1 and needed > cluster.memory:
        return warn(
            "memory", f"{sentence}, on its first node", "give the node of rank 0 that much, or shard the parameters"
        )
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
    return size(
        SizeKnobs(
            params=deployment.model.parameters,
            clusters=clusters,
            slaves=deployment.run.slaves,
            link=link_bits_per_s,
            wire=str(deployment.tables["worker"].get("wire_dtype", "float32")),
        )
    )
