"""Whether an object of Kubernetes is as it should be: what the API says, in a word and a sentence."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from dips.deploy.health import Health, state_of, state_of_endpoint

READY, WAITING, DONE, FAILED = Health.READY, Health.WAITING, Health.DONE, Health.FAILED
TRUE = {"status": "True"}


def of_pods(kind: str, wanted: int | None, **status: Any) -> dict[str, Any]:
    spec = {} if wanted is None else {"replicas": wanted}
    return {"kind": kind, "metadata": {"generation": 1}, "spec": spec, "status": status}


def job(kind: str = "Job", suspend: bool = False, **status: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {}, "spec": {"suspend": suspend, "parallelism": 2}, "status": status}


def balancer(**ingress: str) -> dict[str, Any]:
    status = {"loadBalancer": {"ingress": [ingress]}} if ingress else {}
    return {"kind": "Service", "spec": {"type": "LoadBalancer"}, "status": status}


def ends(kind: str, *conditions: dict[str, str]) -> dict[str, Any]:
    return job(kind, conditions=list(conditions), active=2, ready=1)


SEEN = {"observedGeneration": 1}
NEW = {"currentRevision": "1", "updateRevision": "2"}


@pytest.mark.parametrize(
    ("live", "health", "sentence"),
    [
        (None, WAITING, "not there"),
        ({"kind": "Secret", "metadata": {}}, READY, "there"),
        (of_pods("StatefulSet", 2, readyReplicas=2), WAITING, "its change has yet to be seen"),
        (of_pods("StatefulSet", 2, **SEEN, readyReplicas=1), WAITING, "1 of 2 pods ready"),
        (of_pods("StatefulSet", None, **SEEN), WAITING, "0 of 1 pods ready"),
        (of_pods("StatefulSet", 2, **SEEN, readyReplicas=2), READY, "2 of 2 pods ready"),
        (of_pods("StatefulSet", 2, **SEEN, **NEW, readyReplicas=2), WAITING, "0 of 2 pods are the new ones"),
        (of_pods("StatefulSet", 2, **SEEN, **NEW, readyReplicas=2, updatedReplicas=2), READY, "2 of 2 pods ready"),
        (of_pods("Deployment", 1, readyReplicas=1, updatedReplicas=1), WAITING, "its change has yet to be seen"),
        (of_pods("Deployment", None, **SEEN, readyReplicas=1, updatedReplicas=0), WAITING, "0 of 1 pods ready"),
        (of_pods("Deployment", None, **SEEN, readyReplicas=0, updatedReplicas=1), WAITING, "0 of 1 pods ready"),
        (of_pods("Deployment", 1, **SEEN, readyReplicas=1, updatedReplicas=1), READY, "1 of 1 pods ready"),
        (job(suspend=True), READY, "waits in its queue"),
        (job(active=2, ready=1), WAITING, "1 of 2 pods run, 2 were started"),
        (job(active=2, ready=2), READY, "2 of 2 pods train"),
        (ends("Job", {"type": "Complete", **TRUE}), DONE, "ended well"),
        (ends("Job", {"type": "Complete", "status": "False"}), WAITING, "1 of 2 pods run, 2 were started"),
        (ends("Job", {"type": "Failed", **TRUE, "message": "code 2", "reason": "x"}), FAILED, "failed: code 2"),
        (ends("Job", {"type": "X", **TRUE}, {"type": "FailureTarget", **TRUE, "reason": "x"}), FAILED, "failed: x"),
        (ends("JobSet", {"type": "Failed", **TRUE}), FAILED, "failed: no reason given"),
        (ends("JobSet", {"type": "Complete", **TRUE}), READY, "started"),
        (ends("JobSet", {"type": "Completed", **TRUE}), DONE, "ended well"),
        (job("JobSet", suspend=True), READY, "waits in its queue"),
        ({"kind": "Service", "spec": {"type": "ClusterIP"}}, READY, "there"),
        (balancer(), WAITING, "has no address yet"),
        (balancer(hostname="a.x", ip="b"), READY, "at a.x"),
        (balancer(ip="192.0.2.1"), READY, "at 192.0.2.1"),
    ],
)  # fmt: skip
def test_the_state_of_an_object(live: dict[str, Any] | None, health: Health, sentence: str) -> None:
    found = state_of(live)
    assert (found.health, found.sentence) == (health, sentence)


@pytest.mark.parametrize(
    ("error", "health", "words"),
    [
        (None, READY, "the master answers at a:1"),
        (UnicodeError(), FAILED, "no machine can have the name 'a'"),
        (socket.gaierror(-2, "x"), WAITING, "its name is not known"),
        (TimeoutError(), WAITING, "(no answer)"),
        (ConnectionRefusedError(111, "Connection refused"), WAITING, "(Connection refused)"),
    ],
)
def test_the_state_of_an_address(error: Exception | None, health: Health, words: str) -> None:
    def dial(host: str, port: int) -> None:
        assert (host, port) == ("a", 1)
        if error is not None:
            raise error

    found = state_of_endpoint("the master", "a:1", dial)
    assert found.health is health
    assert words in found.sentence
