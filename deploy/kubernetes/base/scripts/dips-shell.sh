#!/usr/bin/env bash
# Cluster shell of run dips. It needs dips-training[worker] on its nodes, and its own identity,
# the folder keys/shell of `dips keys`, next to this script (or DIPS_KEYS), readable by no one else.
set -u
export DIPS_MASTER=master.dips.example.org:29400
export DIPS_CLUSTER=shell
export DIPS_RUN=dips
export DIPS_KEYS="${DIPS_KEYS:-$PWD/keys/shell}"
cat > dips-shell.toml <<'SETTINGS'
[worker]
cluster_id = "shell"
master = "master.dips.example.org:29400"
run_id = "dips"
SETTINGS
while true; do
  dips train --config dips-shell.toml && exit 0
  code=$?
  case "$code" in 2 | 8) exit "$code" ;; esac  # a setting is wrong, or its name is taken: a person must act
  echo "cluster ended with $code; again in 10 s" >&2
  sleep 10
done
