"""What a sub-command is, and those of the runtime. The planner and the laboratory have tables of their own.

It imports none of their modules: `dips --help` is quick, and a slave's host needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A sub-command: `function` of `module`, one line about it, and examples for its --help."""

    name: str
    module: str
    summary: str
    panel: str
    examples: tuple[str, ...] = ()
    function: str = ""  # empty: it has the command's name


RUN, ROLES, ASK, MODEL = "Run here", "One process of a run", "Watch and operate a run", "Models"
"""Panels of `dips --help`."""

COMMANDS: tuple[Command, ...] = (
    Command(
        "demo",
        "dips.cli.demo",
        "Train a small model on this machine, with faults during the run.",
        RUN,
        ("dips demo", "dips demo --data ~/notes --clusters 3 --minutes 2 --no-faults"),
    ),
    Command(
        "up",
        "dips.cli.up",
        "Run master, slaves and clusters from a file; restart what dies.",
        RUN,
        ("dips up examples/local.toml",),
    ),
    Command(
        "doctor",
        "dips.cli.doctor",
        "Check before a run: ports, keys, memory, disks, clocks, packages.",
        RUN,
        (
            "dips doctor examples/local.toml",
            "dips doctor my-run.toml --params 7B --link 1gbps --json",
            "dips doctor --master 10.0.0.1:29400 --keys keys-b",
        ),
    ),
    Command(
        "keys",
        "dips.cli.keys",
        "Make, show, renew and revoke the keys of a run's processes.",
        ROLES,
        (
            "dips keys init ~/keys --cluster a --cluster b --slave s0 --operator me",
            "dips keys revoke ~/keys b --reason 'stolen laptop'",
        ),
        function="app",
    ),
    Command(
        "master",
        "dips.cli.roles",
        "The master of a run.",
        ROLES,
        ("dips master --run-id mine --directory runs/mine/master --slaves 1 --listen 127.0.0.1:29400",),
    ),
    Command(
        "slave",
        "dips.cli.roles",
        "A slave: holds blocks of the model and merges pushes.",
        ROLES,
        ("dips slave --run-id mine --slave-id s0 --directory runs/mine/slaves/s0 --master 127.0.0.1:29400",),
    ),
    Command(
        "train",
        "dips.cli.roles",
        "A cluster that trains a byte-level language model.",
        ROLES,
        (
            "dips train --cluster-id a --master 127.0.0.1:29400 --data ~/notes",
            "dips train --steps 200  (no master: ordinary training)",
        ),
    ),
    Command(
        "deploy",
        "dips.cli.deploy",
        "A run on Kubernetes clusters in several places, from one file.",
        ROLES,
        (
            "dips deploy plan examples/three-sites.toml",
            "dips deploy apply run.toml",
            "dips deploy drain run.toml a --reason 'other work'",
        ),
        function="app",
    ),
    Command(
        "status",
        "dips.cli.operator",
        "What a run does now.",
        ASK,
        ("dips status runs/demo --watch", "dips status 127.0.0.1:29400 --keys keys/me --json"),
    ),
    Command(
        "page",
        "dips.cli.operator",
        "The address of a run's status page.",
        ASK,
        ("dips page runs/demo", "dips page runs/demo --open"),
    ),
    Command(
        "pause",
        "dips.cli.operator",
        "Begin no new round until resumed; clusters train on.",
        ASK,
        ("dips pause runs/mine --reason 'moving a slave'",),
    ),
    Command("resume", "dips.cli.operator", "End a pause.", ASK, ("dips resume runs/mine",)),
    Command(
        "stop",
        "dips.cli.operator",
        "End a run: finish the open round, all pull it and leave.",
        ASK,
        ("dips stop runs/mine",),
    ),
    Command(
        "extend",
        "dips.cli.operator",
        "Take back a run's end, or move its token limit.",
        ASK,
        ("dips extend runs/mine --tokens 2G", "dips extend runs/mine  (after a `dips stop`)"),
    ),
    Command(
        "evict",
        "dips.cli.operator",
        "End a cluster's incarnation; it may join again.",
        ASK,
        ("dips evict runs/mine b --reason 'it hangs'",),
    ),
    Command(
        "drain", "dips.cli.operator", "Let a cluster push its last steps and leave.", ASK, ("dips drain runs/mine b",)
    ),
    Command(
        "reshard",
        "dips.cli.operator",
        "Let other slaves hold the model, while the run goes on.",
        ASK,
        (
            "dips reshard runs/mine --add s2",
            "dips reshard runs/mine --add s3 --remove s0 --reason 'a new host'",
            "dips reshard runs/mine --cancel",
        ),
    ),
    Command(
        "verify",
        "dips.cli.verify",
        "Check what a run recorded against every promise about its state.",
        ASK,
        ("dips verify runs/demo", "dips verify runs/mine --replay --json"),
    ),
    Command(
        "pack",
        "dips.cli.verify",
        "Copy what proves a run's versions into one folder, without keys.",
        ASK,
        ("dips pack runs/mine --to proof", "dips pack runs/mine --to proof --until r1.7"),
    ),
    Command(
        "story",
        "dips.cli.verify",
        "What all processes recorded of one round, version, push, cluster or slave; the slowest rounds and why.",
        ASK,
        ("dips story runs/demo 1:6", "dips story runs/demo a/1.1#3", "dips story runs/demo"),
    ),
    Command(
        "logs",
        "dips.cli.logs",
        "The logs of all processes of a local run, in the order of time.",
        ASK,
        (
            "dips logs runs/demo --follow",
            "dips logs runs/demo --role s0 --level warning --since '10 min'",
            "dips logs runs/demo --cause a/1.1#3 --json",
        ),
    ),
    Command(
        "track",
        "dips.cli.logs",
        "Write a run's curves to TensorBoard, wandb, MLflow or Trackio.",
        ASK,
        ("dips track runs/demo --to tensorboard", "dips track runs/mine --to mlflow --project llm"),
    ),
    Command(
        "warm-up",
        "dips.cli.warm_up",
        "Compile what slaves and workers run as machine code, once for a machine.",
        ROLES,
        ("dips warm-up", "dips warm-up --json"),
        function="warm_up",
    ),
    Command(
        "export",
        "dips.cli.model",
        "Write a published version: one safetensors file, a Hugging Face folder, or a checkpoint for any parallelism.",
        MODEL,
        (
            "dips export 127.0.0.1:29400 --to model.safetensors",
            "dips export runs/demo --to model.safetensors  (also after the run has ended)",
            "dips export runs/demo --to model  (a folder for from_pretrained)",
            "dips export runs/demo --to checkpoint --format dcp  (for torch.distributed.checkpoint.load)",
            "dips export 127.0.0.1:29400 --to model --version 1:7 --keys runs/own-loop/keys/operator",
        ),
    ),
    Command(
        "follow",
        "dips.cli.model",
        "Keep a folder at the newest version of a run, pulling differences: for evaluation, inference or samplers.",
        MODEL,
        (
            "dips follow runs/demo --to served",
            "dips follow 10.0.0.1:29400 --to served --keep 3 --keys keys/operator",
            "dips follow 10.0.0.1:29400 --to served --once --format safetensors",
        ),
    ),
    Command(
        "eval",
        "dips.cli.model",
        "The held-out loss of a model, in nats per byte.",
        MODEL,
        ("dips eval model.safetensors", "dips eval runs/demo --json"),
        function="evaluate",
    ),
    Command(
        "backup",
        "dips.cli.backup",
        "Copy each n-th version of slaves' snapshots to an object store.",
        ROLES,
        (
            "dips backup /var/lib/dips/s0 --to s3://bucket/runs --every 20",
            "dips backup runs/mine --to file:///backup/runs --once",
        ),
    ),
    Command(
        "restore",
        "dips.cli.backup",
        "Make slaves' directories again from an object store.",
        ROLES,
        (
            "dips restore runs/mine --from s3://bucket/runs",
            "dips restore /var/lib/dips/s0 --from s3://bucket/runs --slave s0 --run big --version 1:840",
        ),
    ),
    Command(
        "size",
        "dips.cli.size",
        "Memory, disk and time that a run needs, each with its formula.",
        MODEL,
        (
            "dips size --params 100e9 --clusters 9 --slaves 16 --link 10gbps",
            "dips size --params 1B --clusters 4 --slaves 2 --link 1gbps --wire bf16 --tokens-per-s 40000 --json",
        ),
    ),
)
