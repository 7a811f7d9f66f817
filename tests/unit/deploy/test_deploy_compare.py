"""What would change: only our fields count, defaults of the API and others' work are left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from support.deploy_files import EXAMPLE

from dips.core.errors import ConfigError
from dips.deploy import rollout
from dips.deploy.compare import FIELDS, STOPPED_WITH, ObjectAction, diff_lines, marked, merge_patch, step_for
from dips.deploy.deploy_file import read_deploy_file

Object = dict[str, Any]
DEPLOYMENT = read_deploy_file(EXAMPLE)
EVERYTHING = [one for stage in rollout.stages(DEPLOYMENT) for one in stage.objects]
SAME, CHANGE, REPLACE = ObjectAction.SAME, ObjectAction.CHANGE, ObjectAction.REPLACE


def wanted(kind: str, name: str) -> Object:
    (found,) = [one for one in EVERYTHING if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return copy.deepcopy(found)


def live(kind: str, name: str) -> Object:
    """As the API would give it back: with what it adds."""
    found = marked(wanted(kind, name))
    found["metadata"] |= {"uid": "u", "resourceVersion": "7", "generation": 1}
    found["status"] = {"readyReplicas": 1}
    return found


SETS = ("StatefulSet", "three-sites-slave")
JOB = ("Job", "three-sites-cluster-a")
JOBSET = ("JobSet", "three-sites-cluster-b")
BINDING = ("RoleBinding", "three-sites-supervisor")
CLAIM = ("PersistentVolumeClaim", "three-sites-cluster-b")


def put(*path: str | int, value: object) -> Callable[[Object], None]:
    """A change: the value at this place."""

    def change(there: Any) -> None:
        for key in path[:-1]:
            there = there[key]
        there[path[-1]] = value

    return change


POD = ("spec", "template", "spec")
STORAGE = ("spec", "volumeClaimTemplates", 0, "spec", "resources", "requests", "storage")
CHANGES: dict[str, tuple[tuple[str, str], Callable[[Object], None], ObjectAction | str]] = {
    "a stranger's label": (SETS, put("metadata", "labels", "team", value="blue"), SAME),
    "a default of the API": (SETS, put("spec", "revisionHistoryLimit", value=10), SAME),
    "a default within a list": (SETS, put(*POD, "containers", 0, "stdin", value=False), SAME),
    "another number of slaves": (SETS, put("spec", "replicas", value=5), SAME),
    "a larger volume": (SETS, put(*STORAGE, value="9Ti"), SAME),
    "a job that Kueue let go": (JOB, put("spec", "suspend", value=False), SAME),
    "a container more": (SETS, lambda there: there["spec"]["template"]["spec"]["containers"].append({}), CHANGE),
    "a container's name": (SETS, put(*POD, "containers", 0, "name", value="x"), CHANGE),
    "another queue of a job": (JOB, put("metadata", "labels", "kueue.x-k8s.io/queue-name", value="x"), CHANGE),
    "another pod of a job": (JOB, put(*POD, "containers", 0, "image", value="old"), REPLACE),
    "another pod of a job set": (JOBSET, put("spec", "replicatedJobs", 0, "replicas", value=7), REPLACE),
    "another subject": (BINDING, put("subjects", 0, "name", value="x"), CHANGE),
    "another role": (BINDING, put("roleRef", "name", value="x"), REPLACE),
    "a smaller volume": (SETS, put(*STORAGE, value="1Gi"), "StatefulSet three-sites-slave has 1Gi and needs"),
    "a smaller claim": (CLAIM, put(*STORAGE[:1], *STORAGE[4:], value="1Gi"), "three-sites-cluster-b has 1Gi and needs"),
    "another name of a service": (SETS, put("spec", "serviceName", value="x"), "serviceName cannot be changed"),
    "another selector": (
        ("Deployment", "three-sites-supervisor"),
        put("spec", "selector", value={"matchLabels": {"a": "b"}}),
        "selector cannot be changed",
    ),
    "another access": (CLAIM, put("spec", "accessModes", value=["x"]), "accessModes cannot be changed"),
    "another address": (
        ("Service", "three-sites-cluster-a"),
        put("spec", "clusterIP", value="10.0.0.1"),
        "clusterIP cannot be changed",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_done_about_a_difference(name: str) -> None:
    key, change, action = CHANGES[name]
    there = live(*key)
    change(there)
    if isinstance(action, str):
        with pytest.raises(ConfigError, match=action):
            step_for("here", wanted(*key), there)
    else:
        assert step_for("here", wanted(*key), there).action is action


@pytest.mark.parametrize(("have", "stays"), [("500Gi", True), ("1Ti", True), ("400Gi", True), ("399Gi", False)])
def test_volumes_that_are_there_stay_while_they_are_enough(have: str, stays: bool) -> None:
    ours, there = wanted(*SETS), live(*SETS)
    put(*STORAGE, value="500Gi")(ours)
    put(*STORAGE, value=have)(there)
    if not stays:
        with pytest.raises(ConfigError, match=r"has 399Gi and needs 400Gi: .*enlarge it"):
            step_for("here", ours, there, "400Gi")
        return
    step = step_for("here", ours, there, "400Gi")
    assert step.action is SAME
    (line,) = diff_lines(step)
    said = "" if have == "500Gi" else f": its volumes stay at {have}, those of a new run would have 500Gi"
    assert line == f"= StatefulSet three-sites-slave{said}"


@pytest.mark.parametrize(("stopped_with", "pods"), [("3", 3), ("", 0), ("three", 0)])
def test_a_set_that_was_stopped_for_a_move_starts_with_as_many_pods(stopped_with: str, pods: int) -> None:
    there = live(*SETS)
    there["spec"]["replicas"] = 0
    there["metadata"]["annotations"][STOPPED_WITH] = stopped_with
    step = step_for("here", wanted(*SETS), there)
    assert step.wanted["spec"]["replicas"] == pods
    assert step.patch == ({"spec": {"replicas": pods}} if pods else None)


def test_a_field_of_ours_that_somebody_changed_is_set_back() -> None:
    there = live(*SETS)
    there["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    step = step_for("here", wanted(*SETS), there)
    assert step.patch == {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 60}}}}
    assert list(diff_lines(step)) == [
        "~ StatefulSet three-sites-slave",
        "  - spec.template.spec.terminationGracePeriodSeconds: 1",
        "  + spec.template.spec.terminationGracePeriodSeconds: 60",
    ]


def test_a_field_that_we_set_and_want_no_more_goes_and_a_strangers_stays() -> None:
    service, there = wanted("Service", "three-sites-slave-0"), live("Service", "three-sites-slave-0")
    there["metadata"]["annotations"]["someone/else"] = "x"
    del service["metadata"]["annotations"]
    gone = merge_patch(marked(service), there)["metadata"]["annotations"]
    assert gone.pop(FIELDS)
    assert gone == {"external-dns.alpha.kubernetes.io/hostname": None}
    there["metadata"]["annotations"][FIELDS] = "edited by hand"
    assert set(merge_patch(marked(service), there)["metadata"]["annotations"]) == {FIELDS}


def test_a_plan_shows_lines_of_texts_and_of_secrets_only_fingerprints() -> None:
    settings, there = wanted("ConfigMap", "three-sites-master"), live("ConfigMap", "three-sites-master")
    there["data"] = {"master.toml": "a = 1\nb = 2\n"}
    settings["data"] = {"master.toml": "a = 1\nb = 3\n"}
    told = list(diff_lines(step_for("here", settings, there)))
    assert told == ["~ ConfigMap three-sites-master", "    data.master.toml", "  - b = 2", "  + b = 3"]
    secret, there = wanted("Secret", "three-sites-keys-master"), live("Secret", "three-sites-keys-master")
    secret["data"], there["data"] = {"tls.key": "bmV3", "ca.crt": ""}, {"tls.key": "b2xk"}
    step = step_for("here", secret, there)
    _, *told = diff_lines(step)
    assert told[:2] == [
        "  - data.tls.key: (3 bytes, sha256 cba06b5736fa)",
        "  + data.tls.key: (3 bytes, sha256 11507a0e2f5e)",
    ]
    assert "b2xk" not in str(marked(there)["metadata"]["annotations"])
    _, *made = diff_lines(step_for("here", secret, None))
    assert "  +   tls.key: (3 bytes, sha256 11507a0e2f5e)" in made
    assert "  +   ca.crt: (not there yet)" in made
    assert FIELDS not in "".join(made)
