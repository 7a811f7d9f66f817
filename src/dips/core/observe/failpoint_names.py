"""Every failpoint by name: where it is, and what a process that dies there leaves behind.

One section for each role, so that the list of a role is read next to its code. A name is
`<role>.<thing>.<before|after>_<step>`; a word in braces stands for each value in PLACEHOLDERS. Failpoints of state
machines are not listed: each arrow of a table in TABLES has the name `<table>.<FROM>.<input>`, blanks as
underscores. Imports nothing, and must never hold a name that no code uses (tests/repository checks both ways).
"""

# ---- core ----------------------------------------------------------------------------------------------------------

CORE: dict[str, str] = {}

# ---- master --------------------------------------------------------------------------------------------------------

MASTER: dict[str, str] = {
    "master.journal.before_commit": "entries are in an open transaction: they are lost, and no peer knows of them",
    "master.journal.after_commit": "entries are durable, but the state machine does not know it yet",
    "master.journal.before_create": "the tables of a new journal are in an open transaction",
    "master.journal.after_create": "the new journal is committed, its name in the directory not yet flushed",
    "master.archive.before_write": "a segment of old records is about to be written: its file is open and empty",
    "master.archive.before_fsync": "the segment is written under a temporary name and not flushed",
    "master.archive.before_rename": "the segment is flushed and has its temporary name still",
    "master.archive.after_rename": "the segment has its name, not flushed; its records are still in the journal",
    "master.archive.before_delete": "the segment is durable, and its records are about to leave the journal",
    "master.archive.before_prune": "the journal says how far the archive is pruned; the oldest segment is still there",
    "master.address.before_rename": "the new address has its temporary name; readers see the old one or none",
    "master.address.after_rename": "readers see the new address; its name is not flushed",
    "master.directory.before_fsync": "a name in the master's directory was changed and is not flushed",
    "master.rpc.before_{method}": "a call has arrived and nothing was decided",
    "master.rpc.after_{method}": "a call is decided, its answer not sent: drop loses it, as a broken link does",
    "master.slave_stream.before_hear": "a slave's message has arrived; drop loses it, dup handles it twice",
    "master.slave_stream.before_send": "a command is about to go to a slave; drop loses it, dup sends it twice",
}

# ---- slave ---------------------------------------------------------------------------------------------------------

SLAVE: dict[str, str] = {
    "slave.ring.before_allocate": "a snapshot file is there, its room not claimed",
    "slave.ring.after_allocate": "a snapshot file has its size, not durably",
    "slave.ring.before_write": "the manifest of the version that leaves is gone, its file still whole",
    "slave.ring.after_piece": "a snapshot file holds a mixture of two versions; reached for every piece of 4 MiB",
    "slave.{kind}.before_fsync": "the bytes are written and not flushed",
    "slave.{kind}.after_fsync": "the bytes are durable: a whole shadow, or a small file under a temporary name",
    "slave.{file}.before_create": "a small file is about to be written under a temporary name",
    "slave.{file}.before_rename": "a small file is flushed and has its temporary name still",
    "slave.{file}.after_rename": "a small file has its name, the directory is not flushed",
    "slave.manifest.before_remove": "a version is about to leave the ring: it is committed still",
    "slave.manifest.after_remove": "the manifest of the version that leaves is gone, the directory not flushed",
    "slave.directory.before_fsync": "names in the slave's directory changed and are not flushed",
    "slave.directory.after_fsync": "names in the slave's directory are durable, no peer knows it",
    "slave.pushes.before_write": "a staged push is about to be kept as evidence (record_pushes)",
    "slave.pushes.before_fsync": "a push is written as evidence and not flushed; no record names it",
    "slave.pushes.after_fsync": "a push is kept as evidence, and no record names it",
    "slave.link.before_attach": "the slave is about to send its hello on a new stream",
    "slave.link.before_send": "an answer or a beat is about to go to the master; drop loses it, dup sends it twice",
    "slave.link.after_send": "an answer or a beat went to the master",
    "slave.link.before_receive": "all commands that came are obeyed; the slave waits for the next",
    "slave.link.after_receive": "a command has arrived; drop loses it, dup obeys it twice",
    "slave.data.before_answer": "an answer of the data port is about to go out; drop, dup and corrupt do what they say",
}

# ---- worker --------------------------------------------------------------------------------------------------------

