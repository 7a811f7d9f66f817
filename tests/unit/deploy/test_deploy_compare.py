"""What would change: only our fields count, defaults of the API and others' work are left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from support.deploy_files import EXAMPLE

from dips.core.errors import ConfigError
from dips.deploy import rollout
from dips.deploy.compare import FIELDS, ObjectAction, diff_lines, marked, merge_patch, shape, step_for
from dips.deploy.deploy_file import read_deploy_file

Object = dict[str, Any]
DEPLOYMENT = read_deploy_file(EXAMPLE)
EVERYTHING = [one for stage in rollout.stages(DEPLOYMENT) for one in stage.objects]


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


@pytest.mark.parametrize("one", EVERYTHING, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_what_was_made_is_as_it_should_be(one: Object) -> None:
    there = {**marked(one), "status": {"observedGeneration": 1}}
    assert step_for("here", one, there).action is ObjectAction.SAME


def test_defaults_and_the_work_of_others_are_no_difference() -> None:
    there = live(*SETS)
    there["metadata"]["labels"]["team"] = "blue"
    there["spec"]["revisionHistoryLimit"] = 10
    there["spec"]["template"]["spec"]["containers"][0]["terminationMessagePath"] = "/dev/termination-log"
    assert step_for("here", wanted(*SETS), there).action is ObjectAction.SAME


def test_a_field_of_ours_that_somebody_changed_is_set_back() -> None:
    there = live(*SETS)
    there["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 1
    step = step_for("here", wanted(*SETS), there)
    assert step.action is ObjectAction.CHANGE
    assert step.patch == {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 60}}}}
    assert list(diff_lines(step))[1:] == [
        "  - spec.template.spec.terminationGracePeriodSeconds: 1",
        "  + spec.template.spec.terminationGracePeriodSeconds: 60",
    ]


def test_a_field_that_we_set_and_want_no_more_goes_and_a_strangers_stays() -> None:
    service, there = wanted("Service", "three-sites-slave-0"), live("Service", "three-sites-slave-0")
    there["metadata"]["annotations"]["someone/else"] = "x"
    del service["metadata"]["annotations"]
    patch = merge_patch(marked(service), there)
    gone = patch["metadata"]["annotations"]
    assert gone.pop(FIELDS)
    assert gone == {"external-dns.alpha.kubernetes.io/hostname": None}


def test_a_container_more_in_the_pod_is_a_difference() -> None:
    there = live(*SETS)
    there["spec"]["template"]["spec"]["containers"].append({"name": "injected"})
    assert step_for("here", wanted(*SETS), there).action is ObjectAction.CHANGE


def test_what_we_set_is_remembered_without_its_values() -> None:
    secret = wanted("Secret", "three-sites-keys-master")
    secret["data"] = {"tls.key": "c2VjcmV0"}
    assert "c2VjcmV0" not in marked(secret)["metadata"]["annotations"][FIELDS]
    assert shape(secret)["data"] == {"tls.key": 0}


def test_a_changed_key_is_told_by_its_fingerprint() -> None:
    secret, there = wanted("Secret", "three-sites-keys-master"), live("Secret", "three-sites-keys-master")
    secret["data"], there["data"] = {"tls.key": "bmV3"}, {"tls.key": "b2xk"}
    text = "\n".join(diff_lines(step_for("here", secret, there)))
    assert "data.tls.key: (3 bytes, sha256 " in text
    assert "bmV3" not in text
    assert "b2xk" not in text


def test_the_number_of_slaves_is_not_changed_by_the_way() -> None:
    there = live(*SETS)
    there["spec"]["replicas"] = 5
    assert step_for("here", wanted(*SETS), there).action is ObjectAction.SAME


def test_a_job_that_kueue_let_go_is_not_stopped_again() -> None:
    there = live(*JOB)
    there["spec"]["suspend"] = False
    assert step_for("here", wanted(*JOB), there).action is ObjectAction.SAME


def test_a_job_with_another_image_is_made_anew() -> None:
    there = live(*JOB)
    there["spec"]["template"]["spec"]["containers"][0]["image"] = "old"
    assert step_for("here", wanted(*JOB), there).action is ObjectAction.REPLACE


def test_a_label_of_a_job_is_changed_in_its_place() -> None:
    there = live(*JOB)
    there["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "other"
    assert step_for("here", wanted(*JOB), there).action is ObjectAction.CHANGE


def test_a_larger_volume_stays_and_a_smaller_one_is_an_error() -> None:
    larger, smaller = live(*SETS), live(*SETS)
    larger["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = "9Ti"
    assert step_for("here", wanted(*SETS), larger).action is ObjectAction.SAME
    smaller["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"] = "1Gi"
    with pytest.raises(ConfigError, match=r"has 1Gi and needs \d+Mi: a volume is not enlarged here"):
        step_for("here", wanted(*SETS), smaller)


def test_what_the_api_cannot_change_is_told_before_anything_is_done() -> None:
    there = live(*SETS)
    there["spec"]["serviceName"] = "another"
    with pytest.raises(ConfigError, match="StatefulSet three-sites-slave: serviceName cannot be changed"):
        step_for("here", wanted(*SETS), there)


def test_a_namespace_that_is_there_belongs_to_whoever_made_it() -> None:
    there = {"kind": "Namespace", "metadata": {"name": "dips", "labels": {}}}
    assert step_for("here", wanted_namespace(), there).action is ObjectAction.SAME


def wanted_namespace() -> Object:
    return next(one for one in EVERYTHING if one["kind"] == "Namespace")


# ---- the plan ----


def test_the_plan_goes_from_keys_to_clusters() -> None:
    found = rollout.steps(rollout.stages(DEPLOYMENT), lambda context, document: None)
    titles = [stage.title for stage, _ in found]
    assert titles == ["keys and settings", "master", "slaves", "supervisor and metrics", "cluster a", "cluster b"]
    first = [step.wanted["kind"] for step in found[0][1]]
    assert first[0] == "Namespace"
    assert first.index("Secret") < first.index("ConfigMap")
    every = [(step.context, step.name) for _, steps in found for step in steps]
    assert len(every) == len(set(every))
    assert rollout.counts(found) == "42 to make, 0 to change, 0 to replace, 0 as they should be, 0 to delete"


def test_what_nobody_wants_any_more_is_left_over_but_never_a_volume() -> None:
    old = {"kind": "Job", "metadata": {"name": "three-sites-cluster-z"}}
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "three-sites-cluster-z"}}
    kept = {"kind": "ConfigMap", "metadata": {"name": "three-sites-master"}}
    found = rollout.left_over(DEPLOYMENT, {"frankfurt-admin": [old, claim, kept]})
    assert [step.name for step in found] == ["Job three-sites-cluster-z"]


def test_another_number_of_slaves_is_for_scale() -> None:
    with pytest.raises(ConfigError, match=r"says slaves = 3, and the run has 2: `dips deploy scale"):
        rollout.check_slaves(DEPLOYMENT, {"spec": {"replicas": 2}})
    rollout.check_slaves(DEPLOYMENT, {"spec": {"replicas": 3}})
    rollout.check_slaves(DEPLOYMENT, None)
