"""A plain synchronous parameter server: it waits for a push of every cluster, merges, saves, and answers all.

One message of a cluster a round (ZeroMQ, torch.save), and one answer. A cluster that starts again says hello, without a
push: what it had pushed for the round is dropped, and it gets the newest parameters. A push that comes again, because
this server was killed, takes the place of the first one, or is told that it is merged already.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import zmq
from plain_server import Share, pack, unpack
from turns import Model

Header = dict[str, Any]


class Server:
    """merged: the pushes of the newest version, by cluster. counted: steps of all merged pushes, ever."""

    def __init__(self, n_params: int, clusters: int, directory: Path) -> None:
        self._clusters = clusters
        self._saved = directory / "newest.pt"
        self._share = Share([tensor.detach() for tensor in Model(n_params).tensors])
        self.version, self.counted, self.merged = 0, 0, dict[str, Header]()
        self._pushes: dict[str, tuple[bytes, Header, bytes]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._records = os.open(directory / "records.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if self._saved.exists():
            saved = torch.load(self._saved)
            self.version, self.counted, self.merged = saved["version"], saved["counted"], saved["merged"]
            self._share = Share(saved["theta"])
            self._share.outer.load_state_dict(saved["outer"])

    def take(self, peer: bytes, header: Header, payload: bytes) -> list[tuple[bytes, list[bytes]]]:
        """The answers to give now."""
        cluster = header["cluster"]
        if header["hello"] or header["version"] != self.version:
            self._pushes.pop(cluster, None)
            return [(peer, self._answer())]
        self._pushes[cluster] = (peer, header, payload)
        if len(self._pushes) < self._clusters:
            return []
        pushes, self._pushes = self._pushes, {}
        self._share.merge([unpack(payload) for _, _, payload in pushes.values()])
        self.version += 1
        self.merged = {name: header for name, (_, header, _) in pushes.items()}
        self.counted += sum(header["last"] - header["first"] + 1 for header in self.merged.values())
        self._save()
        answer = self._answer()
        return [(peer, answer) for peer, _, _ in pushes.values()]

    def _answer(self) -> list[bytes]:
        header = {"version": self.version, "merged": self.merged}
        return [json.dumps(header).encode(), pack([theta.detach() for theta in self._share.theta])]

    def _save(self) -> None:
        saved = {"version": self.version, "counted": self.counted, "merged": self.merged}
        state = {"theta": [theta.detach() for theta in self._share.theta], "outer": self._share.outer.state_dict()}
        torch.save({**saved, **state}, self._saved.with_suffix(".new"))
        self._saved.with_suffix(".new").rename(self._saved)
        record = {"kind": "merged", "monotonic_s": time.monotonic(), "pushes": self.merged, "counted": self.counted}
        os.write(self._records, json.dumps(record).encode() + b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--params", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    server = Server(options.params, options.clusters, options.directory)
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(options.address)
    while True:
        peer, header, payload = router.recv_multipart()
        for to, answer in server.take(peer, json.loads(header), payload):
            router.send_multipart([to, *answer])


if __name__ == "__main__":
    main()
