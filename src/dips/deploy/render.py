"""Writes a deployment as files: a folder for each context with a kustomization, and scripts for other sites."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

from dips.core.errors import ConfigError
from dips.core.release import requirement
from dips.deploy import rollout
from dips.deploy.clusters import cluster_settings, command, end_s, environment
from dips.deploy.deploy_file import DeployedClusterKnobs, Deployment
from dips.deploy.objects import MONITORS, POD_SECURITY, Object, as_yaml

# ---- scripts ---------------------------------------------------------------------------------------------------------
#
# Writes the start scripts of clusters without Kubernetes: one for Slurm, one for a shell. Pure texts.
#
# Everything that comes from the file is quoted: a name or argument can never be read as a command.


NODE_MEMORY_UNIT = 1 << 20


def script(deployment: Deployment, cluster: DeployedClusterKnobs) -> tuple[str, str]:
    """The name and the text of the script with which this cluster is started."""
    if cluster.starts == "slurm":
        return f"{deployment.name}-{cluster.id}.sbatch", slurm_script(deployment, cluster)
    return f"{deployment.name}-{cluster.id}.sh", plain_script(deployment, cluster)


def slurm_script(deployment: Deployment, cluster: DeployedClusterKnobs) -> str:
    """A script for sbatch. It is queued again at the time limit and when its cluster dies, which comes back as a new
    incarnation and goes on; not when it is cancelled, and where a person must act.
    """
    name, leave_s, cpus = f"{deployment.name}-{cluster.id}", end_s(deployment), round(cluster.cpus + 0.499)
    wanted = [
        f"--job-name={name}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        f"--mem={-(-cluster.memory // NODE_MEMORY_UNIT)}M",
        *([f"--gpus-per-node={cluster.gpus}"] if cluster.gpus else []),
        *([f"--partition={cluster.partition}"] if cluster.partition else []),
        "--requeue",
        f"--signal=B:USR1@{leave_s}",
        f"--output={name}-%j.log",
        "--open-mode=append",
    ]
    run = _line(deployment, cluster, '"$first"', '"$SLURMD_NODENAME"')
    # Where one node has ended, the others have the time of a last push: they may still be pushing. Since Slurm 22.05
    # srun does not take --cpus-per-task from sbatch.
    step = f"srun --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait={leave_s} bash -c {shlex.quote(run)} &"
    body = SLURM_BODY.replace("@step@", step).strip().splitlines()
    return _text([f"#SBATCH {one}" for one in wanted], deployment, cluster, body)


SLURM_BODY = r"""
first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export first
# Slurm sends USR1 before the time limit, and TERM when the job is cancelled. The steps get TERM for both: the cluster
# pushes its last steps and ends with 143. (A TERM to srun would kill it.)
leave() {
  signalled=yes
  scancel --signal=TERM "$SLURM_JOB_ID"
}
# A job that is cancelled stays so. One whose time is over, or that is preempted, gets TERM too, and KILL soon after: it
# is queued again at once.
end() {
  case "$(scontrol show job "$SLURM_JOB_ID")" in
    *Reason=TimeLimit* | *PreemptTime=[0-9]*) scontrol requeue "$SLURM_JOB_ID" ;;
  esac
  again=no
  leave 2> /dev/null  # Slurm has told the steps already, unless this was `scancel --batch`
}
again=yes final=
trap leave USR1
trap end TERM
# A node says after which code a person must act: srun hides it where it has to kill another node.
for code in 2 8 9; do trap "final=$code signalled=yes" "RTMIN+$code"; done
@step@
child=$! signalled=yes
while [ "$signalled" = yes ]; do signalled=no; wait "$child"; code=$?; done  # a signal ends a wait, not the cluster
case "${final:-$code}" in
  0 | 2 | 8 | 9) exit "${final:-$code}" ;;    # ended well; a setting is wrong, its name is taken, its keys are refused
  202 | 208 | 209) exit "$((code - 200))" ;;  # the same of one of several nodes, with --for-srun
esac
# Incomplete: not if it was cancelled just now, and the steps have ended before TERM came here.
if [ "$again" = yes ]; then
  echo "srun ended with $code: the job is queued again" >&2
  scontrol requeue Incomplete "$SLURM_JOB_ID"
