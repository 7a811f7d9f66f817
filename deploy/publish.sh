#!/usr/bin/env bash
# Publishes a release: the images that `make images` has built, then the wheel and the source archive of `make dist`.
#
#   deploy/publish.sh [--dry-run] [--only images|packages]
#
#   --dry-run   change nothing: print what would be done, and what is still missing for it
#
# From the environment:
#   IMAGES=registry.example.org/dips   registry and path of the images; `docker login` before
#   TAG=0.1.0                          their tag (the version)
#   TWINE_PASSWORD=pypi-...            a token of the package index
#   TWINE_REPOSITORY_URL=URL           another index than PyPI, such as https://test.pypi.org/legacy/
#
# All is checked before anything is published. Packages come last: an index takes a version once and never again.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "publish: $*" >&2; exit 2; }

dry="" only=""
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry=1 ;;
    --only)
      only="${2:-}"
      case "$only" in images | packages) ;; *) fail "--only takes images or packages, not '$only'" ;; esac
      shift ;;
    -h | --help) sed -nE '2,/^set /s/^# ?//p' "$0"; exit 0 ;;
    *) fail "$1 is no option: give --dry-run, or --only images|packages" ;;
  esac
  shift
done

version="$(sed -nE 's/^VERSION = "(.*)"$/\1/p' src/dips/core/release.py)"
[ -n "$version" ] || fail "src/dips/core/release.py has no line VERSION = \"...\""
tag="${TAG:-$version}" roles=(master slave worker)
wheel="dist/dips_training-$version-py3-none-any.whl" archive="dist/dips_training-$version.tar.gz"
twine="$(command -v "${VENV:-.venv}/bin/twine" twine | head -n 1 || true)"

missing=()
lacks() { missing+=("$*"); }
has_docker() { command -v docker >/dev/null && docker version >/dev/null 2>&1; }
label() { docker image inspect --format "{{index .Config.Labels \"org.opencontainers.image.$2\"}}" "$1" 2>/dev/null; }

head="$(git rev-parse --verify HEAD 2>/dev/null || true)"
if [ -z "$head" ]; then
  lacks "this is no git checkout: publish from one, so that a release has its revision"
else
  [ -z "$(git status --porcelain)" ] || lacks "the checkout has changes: commit them, then build again"
  grep -qF "## [$version]" CHANGELOG.md ||
    lacks "CHANGELOG.md has no section [$version]: write it below the line of [Unreleased]"
fi

if [ "$only" != packages ]; then
  [ -n "${IMAGES:-}" ] || lacks "no registry is named: set IMAGES=REGISTRY/PATH, such as registry.example.org/dips"
  if ! has_docker; then
    lacks "there is no Docker engine that answers: install it, start it, or add this user to the group docker"
  elif [ -n "${IMAGES:-}" ]; then
    for role in "${roles[@]}"; do
      name="$IMAGES/dips-$role:$tag"
      if ! docker image inspect "$name" >/dev/null 2>&1; then
        lacks "there is no image $name: make images IMAGES=$IMAGES TAG=$tag"
      elif [ "$(label "$name" revision)" != "$head" ] || [ "$(label "$name" version)" != "$version" ]; then
        lacks "the image $name is not of this commit and version: make images IMAGES=$IMAGES TAG=$tag"
      fi
    done
  fi
fi

if [ "$only" != images ]; then
  for file in "$wheel" "$archive"; do
    [ -f "$file" ] || lacks "there is no $file: make dist"
  done
  [ -n "$twine" ] || lacks "twine is not installed: python3 -m pip install twine"
  [ -n "${TWINE_PASSWORD:-}" ] || [ -f "$HOME/.pypirc" ] ||
    lacks "there is no token of the package index: set TWINE_PASSWORD (for another than PyPI also TWINE_REPOSITORY_URL)"
  if [ -n "$twine" ] && [ -f "$wheel" ] && [ -f "$archive" ]; then
    why="$("$twine" check --strict "$wheel" "$archive" 2>&1)" ||
      lacks "twine finds fault with the packages (${why##*$'\n'}): mend pyproject.toml or README.md, then make dist"
  fi
fi

if [ -z "$dry" ] && [ "${#missing[@]}" -gt 0 ]; then
  printf 'publish: %s\n' "${missing[@]}" "nothing was published" >&2
  exit 2
fi

# A command, or with --dry-run its words. Credentials are in the environment only, so none is printed.
run() { if [ -n "$dry" ]; then echo "would run: $*"; else "$@"; fi; }

digests=()
if [ "$only" != packages ]; then
  images="${IMAGES:-REGISTRY/PATH}"
  for role in "${roles[@]}"; do
    name="$images/dips-$role:$tag"
    run docker push "$name" ||
      fail "$name was refused: docker login ${images%%/*}, as a user who may write there (no package was published)"
    [ -n "$dry" ] || digest="$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$name" |
      sed -n "s#^$images/dips-$role@##p" | head -n 1)"
    [ -n "$dry" ] || digests+=("\"$role=$digest\"")
  done
fi
if [ "$only" != images ]; then
  export TWINE_USERNAME="${TWINE_USERNAME:-__token__}"
  run "${twine:-twine}" upload --non-interactive "$wheel" "$archive" ||
    fail "the packages were refused: the token must be for dips-training, and $version must not be there already"
fi

if [ -n "$dry" ]; then
  [ "${#missing[@]}" = 0 ] || printf 'missing: %s\n' "${missing[@]}"
elif [ "${#digests[@]}" -gt 0 ]; then
  echo "for the file of dips deploy:"
  echo "images = \"$IMAGES\""
  echo "tag = \"$tag\""
  (IFS=,; echo "digests = [${digests[*]}]" | sed 's/,/, /g')
fi
