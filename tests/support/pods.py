"""The pods of a Job or a StatefulSet as processes of this machine: what kubelet and the controllers would do with them.

Each pod gets the command, the variables and the volumes that the object in the API server says, and nothing else. Names
of pods become addresses of the loopback, as DNS would answer them; paths of volumes become folders.
"""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.api_stand_in import StandIn
from support.dips_command import ROOT, children, environment
from support.ports import own_port

from dips.deploy.clusters import RENDEZVOUS_PORT

Object = dict[str, Any]
NAMESPACE = "dips"


@dataclass
class PlayedPod:
    index: int
    replaces: int
    process: subprocess.Popen[bytes]
    log: Path
    places: Mapping[str, str]
    environment: Mapping[str, str]

    def kill(self) -> None:
        for pid in _family(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)


class PodPlayer:
    """Context manager: starts the pods of a Job, or of a StatefulSet, and with tick() those that follow; ends them at
    the end."""

    def __init__(
        self, api: StandIn, name: str, folder: Path, images: Mapping[str, list[str]],
        kind: str = "Job", names: Mapping[str, str] | None = None, **records: str,
    ) -> None:  # fmt: skip
        """images: the command line that stands for an image's program, by the program's path in it. names: what
        addresses in settings files are here. records: variables that say where the pods' records go."""
        self._api, self._folder, self._images = api, folder, images
        self._records = records
        self._kind, self._name, self._names = kind, name, names or {}
        self._port = own_port()
        self.pods: list[PlayedPod] = []
        self.failed = ""
        """Why the Job failed; empty while it has not."""

    @property
    def _spec(self) -> Object:
        found: Object = self._api.one(self._kind, self._name)["spec"]
        return found

    @property
    def _count(self) -> int:
        return int(self._spec["parallelism" if self._kind == "Job" else "replicas"])

    def __enter__(self) -> PodPlayer:
        for index in range(self._count):
            self._start(index, 0)
        return self

    def __exit__(self, *error: Any) -> None:
        for pod in self.pods:
            if pod.process.poll() is None:
                pod.kill()

    @property
    def live(self) -> list[PlayedPod]:
        return list({pod.index: pod for pod in self.pods}.values())

    @property
    def complete(self) -> bool:
        return all(pod.process.poll() == 0 for pod in self.live)

    def tick(self) -> None:
        """Replace pods that have failed, unless the Job's policy says that the Job fails with them."""
        for pod in self.live:
            code = pod.process.poll()
            if not code or self.failed:
                continue
            code = code if code > 0 else 128 - code
            for rule in self._spec.get("podFailurePolicy", {"rules": []})["rules"]:
                ends = rule.get("onExitCodes")
                if ends and (code in ends["values"]) == (ends["operator"] == "In") and rule["action"] == "FailJob":
                    self.failed = f"pod {pod.index} ended with {code}"
                    return
            self._start(pod.index, pod.replaces + 1)

    def logs(self) -> str:
        return "\n".join(f"---- {pod.log.name}\n{pod.log.read_text(errors='replace')[-4000:]}" for pod in self.pods)

    def run(self, words: list[str]) -> subprocess.CompletedProcess[bytes]:
        """A command in the last pod of the only index."""
        pod = self.pods[-1]
        words = [self._seen(word, pod.index, pod.places) for word in words]
        return subprocess.run(words, capture_output=True, cwd=ROOT, env=pod.environment, check=False)

    def _start(self, index: int, replaces: int) -> None:
        pod = self._spec["template"]["spec"]
        (container,) = pod["containers"]
        places = self._places(pod, container, self._folder / f"{self._name}-{index}-{replaces}")
        variables = {one["name"]: self._seen(one["value"], index, places) for one in container["env"] if "value" in one}
        variables["JOB_COMPLETION_INDEX"] = str(index)
        words = [self._seen(word, index, places) for word in container.get("command") or container["args"]]
        words = [word for one in words for word in self._images.get(one, [one])]
        log = self._folder / f"{self._name}-{index}-{replaces}.log"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        around = environment({**variables, **self._records, "PATH": path})
        with log.open("wb") as out:
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=around)
        self.pods.append(PlayedPod(index, replaces, process, log, places, around))

    def _places(self, pod: Object, container: Object, folder: Path) -> dict[str, str]:
        """The folder that stands for each mount."""
        volumes = {one["name"]: one for one in pod["volumes"]}
        places = {}
        for mount in container["volumeMounts"]:
            # What a StatefulSet claims by itself is there again in the next pod.
            place = folder / mount["name"] if mount["name"] in volumes else self._folder / f"{self._name}-state"
            place.mkdir(parents=True, exist_ok=True)
            places[mount["mountPath"]] = str(place)
        # A short path, as torch has sockets in it.
        places["/tmp"] = tempfile.mkdtemp(dir=self._folder)
        for mount in (one for one in container["volumeMounts"] if one["name"] in volumes):
            for name, data in self._files(volumes[mount["name"]], places).items():
                (folder / mount["name"] / name).write_bytes(data)
                (folder / mount["name"] / name).chmod(0o400)
        return places

    def _files(self, volume: Object, places: Mapping[str, str]) -> dict[str, bytes]:
        if "secret" in volume:
            data = self._api.one("Secret", volume["secret"]["secretName"])["data"]
            return {name: base64.b64decode(value) for name, value in data.items()}
        if "configMap" in volume:
            data = self._api.one("ConfigMap", volume["configMap"]["name"])["data"]
            here = {**self._names, **{f'"{path}': f'"{place}' for path, place in places.items()}}
            known = re.compile("|".join(map(re.escape, here)))
            return {name: known.sub(lambda found: here[found[0]], text).encode() for name, text in data.items()}
        return {}

    def _seen(self, text: str, index: int, places: Mapping[str, str]) -> str:
        """As the container sees it: variables are put in, names are looked up, and paths are where they are here."""
        text = text.replace("$(JOB_COMPLETION_INDEX)", str(index))
        for other in range(self._count):
            text = text.replace(f"{self._name}-{other}.{self._name}", f"127.0.0.{other + 1}")
        text = text.replace(f":{RENDEZVOUS_PORT}", f":{self._port}")  # others may run this test here, too
        for path in sorted(places, key=len, reverse=True):
            if text == path or text.startswith(f"{path}/"):
                return places[path] + text[len(path) :]
        return text


def _family(pid: int) -> list[int]:
    return [pid, *(below for child in children(pid) for below in _family(child))]
