"""`dips deploy`: a run on Kubernetes clusters in several places, from one file."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from dips.core.errors import ConfigError, DipsError
from dips.core.net.keys import security_from
from dips.core.observe.logs import LOG_FORMAT_VARIABLE, configure_logging
from dips.core.units import parse_seconds
from dips.deploy import identities
from dips.deploy import rollout as plan
from dips.deploy.compare import shown
from dips.deploy.deploy_file import AUTO, Deployment, read_deploy_file
from dips.deploy.health import dial
from dips.deploy.move import Move, volumes
from dips.deploy.objects import as_yaml
from dips.deploy.operate import LiveDeployment, PendingChanges
from dips.deploy.render import script, write_folders
from dips.local.operator_client import OperatorClient
from dips.local.view import status_json, status_view

if TYPE_CHECKING:
    from dips.deploy.kubernetes_api import KubernetesApi

app = typer.Typer(no_args_is_help=False)

File = Annotated[Path, typer.Argument(metavar="FILE.toml", help="The deployment; see examples/three-sites.toml.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output.")]
Wait = Annotated[str, typer.Option("--wait", metavar="DURATION", help="How long each part may take to become healthy.")]
Master = Annotated[
    str,
    typer.Option("--master", metavar="HOST:PORT", help="The master's address, such as a `kubectl port-forward`."),
]
Reach = Annotated[
    bool, typer.Option("--reach/--no-reach", help="Dial master and slaves from here before clusters start.")
]
WAIT = "15 min"


@app.command("plan")
def show_plan(
    file: File,
    summary: Annotated[bool, typer.Option("--summary", help="One line for each object.")] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Ask no cluster: compare with nothing.")] = False,
    as_json: AsJson = False,
) -> int:
    """Print all objects of a deployment, and what would change. Nothing is changed.

    Without a kubeconfig the objects are compared with nothing. Of keys only fingerprints are shown.
    """
    deployment = read_deploy_file(file)
    alone, not_asked = offline or _known_contexts() is None, list[str]()
    if alone:
        difference = PendingChanges(plan.steps(plan.stages(deployment), lambda context, document: None), [])
    else:
        site, not_asked = _site_of_all(deployment, WAIT)
        site.check_releases()
        difference = site.difference()
    planned, leaving = difference.planned, difference.leaving
    if as_json:
        every = [*(step for _, steps in planned for step in steps), *leaving]
        rows = [{"context": s.context, "action": s.action.name.lower(), "object": shown(s.wanted)} for s in every]
        print(json.dumps(rows))
        return 0
    _introduce(deployment)
    print("compared with nothing: no cluster was asked\n" if alone else "compared with what is there\n")
    for line in plan.lines(planned, summary):
        print(line)
    for step in leaving:
        print(f"- {step.name} (context {step.context})")
    print(plan.counts(planned, leaving))
    for line in [
        *filter(None, [difference.serving]),
        *not_asked,
        *plan.need_lines(plan.stages(deployment)),
    ]:
        print(line)
    _say_what_is_left(deployment)
    return 0


@app.command()
def apply(
    file: File,
    yes: Yes = False,
    wait: Wait = WAIT,
    waits: Annotated[bool, typer.Option("--wait-for/--no-wait", help="Whether to wait for parts at all.")] = True,
    reach: Reach = True,
    only: Annotated[
        Literal["servers"] | None, typer.Option("--only", help="Only the servers; clusters stay as they are.")
    ] = None,
    master: Master = "",
) -> int:
    """Apply the deployment: keys, master, slaves, then the clusters, each when the one before is healthy.

    Every object is first checked by the API servers, which keep nothing of it; a refusal changes nothing. The same
    command again goes on where it was, and changes nothing that is as it should be. Volumes are never deleted.
    """
    deployment = read_deploy_file(file)
    identities.check(deployment)
    site, not_asked = _site_of_all(deployment, wait, master, waits)
    site.prepare()
    difference = site.difference()
    if only:
        difference = difference.of_servers()
    _introduce(deployment)
    for line in plan.lines(difference.planned, summary=True):
        print(line)
    for line in [plan.counts(difference.planned, difference.leaving), *filter(None, [difference.serving]), *not_asked]:
        print(line)
    if difference.changes and not _agreed(yes, "apply it"):
        return 1
    changed = site.apply(difference, reach and waits)
    print(f"run {deployment.name}: {changed} objects were changed")
    _say_what_is_left(deployment)
    return 0


@app.command()
def status(file: File, as_json: AsJson = False, master: Master = "") -> int:
    """Show every object of a deployment and how it is, and all that `dips status` shows of the run.

    Exit code 4 while an object waits or has failed.
    """
    deployment = read_deploy_file(file)
    site = _site(deployment, WAIT, master)
    states = list(site.states())
    waits = any(state.health.value in ("waiting", "failed") for _, _, state in states)
    try:
        run, trouble = site.run_status(), ""
    except DipsError as error:
        run, trouble = None, str(error)
    if as_json:
        rows = [
            {"context": context, "kind": one["kind"], "name": one["metadata"]["name"], "health": state.health.value}
            | {"sentence": state.sentence}
            for context, one, state in states
        ]
        print(json.dumps({"objects": rows, "run": status_json(run) if run else None, "trouble": trouble}))
        return 4 if waits else 0
    table = Table("context", "object", "", "", box=None, pad_edge=False)
    for context, one, state in states:
        table.add_row(context, f"{one['kind']} {one['metadata']['name']}", state.health.value, state.sentence)
    Console().print(table)
    Console().print(status_view(run) if run else f"the run's status is not known: {trouble}")
    if run and deployment.standby and deployment.tables["master"].get("journal_replicas", 1):
        behind = [alarm.sentence for alarm in run.alarms if alarm.kind == "no_replica"]
        print(
            f"{deployment.name}-{deployment.standby.component}: {'; '.join(behind) or 'follows, and has all decisions'}"
        )
    return 4 if waits else 0


@app.command("take-over")
def take_over(file: File, yes: Yes = False) -> int:
    """Let the standby serve the run, as when the master's machine is lost. The other master ends when it hears of it.

    Only the standby's context is asked. Then raise take_overs in the file and apply it: the other master's pod becomes
    the standby, with an empty directory; what it held is kept in the old one.
    """
    deployment = read_deploy_file(file)
    if not _agreed(yes, f"let the standby of run {deployment.name} take over"):
        return 1
    place = _site(deployment).take_over()
    print(f"run {deployment.name}: the {place.component} in context {place.site.context} serves at {place.address}")
    print(f"once the other one's machine is back: take_overs = {deployment.run.take_overs + 1} in {file}, and apply")
    return 0


@app.command()
def scale(file: File, yes: Yes = False, wait: Wait = WAIT, master: Master = "") -> int:
    """Bring the run to as many slaves as the file says, while it goes on.

    Added slaves get keys, settings and a place, and then blocks of the model. Slaves that are to go give their blocks
    away first, and their pods go when they hold nothing; their volumes stay.
    """
    deployment = read_deploy_file(file)
    site = _site(deployment, wait, master)
    if not _agreed(yes, f"bring run {deployment.name} to {deployment.run.slaves} slaves"):
        return 1
    before, after = site.scale()
    print(f"run {deployment.name}: {before} slaves were, {after} are; `dips deploy apply {file}` does the rest")
    return 0


@app.command()
def drain(
    file: File,
    cluster: Annotated[str, typer.Argument(metavar="CLUSTER", help="The cluster's name.")],
    wait: Wait = WAIT,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; the log quotes it.")] = "asked to",
    master: Master = "",
) -> int:
    """Let a cluster push its last steps and leave the run, and wait until its job has ended."""
    deployment = read_deploy_file(file)
    _site(deployment, wait, master).drain(cluster, reason)
    return 0


@app.command()
def delete(
    file: File,
    cluster: Annotated[
        str, typer.Option("--cluster", metavar="CLUSTER", help="Only what belongs to one cluster.")
    ] = "",
    delete_volumes: Annotated[
        bool, typer.Option("--delete-volumes", help="Also delete the volumes, with the model and the journal on them.")
    ] = False,
    yes: Yes = False,
    wait: Wait = WAIT,
) -> int:
    """Delete the run's objects in all contexts, clusters first. Namespaces stay; volumes too, unless asked."""
    deployment = read_deploy_file(file)
    site, not_asked = _site_of_all(deployment, wait)
    going, volumes = site.going(cluster), site.volumes(cluster)
    for step in [*going, *(volumes if delete_volumes else [])]:
        print(f"- {step.name} (context {step.context})")
    for line in not_asked:
        print(line)
    if not (going or (delete_volumes and volumes)):
        print("nothing of it is there")
    elif not _agreed(yes, f"delete {len(going) + (len(volumes) if delete_volumes else 0)} objects"):
        return 1
    site.delete(going, volumes if delete_volumes else [])
    if volumes and not delete_volumes:
        names = ", ".join(step.wanted["metadata"]["name"] for step in volumes)
        print(f"{len(volumes)} volumes stay ({names}): --delete-volumes deletes them")
    return 0