WORKER: dict[str, str] = {
    "worker.rpc.before_{method}": "a call is about to leave; error is a call that never left",
    "worker.rpc.after_{method}": "the answer is there and no code has seen it; drop loses it, as a broken link does",
    "worker.push.before_copy": "a push begins, the parameters are about to be copied for it",
    "worker.push.before_chunk": "a chunk of a push is about to be sent; drop loses it, dup sends it twice",
    "worker.push.after_last_chunk": "all slaves hold the whole push, and the master does not know it",
    "worker.pull.before_chunk": "a chunk of a version has arrived and not landed",
    "worker.pull.after_last_chunk": "a version lies in the pull buffer, the live parameters are the old ones",
    "worker.install.before_swap": "the live parameters are about to be replaced",
    "worker.install.after_swap": "the live parameters are the new ones, the pin at the master is held still",
    "worker.status.before_call": "the evaluator or a trainer is about to ask the master for the run's status",
    "worker.status.after_call": "the status is there and no code has seen it; drop loses it",
    "worker.export.before_rename": "an exported model is flushed and has its temporary name still",
    "worker.push_record.before_write": "the record of a new push is about to be written; its number was not used",
    "worker.push_record.after_write": "the record of a new push is durable, and the master does not know of it",
    "worker.checkpoint.before_write": "a file of a checkpoint (or a push's record) is open and empty",
    "worker.checkpoint.before_fsync": "such a file is written under a temporary name, not flushed",
    "worker.checkpoint.after_fsync": "such a file is flushed and has its temporary name still",
    "worker.checkpoint.before_rename": "such a file is closed and has its temporary name still",
    "worker.checkpoint.after_rename": "such a file has its name, the directory is not flushed",
    "worker.directory.before_fsync": "a name in a folder of checkpoints or of exports was changed and is not flushed",
    "worker.checkpoint.before_manifest": "a checkpoint's tensors are durable, its manifest is not written",
    "worker.checkpoint.before_prune": "a checkpoint is durable, the ones beyond those that are kept are still there",
}

# ---- what call sites can do besides dying, waiting and failing -----------------------------------------------------

OBEYS: dict[str, tuple[str, ...]] = {
    "master.rpc.after_{method}": ("drop",),
    "worker.rpc.after_{method}": ("drop",),
    "worker.status.after_call": ("drop",),
    "worker.push.before_chunk": ("drop", "dup", "corrupt"),
    "worker.pull.before_chunk": ("drop", "corrupt"),
    "master.slave_stream.before_hear": ("drop", "dup"),
    "master.slave_stream.before_send": ("drop", "dup"),
    "slave.link.before_send": ("drop", "dup"),
    "slave.link.after_receive": ("drop", "dup"),
    "slave.data.before_answer": ("drop", "dup", "corrupt"),
}
"""Which of drop, dup and corrupt a call site carries out itself; all others are refused there."""

# ---- the values of words in braces ---------------------------------------------------------------------------------

_OF_CLUSTERS = (
    *("Join", "Heartbeat", "BeginPush", "FinishPush", "AwaitVerdict", "BeginPull", "FinishPull"),
    *("LeaseData", "ReturnData", "Leave"),
)
_OF_OPERATORS = ("Status", "Watch", "Pause", "Resume", "Evict", "Drain", "Reshard", "Stop", "Extend")

PLACEHOLDERS: dict[str, tuple[str, ...]] = {
    "master.method": (*_OF_CLUSTERS, *_OF_OPERATORS),
    "slave.kind": ("ring", "manifest", "promise", "identity", "round"),
    "slave.file": ("manifest", "promise", "identity", "round"),
    "worker.method": _OF_CLUSTERS,
}
"""`<role>.<word>`: what {word} stands for in that role's names. The stream of a slave has names of its own."""

# ---- tables whose arrows are failpoints ----------------------------------------------------------------------------

TABLES: dict[str, str] = {
    "push": "master",
    "recovery": "master",
    "reshard": "master",
    "round": "master",
    "slave": "master",
    "slave_link": "slave",
    "slave_shard": "slave",
    "slave_save": "slave",
    "session": "worker",
}
"""The name of each transition table, blanks as underscores, and the role whose process walks it."""


def all_names() -> dict[str, str]:
    """Every name, words in braces filled in, with its sentence; arrows of tables are not among them."""
    patterns = {**CORE, **MASTER, **SLAVE, **WORKER}
    return {name: text for pattern, text in patterns.items() for name in expand(pattern)}


def obeyed() -> dict[str, tuple[str, ...]]:
    """Which of drop, dup and corrupt the call site carries out, for each name where it does."""
    return {name: kinds for pattern, kinds in OBEYS.items() for name in expand(pattern)}


def expand(pattern: str) -> list[str]:
    """The names that a pattern stands for: itself when it has no word in braces."""
    head, brace, rest = pattern.partition("{")
    if not brace:
        return [pattern]
    word, _, tail = rest.partition("}")
    values = PLACEHOLDERS[f"{head.partition('.')[0]}.{word}"]
    return [name for value in values for name in expand(head + value + tail)]