fi
exit "$code"
"""


def plain_script(deployment: Deployment, cluster: DeployedClusterKnobs) -> str:
    """A script for a shell on one machine; it starts the cluster again unless it ended well or a setting is wrong."""
    run = _line(deployment, cluster, "127.0.0.1", "127.0.0.1")
    body = [
        "while true; do",
        f"  {run} && exit 0",
        "  code=$?",
        '  case "$code" in 2 | 8 | 9) exit "$code" ;; esac  # settings, its name or its keys: a person must act',
        '  echo "cluster ended with $code; again in 10 s" >&2',
        "  sleep 10",
        "done",
    ]
    return _text([], deployment, cluster, body)


def _text(first: list[str], deployment: Deployment, cluster: DeployedClusterKnobs, body: list[str]) -> str:
    keys = f"keys/{cluster.id}"
    variables = environment(deployment, cluster, "")
    variables.pop("DIPS_KEYS")
    lines = [
        "#!/usr/bin/env bash",
        *first,
        f"# Cluster {cluster.id} of run {deployment.name}. It needs {requirement('worker')} on its nodes, and its own "
        "identity,",
        f"# the folder {keys} of `dips keys`, next to this script (or DIPS_KEYS), readable by no one else.",
        "set -u",
        *(f"export {key}={shlex.quote(value)}" for key, value in variables.items()),
        f'export DIPS_KEYS="${{DIPS_KEYS:-$PWD/{keys}}}"',
    ]
    if not cluster.command:
        settings = cluster_settings(deployment, cluster, ".")["cluster.toml"]
        file = f"{deployment.name}-{cluster.id}.toml"
        lines += [f"cat > {shlex.quote(file)} <<'SETTINGS'", settings.rstrip("\n"), "SETTINGS"]
    return "\n".join([*lines, *body, ""])


def _line(deployment: Deployment, cluster: DeployedClusterKnobs, first: str, own: str) -> str:
    """The command with its arguments quoted; first and own, the nodes' names, are the shell's own words."""
    file = f"{deployment.name}-{cluster.id}.toml"
    words = command(deployment, cluster, file, "@first@", "@own@")
    return " ".join(shlex.quote(word) for word in words).replace("@first@", first).replace("@own@", own)


# ---- render ----------------------------------------------------------------------------------------------------------


MARK = "# Written by `dips deploy render` from {file}: change that, or patch this in an overlay.\n"


NAMESPACE, OPERATOR = "namespace", "prometheus-operator"


def write_folders(deployment: Deployment, output: Path) -> Iterator[Path]:
    """DIR/namespace, DIR/servers, DIR/standby, DIR/cluster-ID, and DIR/scripts; yields each file. Raises ConfigError
    when one cannot be written.
    """
    for folder, objects in folders(deployment).items():
        yield from write_kustomization(output / folder, objects, str(deployment.file))
    for cluster in (one for one in deployment.clusters if not one.on_kubernetes):
        name, text = script(deployment, cluster)
        yield _write(output / "scripts" / name, text, 0o755)


def folders(deployment: Deployment) -> dict[str, list[Object]]:
    """The objects by folder, without secrets.

    The namespace has a folder of its own: an overlay may list several of the others, and kustomize refuses an object
    that comes twice. Monitors are a component inside of their folder: where the Prometheus operator is not installed,
    the rest can be applied without them.
    """
    found: dict[str, list[Object]] = {}
    for stage in rollout.stages(deployment):
        standby = "standby" if stage.part is rollout.RolloutPart.STANDBY else "servers"
        name = f"cluster-{stage.cluster}" if stage.cluster else standby
        for one in stage.objects:
            if one["kind"] == "Namespace":
                # The folder is for all contexts: of them the one whose pods need the most.
                if NAMESPACE not in found or one["metadata"]["labels"][f"{POD_SECURITY}/enforce"] == "privileged":
                    found[NAMESPACE] = [one]
            elif one["kind"] != "Secret":
                folder = f"{name}/{OPERATOR}" if one["kind"] in MONITORS else name
                found.setdefault(folder, []).append(one)
    return found


def write_kustomization(folder: Path, objects: Iterable[Object], file: str) -> Iterator[Path]:
    """One file for each kind, and a kustomization that lists them: a component where the objects are monitors."""
    by_kind: dict[str, list[Object]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"].lower(), []).append(one)
    mark = MARK.format(file=file)
    for kind, ones in by_kind.items():
        yield _write(folder / f"{kind}.yaml", mark + as_yaml(*ones))
    of_component = {"apiVersion": "kustomize.config.k8s.io/v1alpha1", "kind": "Component"}
    of_folder = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    top = {
        **(of_component if folder.name == OPERATOR else of_folder),
        "resources": [f"{kind}.yaml" for kind in by_kind],
    }
    yield _write(folder / "kustomization.yaml", mark + as_yaml(top))


def _write(file: Path, text: str, mode: int = 0o644) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}; choose another folder") from error
    return file