@app.command()
def render(
    file: File,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="Where the folders are written.")],
) -> int:
    """Write the objects as files with a kustomization for the servers and for each cluster, and the scripts of other
    sites.

    The namespace has a folder of its own, and monitors for the Prometheus operator are components of kustomize: an
    overlay lists those that it needs. Secrets are left out: keys do not belong into a repository. `dips deploy plan`
    shows them.
    """
    deployment = read_deploy_file(file)
    for path in write_folders(deployment, output):
        print(path)
    return 0


@app.command()
def move(file: File, yes: Yes = False, wait: Wait = WAIT, reach: Reach = True, master: Master = "") -> int:
    """Take the servers, with their volumes, to the site that the file names now, and start them there.

    All clusters push their last steps and leave; master and slaves stop; their volumes are copied through this machine
    and compared file by file; then everything starts at the new site. Old volumes stay. After an error the same command
    goes on. Until the copy is complete, `dips deploy apply` with the old placement starts the old servers again.
    """
    deployment = read_deploy_file(file)
    if deployment.run.placement == AUTO:
        raise ConfigError(f"{file} [deploy]: name the site to which the servers move as placement, instead of {AUTO!r}")
    apis = _apis(deployment)
    rollout = _rollout(apis, wait)
    site = _live(deployment, apis, rollout, "")
    moving = Move(deployment, apis, rollout, lambda old: _live(old, apis, rollout, master))
    old, new = moving.old.server_site, deployment.server_site
    print(f"run {deployment.name}: from {old.name} (context {old.context}) to {new.name} (context {new.context})")
    for volume in volumes(deployment):
        print(f"{volume.claim}: up to {volume.spec['resources']['requests']['storage']}")
    if not _agreed(yes, "drain all clusters, stop the servers, and copy their volumes"):
        return 1
    moving.carry_out()
    site.prepare()
    changed = site.apply(site.difference(), reach)
    print(f"run {deployment.name} is at {new.name}: {changed} objects were changed; the old volumes stay at {old.name}")
    _say_what_is_left(deployment)
    return 0


