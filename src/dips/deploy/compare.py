"""Compares the objects that are wanted with those that are there, in the fields that are ours.

Pure. Three parties set fields: this program, the API server (defaults, status), and others (people, controllers). A
field is ours if it is wanted now, or if we set it last time, as an annotation of the object remembers; all else is
left alone. What the API cannot change is found here, so that it is reported before anything is done.
"""

from __future__ import annotations

import base64
import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256
from typing import Any

from dips.core.errors import ConfigError
from dips.deploy.objects import CONTEXTS, Object, as_yaml

FIELDS = "dips/fields"
"""Annotation: which fields we set, without their values."""

STOPPED_WITH = "dips/stopped-with"
"""Annotation of a StatefulSet that was stopped for a move: how many pods it had."""

_NOTHING: Any = object()


class ObjectAction(Enum):
    """The action for an object; the values are the marks of a plan."""

    CREATE = "+"
    CHANGE = "~"
    REPLACE = "+-"
    DELETE = "-"
    SAME = "="


@dataclass(frozen=True)
class Step:
    """One object and the action for it."""

    context: str
    action: ObjectAction
    wanted: Object
    live: Object | None = None
    patch: Object | None = None  # of a change, as a JSON merge patch
    note: str = ""  # for a person

    @property
    def name(self) -> str:
        return f"{self.wanted['kind']} {self.wanted['metadata']['name']}"


def step_for(context: str, wanted: Object, live: Object | None, least: str = "") -> Step:
    """The step that makes `live` as wanted. Raises ConfigError for a difference that only a person can settle.

    least: the size that is enough for the volumes of a StatefulSet that is there; without: the wanted one.
    """
    if live is None:
        return Step(context, ObjectAction.CREATE, marked(wanted))
    if wanted["kind"] == "Namespace":  # whoever made it decides about it
        return Step(context, ObjectAction.SAME, marked(wanted), live)
    ours = _left_alone(wanted, live, least)
    have, new = (one.get("spec", {}).get("volumeClaimTemplates") for one in (ours, wanted))
    note = ""
    if have != new:  # further ones of this set are made as it says, too
        note = f"its volumes stay at {_storage(have[0])}, those of a new run would have {_storage(new[0])}"
    patch = merge_patch(marked(ours), live)
    if not patch:
        return Step(context, ObjectAction.SAME, marked(ours), live, note=note)
    # A Job's pods cannot be changed, nor can what a role binding binds to.
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    if "roleRef" in patch if kind == "RoleBinding" else kind in ("Job", "JobSet") and patch.get("spec"):
        return Step(context, ObjectAction.REPLACE, marked(wanted), live)
    if fixed := [key for key in _FIXED.get(kind, ()) if key in patch.get("spec", {})]:
        raise ConfigError(
            f"{kind} {name}: {fixed[0]} cannot be changed once it is there: set it back in the file, or delete the "
            "run's objects with `dips deploy delete` (volumes stay) and apply again"
        )
    return Step(context, ObjectAction.CHANGE, marked(ours), live, patch, note)


def marked(wanted: Object) -> Object:
    """The object with the annotation that remembers our fields."""
    found = copy.deepcopy(wanted)
    found["metadata"].setdefault("annotations", {})
    found["metadata"]["annotations"][FIELDS] = json.dumps(shape(wanted), separators=(",", ":"), sort_keys=True)
    return found


def shape(value: Any) -> Any:
    """The fields of an object without their values: tables by key, everything else 0."""
    return {key: shape(item) for key, item in value.items()} if isinstance(value, Mapping) else 0


def merge_patch(wanted: Object, live: Object) -> Object:
    """What has to change in `live`; fields that we set last time and no longer want become null."""
    try:
        last = json.loads(live.get("metadata", {}).get("annotations", {}).get(FIELDS, "{}"))
    except ValueError:  # it was edited by hand: only what is wanted now is known to be ours
        last = {}
    patch = _difference(wanted, live, last)
    return patch if isinstance(patch, dict) else {}


def _difference(wanted: Any, live: Any, last: Any) -> Any:
    if isinstance(wanted, Mapping):
        there = live if isinstance(live, Mapping) else {}
        before = last if isinstance(last, Mapping) else {}
        found = {}
        for key, value in wanted.items():
            changed = _difference(value, there.get(key, _NOTHING), before.get(key))
            if changed is not _NOTHING:
                found[key] = changed
        found |= {key: None for key in before if key not in wanted and key in there}
        return found or _NOTHING
    return _NOTHING if _holds(live, wanted) else wanted


def _holds(live: Any, wanted: Any) -> bool:
    """Whether what is there says what is wanted; what the server added to it does not count."""
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(_holds(live.get(key, _NOTHING), wanted[key]) for key in wanted)
    if isinstance(wanted, list):
        same_length = isinstance(live, list) and len(live) == len(wanted)
        return same_length and all(_holds(a, b) for a, b in zip(live, wanted, strict=True))
    if live is _NOTHING:  # the API leaves out what is empty, false, or zero
        return wanted in ("", False, 0, None)
    return bool(live == wanted)


