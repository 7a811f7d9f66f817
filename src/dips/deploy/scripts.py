"""Writes the start scripts of clusters without Kubernetes: one for Slurm, one for a shell. Pure texts.

Everything that comes from the file is quoted: a name or argument can never be read as a command.
"""

from __future__ import annotations

import shlex

from dips.core.release import requirement
from dips.deploy.clusters import cluster_settings, command, environment
from dips.deploy.deploy_file import Deployment
from dips.deploy.deploy_knobs import DeployedClusterKnobs

NODE_MEMORY_UNIT = 1 << 20


def script(deployment: Deployment, cluster: DeployedClusterKnobs) -> tuple[str, str]:
    """The name and the text of the script with which this cluster is started."""
    if cluster.starts == "slurm":
        return f"{deployment.name}-{cluster.id}.sbatch", slurm_script(deployment, cluster)
    return f"{deployment.name}-{cluster.id}.sh", plain_script(deployment, cluster)


def slurm_script(deployment: Deployment, cluster: DeployedClusterKnobs) -> str:
    """A script for sbatch. It is queued again when it dies: a cluster comes back as a new incarnation and goes on."""
    name = f"{deployment.name}-{cluster.id}"
    wanted = [
        f"--job-name={name}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={round(cluster.cpus + 0.499)}",
        f"--mem={-(-cluster.memory // NODE_MEMORY_UNIT)}M",
        *([f"--gpus-per-node={cluster.gpus}"] if cluster.gpus else []),
        *([f"--partition={cluster.partition}"] if cluster.partition else []),
        "--requeue",
        "--signal=B:TERM@120",
        f"--output={name}-%j.log",
    ]
    run = _line(deployment, cluster, '"$first"', '"$SLURM_NODEID"')
    body = [
        'first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        "export first",
        f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(run)} &",
        "child=$!",
        """trap 'kill -TERM "$child"' TERM  # time to push the last steps""",
        'wait "$child"',
        "code=$?",
        # A signal that is trapped ends the first wait, long before the cluster has left.
        'if kill -0 "$child" 2> /dev/null; then wait "$child"; code=$?; fi',
        'case "$code" in 0 | 2 | 8) exit "$code" ;; esac  # ended well, a setting is wrong, or its name is taken',
        'scontrol requeue "$SLURM_JOB_ID"',
    ]
    return _text([f"#SBATCH {one}" for one in wanted], deployment, cluster, body)


def plain_script(deployment: Deployment, cluster: DeployedClusterKnobs) -> str:
    """A script for a shell on one machine; it starts the cluster again unless it ended well or a setting is wrong."""
    run = _line(deployment, cluster, "127.0.0.1", "0")
    body = [
        "while true; do",
        f"  {run} && exit 0",
        "  code=$?",
        '  case "$code" in 2 | 8) exit "$code" ;; esac  # a setting is wrong, or its name is taken: a person must act',
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


def _line(deployment: Deployment, cluster: DeployedClusterKnobs, host: str, rank: str) -> str:
    """The command with its arguments quoted; host and rank are the shell's own words."""
    file = f"{deployment.name}-{cluster.id}.toml"
    words = command(deployment, cluster, file, "@host@", "@rank@")
    return " ".join(shlex.quote(word) for word in words).replace("@host@", host).replace("@rank@", rank)