@app.command()
def rights(
    file: File,
    with_move: Annotated[bool, typer.Option("--move", help="Also those that `dips deploy move` needs.")] = False,
) -> int:
    """Print the rights that plan, apply, scale, drain and delete need in each context, as a Role for kubectl.

    An administrator applies it, and binds it to whoever deploys. Only a namespace that is missing needs more.
    """
    deployment = read_deploy_file(file)
    print(f"# in {', '.join(plan.contexts(deployment))}; then")
    print(f"# kubectl -n {deployment.run.namespace} create rolebinding {plan.ROLE} --role={plan.ROLE} --user=NAME")
    print(as_yaml(plan.role(deployment, with_move)), end="")
    return 0


@app.command()
def supervise(
    master: Annotated[str, typer.Option("--master", metavar="HOST:PORT", help="The master's address.")],
    keys: Annotated[Path, typer.Option("--keys", metavar="DIR", help="Keys that may ask for the status.")],
    run_id: Annotated[str, typer.Option("--run-id", metavar="TEXT", help="The run; names of pods begin with it.")],
    namespace: Annotated[str, typer.Option("--namespace", metavar="TEXT", help="Where the pods are.")],
    slaves: Annotated[int, typer.Option("--slaves", min=1, help="How many slaves there are.")],
    context: Annotated[str, typer.Option("--context", metavar="NAME", help="Of the kubeconfig; else this pod's.")] = "",
    gone: Annotated[
        str, typer.Option("--gone", metavar="DURATION", help="How long a slave may be away from the master.")
    ] = "2 min",
    stuck: Annotated[str, typer.Option("--stuck", metavar="DURATION", help="How long a round may wait for one.")] = (
        "10 min"
    ),
    every: Annotated[str, typer.Option("--every", metavar="DURATION", help="Time between two checks.")] = "10 s",
    looks: Annotated[int, typer.Option("--looks", min=0, help="End after so many checks; 0: never.")] = 0,
) -> int:
    """Watch the slaves for the master, and end the pod of one that is not healthy though its StatefulSet takes it so.

    It runs as a pod of the deployment. It ends one pod at a time, and none while the master does not answer.
    """
    from dips.deploy.kubernetes_api import open_context, open_from_pod
    from dips.deploy.supervise import SlaveSupervisor, WatchLimits

    as_json = os.environ.get(LOG_FORMAT_VARIABLE) == "json"
    configure_logging("supervisor", "supervisor", "INFO", "json" if as_json else "human")
    api = open_context(context, namespace) if context else open_from_pod(namespace)
    patience, pause_s = WatchLimits(parse_seconds(gone), parse_seconds(stuck)), parse_seconds(every)
    with OperatorClient(master, run_id, security=security_from(keys, False, "the supervisor")) as operator:
        supervisor = SlaveSupervisor(run_id, slaves, operator.status, api, patience)
        logging.getLogger("dips.supervisor").info("watching %d slaves of run %s", slaves, run_id)
        supervisor.tick()
        for _ in range(looks - 1) if looks else iter(int, 1):
            time.sleep(pause_s)
            supervisor.tick()
    return 0