# ---- fields that we must not change, and fields that no one can change ----


def _left_alone(wanted: Object, live: Object, least: str) -> Object:
    """With fields that are set only once as they are there: later others decide them, or `dips deploy scale` does."""
    found = copy.deepcopy(wanted)
    kind, spec = wanted["kind"], found.get("spec", {})
    if kind in ("Job", "JobSet"):
        spec["suspend"] = live["spec"].get("suspend", False)
    if kind == "StatefulSet":
        spec["replicas"] = replicas_of(live)
        # Volumes that are large enough stay as they are; smaller ones are an error.
        for ours, theirs in zip(
            found["spec"].get("volumeClaimTemplates", []), live["spec"].get("volumeClaimTemplates", []), strict=False
        ):
            name = found["metadata"]["name"]
            and_then = (
                f", then `kubectl delete statefulset {name} --cascade=orphan` and apply, with the number of slaves as "
                "it is"
            )
            _keep_size(ours, theirs, f"StatefulSet {name}", least, and_then)
    if kind == "PersistentVolumeClaim":
        _keep_size(found, live, found["metadata"]["name"])
    return found


def remembered(one: Object) -> set[str]:
    """The contexts that a Secret names; none where the annotation was edited by hand and is no list of names."""
    try:
        found = json.loads(one["metadata"].get("annotations", {}).get(CONTEXTS, "[]"))
    except (ValueError, RecursionError):
        return set()
    return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()


def replicas_of(live: Object) -> int:
    """The pods of a StatefulSet; of one that was stopped for a move, as many as it had: so many start again."""
    stopped_with = live.get("metadata", {}).get("annotations", {}).get(STOPPED_WITH, "")
    found: int = live["spec"].get("replicas", 1)
    return found or (int(stopped_with) if stopped_with.isdecimal() else 0)


def _storage(claim: Object) -> str:
    found: str = claim["spec"]["resources"]["requests"]["storage"]
    return found


def _keep_size(ours: Object, theirs: Object, name: str, least: str = "", and_then: str = "") -> None:
    from kubernetes.utils.quantity import parse_quantity  # a second to load, and there is an object only with a client

    have, need = _storage(theirs), least or _storage(ours)
    if parse_quantity(have) < parse_quantity(need):
        raise ConfigError(
            f"the volume of {name} has {have} and needs {need}: a volume is not enlarged here; enlarge it as your "
            f"storage class allows{and_then}"
        )
    ours["spec"]["resources"]["requests"]["storage"] = have


_FIXED = {
    "StatefulSet": ("serviceName", "selector", "volumeClaimTemplates", "podManagementPolicy"),
    "Deployment": ("selector",),
    "PersistentVolumeClaim": ("accessModes", "storageClassName"),
    "Service": ("clusterIP",),
}


# ---- for people ----


def shown(document: Object) -> Object:
    """The object as it may be printed: of secrets only lengths and fingerprints."""
    found = copy.deepcopy(document)
    found.get("metadata", {}).get("annotations", {}).pop(FIELDS, None)
    if found.get("metadata", {}).get("annotations") == {}:
        del found["metadata"]["annotations"]
    if found["kind"] == "Secret":
        found["data"] = {key: _fingerprint(value) for key, value in found.get("data", {}).items()}
    return found


def _fingerprint(value: str) -> str:
    if not value:
        return "(not there yet)"
    raw = base64.b64decode(value)
    return f"({len(raw)} bytes, sha256 {sha256(raw).hexdigest()[:12]})"


def diff_lines(step: Step) -> Iterator[str]:
    """A plan's lines about one object: all of a new one, of a changed one each field that changes."""
    yield f"{step.action.value} {step.name}{step.note and f': {step.note}'}"
    if step.action in (ObjectAction.CREATE, ObjectAction.REPLACE):
        for line in as_yaml(shown(step.wanted)).splitlines():
            yield f"  + {line}"
    if step.action is ObjectAction.CHANGE and step.patch is not None and step.live is not None:
        yield from _changes(step.patch, step.live, step.wanted["kind"] == "Secret")


def _changes(patch: Object, live: Object, secret: bool, path: str = "") -> Iterator[str]:
    for key, new in patch.items():
        where, old = f"{path}.{key}" if path else key, live.get(key) if isinstance(live, Mapping) else None
        if where == f"metadata.annotations.{FIELDS}":
            continue
        if isinstance(new, dict) and isinstance(old, Mapping):
            yield from _changes(new, dict(old), secret, where)
            continue
        if isinstance(old, str) and isinstance(new, str) and "\n" in old + new:
            yield f"    {where}"
            yield from (f"  {line}" for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[0] in "+-")
            continue
        hidden = secret and path == "data"
        if old is not None:
            yield f"  - {where}: {_fingerprint(old) if hidden else _short(old)}"
        if new is not None:
            yield f"  + {where}: {_fingerprint(new) if hidden else _short(new)}"


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
