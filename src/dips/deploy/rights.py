"""The rights that whoever runs `dips deploy` needs in each context, as a Role of the namespace. Pure.

None of them is of the cluster: a namespace that is there need not be seen. Who gives rights must have them: therefore
the supervisor's, to get and to delete pods.
"""

from __future__ import annotations

from collections.abc import Iterable

from dips.deploy.deploy_file import Deployment
from dips.deploy.objects import API_VERSIONS, EXTENSIONS, PLURALS, Object
from dips.deploy.rollout import KINDS, stages

ROLE = "dips-deploy"
VERBS = ("get", "list", "create", "patch", "delete")
OF_PODS = ("get", "delete")


def role(deployment: Deployment, move: bool = False) -> Object:
    """Of all kinds that a run can have; of kinds of extensions only those that the file needs. move: also what `dips
    deploy move` needs, which runs commands in pods of its own.
    """
    used = {one["kind"] for stage in stages(deployment) for one in stage.objects}
    kinds = [kind for kind in KINDS if kind in used or kind not in EXTENSIONS]
    groups = dict.fromkeys(API_VERSIONS[kind].rpartition("/")[0] for kind in kinds)
    rules = [
        _rule(group, (kind for kind in kinds if API_VERSIONS[kind].rpartition("/")[0] == group)) for group in groups
    ]
    return {
        "apiVersion": API_VERSIONS["Role"],
        "kind": "Role",
        "metadata": {
            "name": ROLE,
            "namespace": deployment.run.namespace,
            # Of no run: `dips deploy delete` must not delete what permits it.
            "labels": {"app.kubernetes.io/part-of": "dips"},
        },
        "rules": [*rules, *_of_pods(move)],
    }


def _of_pods(move: bool) -> list[Object]:
    ends = {"apiGroups": [""], "resources": ["pods"], "verbs": list(OF_PODS)}
    makes = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    # The client opens a WebSocket with a GET, for which RBAC wants get; from Kubernetes 1.35 on also create.
    executes = {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["get", "create"]}
    return [ends, makes, executes] if move else [ends]


def _rule(group: str, kinds: Iterable[str]) -> Object:
    return {"apiGroups": [group], "resources": [PLURALS[kind] for kind in kinds], "verbs": list(VERBS)}