# ---- parts ----


def _known_contexts() -> list[str] | None:
    from dips.deploy.kubernetes_api import known_contexts

    return known_contexts()


def _site(deployment: Deployment, wait: str = WAIT, master: str = "") -> LiveDeployment:
    apis = _apis(deployment)
    return _live(deployment, apis, _rollout(apis, wait), master)


def _site_of_all(
    deployment: Deployment, wait: str, master: str = "", waits: bool = True
) -> tuple[LiveDeployment, list[str]]:
    """Also with contexts that only an earlier file named, as the run's Secrets know; and sentences about those that are
    not asked, and about volumes there."""
    from dips.deploy.kubernetes_api import check_contexts, open_context

    known, apis, said, away = _known_contexts(), _apis(deployment), list[str](), dict[str, list[str]]()
    remembered = plan.former_contexts(deployment, apis)
    named = [one for api in apis.values() for one in plan.everything(api, deployment.name)] if remembered else []
    ours = {one["metadata"]["uid"] for one in named}
    for context in remembered or ():
        try:
            check_contexts([context], known)
            api = open_context(context, deployment.run.namespace)
            api.check_release()
            if any(one["metadata"]["uid"] in ours for one in plan.everything(api, deployment.name)):
                continue  # an earlier name of a context of the file: what is there is wanted
            volumes = api.list("PersistentVolumeClaim", {plan.INSTANCE: deployment.name})
            if volumes:
                claims = ", ".join(one["metadata"]["name"] for one in volumes)
                said.append(f"volumes stay in context {context}, which the file names no longer: {claims}")
            apis[context] = api
        except DipsError as error:
            away.setdefault(f"an earlier file named them: {error}", []).append(context)
    if remembered is None and (others := [context for context in known or [] if context not in apis]):
        away["no site of the file names them"] = others
    look = f"--namespace {deployment.run.namespace} get all,secrets,pvc --selector {plan.INSTANCE}={deployment.name}"
    for why, names in away.items():
        said.append(
            f"not asked ({why}): contexts {', '.join(names)}; what the run may have there is neither counted nor "
            f"deleted: `kubectl --context {names[0]} {look}` lists it"
        )
    return _live(deployment, apis, _rollout(apis, wait, waits), master), said


def _apis(deployment: Deployment) -> dict[str, KubernetesApi]:
    from dips.deploy.kubernetes_api import check_contexts, open_context

    names = plan.contexts(deployment)
    check_contexts(names, _known_contexts())
    return {name: open_context(name, deployment.run.namespace) for name in names}


def _rollout(apis: Mapping[str, KubernetesApi], wait: str, waits: bool = True) -> plan.Rollout:
    return plan.Rollout(apis, functools.partial(print, file=sys.stderr, flush=True), parse_seconds(wait), waits)


def _live(
    deployment: Deployment, apis: Mapping[str, KubernetesApi], rollout: plan.Rollout, master: str
) -> LiveDeployment:
    def operator() -> OperatorClient:
        security = security_from(deployment.run.keys / identities.OPERATOR, False, "this command")
        return OperatorClient(master or deployment.master_address, deployment.name, security=security)

    return LiveDeployment(deployment, apis, rollout, operator, dial)


def _introduce(deployment: Deployment) -> None:
    site = deployment.server_site
    print(f"run {deployment.name}: master and {deployment.run.slaves} slaves at {site.name} (context {site.context})")
    print(deployment.why_there)
    for line in deployment.sizes.explain():
        print(line)
    print(f"clusters dial the master at {deployment.master_address}, slaves at {deployment.slave_address(0)}, ...")


def _say_what_is_left(deployment: Deployment) -> None:
    """To do by hand."""
    if absent := identities.missing(deployment):
        names = ", ".join(one.name for one in absent)
        print(f"keys are missing ({names}): {identities.how_to_make(deployment, absent)}")
    for cluster in (one for one in deployment.clusters if not one.on_kubernetes):
        name, _ = script(deployment, cluster)
        print(f"cluster {cluster.id} is started by {name}: `dips deploy render {deployment.file} --output DIR`")


def _agreed(yes: bool, what: str) -> bool:
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigError(f"there is no terminal on which to ask whether to {what}: give --yes")
    return typer.confirm(f"{what}?")
