#!/usr/bin/env bash
# Builds the images of the roles, with their labels, and prints name, tag and id of each: `make images`.
#
#   deploy/images.sh [ROLE...]      master, slave and worker if none is given; others of the Dockerfile: keys
#   deploy/images.sh --pin          builds nothing: writes the digests that registries give into .env; with IMAGES also
#                                   those of the images there, for manifests and `dips deploy`
#
# From the environment:
#   IMAGES=registry.example.org/dips   registry and path of the images (dips)
#   TAG=0.1.0                          their tag (the version)
#   TORCH_INDEX=URL                    package index for PyTorch in the worker's image, such as that of its CPU builds
#   BASE=python:3.11-slim@sha256:...   the base image (what .env says)
#   SOURCE_URL=https://...             the repository's public address, for the labels (that of `origin`, if it has one)
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "images: $*" >&2; exit 2; }

# The repository's address as people open it; what a clone's address has of a password or token never gets into a label.
public_address() {
  local url="${SOURCE_URL:-$(git remote get-url origin 2>/dev/null || true)}"
  case "$url" in
    https://* | http://*) sed -E 's#^(https?://)[^/@]*@#\1#; s#\.git/?$##' <<<"$url" ;;
    git@*:*) sed -E 's#^git@([^:]+):#https://\1/#; s#\.git/?$##' <<<"$url" ;;
  esac
}

version="$(sed -nE 's/^VERSION = "(.*)"$/\1/p' src/dips/core/release.py)"
[ -n "$version" ] || fail "src/dips/core/release.py has no line VERSION = \"...\""
images="${IMAGES:-dips}" tag="${TAG:-$version}" source="$(public_address)"
# No commit is known in an unpacked source archive. What is not committed is in the image all the same.
revision="$(git rev-parse --verify HEAD 2>/dev/null || true)"
[ -z "$revision" ] || [ -z "$(git status --porcelain 2>/dev/null)" ] || revision="$revision-dirty"

if [ "${1:-}" = --pin ]; then
  [ $# = 1 ] || fail "--pin takes no roles"
  IMAGES="${IMAGES:-}" TAG="$tag" exec python3 deploy/compose/pin.py
fi
[ -n "${BASE:-}" ] || [ ! -f .env ] || BASE="$(sed -n 's/^BASE=//p' .env | tail -n 1 | tr -d \'\")"

command -v docker >/dev/null || fail "docker is not installed: install Docker Engine (docs.docker.com/engine/install)"
why="$(docker version --format '{{.Server.Version}}' 2>&1 >/dev/null)" ||
  fail "the Docker engine does not answer (${why##*$'\n'}): start it, or add this user to the group docker"
[ -n "$source" ] || echo "images: the repository has no public address, so its label is left out: set SOURCE_URL" >&2
[ -n "$revision" ] || echo "images: this is no git checkout, so the label of the revision is left out" >&2

[ $# -gt 0 ] || set -- master slave worker
for role in "$@"; do
  grep -q "^FROM .* AS $role\$" Dockerfile ||
    fail "the Dockerfile has no stage $role: give master, slave, worker or keys"
done

for role in "$@"; do
  options=(--target "$role" --tag "$images/dips-$role:$tag")
  options+=(--label "org.opencontainers.image.title=dips-$role" --label "org.opencontainers.image.version=$version")
  options+=(--label "org.opencontainers.image.licenses=Apache-2.0")
  [ -z "$source" ] || options+=(--label "org.opencontainers.image.source=$source")
  [ -z "$revision" ] || options+=(--label "org.opencontainers.image.revision=$revision")
  [ -z "${BASE:-}" ] || options+=(--build-arg "BASE=$BASE")
  [ -z "${TORCH_INDEX:-}" ] || options+=(--build-arg "TORCH_INDEX=$TORCH_INDEX")
  docker build "${options[@]}" . || fail "the image of $role could not be built: the lines above say why"
done

for role in "$@"; do
  printf '%s %s %s\n' "$images/dips-$role" "$tag" "$(docker image inspect --format '{{.Id}}' "$images/dips-$role:$tag")"
done
