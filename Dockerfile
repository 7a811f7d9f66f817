# One small image for each role: docker build --target master|slave|worker .
#
# Works with BuildKit and with the builder before it (which makes all stages up to the target, so they stand in order of
# size). Everything that is installed is pinned by constraints.txt; to pin the base too, give it with its digest:
#   docker build --build-arg BASE=python:3.11-slim@sha256:... --target slave .
# On machines without a CUDA device give --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu, or the worker's
# image holds gigabytes of CUDA packages.
ARG BASE=python:3.11-slim

# ---- what is the same everywhere: a user, its folders, the entry point, the health check ----

# No program in an image changes its user, and nothing installs into one: both would only serve an intruder.

FROM ${BASE} AS common
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} + \
 && find /usr -depth \( -name "pip" -o -name "pip-*" -o -name "pip3*" -o -name ensurepip \) -exec rm -rf {} + \
 && groupadd --gid 10001 dips \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin dips \
 && install -d -o 10001 -g 10001 -m 0700 /var/lib/dips /var/lib/heldout /etc/dips/keys \
 && install -d /opt/dips
ENV HOME=/tmp NUMBA_CACHE_DIR=/tmp/numba PATH=/opt/dips/venv/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
COPY deploy/docker/start deploy/docker/health.py /opt/dips/
WORKDIR /var/lib/dips
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/dips/start"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["python", "-I", "-S", "/opt/dips/health.py"]

# ---- packages: `venv` is a bare environment; each role's stage fills one with what the role needs. This package stands in
# ---- a layer of its own above them: after a change of the sources only that one is made anew, once for all roles.

FROM ${BASE} AS venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PIP_DEFAULT_TIMEOUT=120
WORKDIR /build
RUN python -m venv --without-pip /opt/dips/venv
COPY constraints.txt pyproject.toml deploy/docker/requirements.py ./

FROM venv AS package
COPY . .
RUN python -m pip wheel --no-deps --wheel-dir /wheels . \
 && python -m pip --python /opt/dips/venv/bin/python install --no-deps /wheels/*.whl

FROM venv AS base-packages
RUN python requirements.py >needed.txt \
 && python -m pip --python /opt/dips/venv/bin/python install --constraint constraints.txt --requirement needed.txt

FROM base-packages AS master-packages
RUN python requirements.py master deploy >needed.txt \
 && python -m pip --python /opt/dips/venv/bin/python install --constraint constraints.txt --requirement needed.txt

FROM common AS master
COPY --from=master-packages /opt/dips/venv /opt/dips/venv
COPY --from=package /opt/dips/venv /opt/dips/venv
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
 CMD ["python", "-I", "-S", "/opt/dips/health.py", "--page"]
CMD ["dips", "master", "--help"]

# The keys of a run that is described by one file (docker-compose.yml): a folder for each identity, so that each can be
# a volume of its own, which only its process sees.
FROM master AS keys
ARG IDENTITIES="ca master slave-0 slave-1 cluster-a cluster-b cluster-c cluster-d operator heldout prometheus"
USER 0
RUN for name in ${IDENTITIES}; do install -d -o 10001 -g 10001 -m 0700 "/keys/${name}"; done
COPY deploy/docker/hand_out_keys.py /opt/dips/
USER 10001:10001
HEALTHCHECK NONE
CMD ["python", "/opt/dips/hand_out_keys.py"]

FROM base-packages AS slave-packages
RUN python requirements.py slave >needed.txt \
 && python -m pip --python /opt/dips/venv/bin/python install --constraint constraints.txt --requirement needed.txt

FROM common AS slave
COPY --from=slave-packages /opt/dips/venv /opt/dips/venv
COPY --from=package /opt/dips/venv /opt/dips/venv
RUN NUMBA_CACHE_DIR=/opt/dips/kernels dips warm-up
USER 10001:10001
CMD ["dips", "slave", "--help"]

FROM slave-packages AS worker-packages
ARG TORCH_INDEX=
RUN if [ -n "${TORCH_INDEX}" ]; then \
      python -m pip --python /opt/dips/venv/bin/python install --constraint constraints.txt --no-deps \
        --index-url "${TORCH_INDEX}" torch; \
    fi
RUN python requirements.py worker >needed.txt \
 && python -m pip --python /opt/dips/venv/bin/python install --constraint constraints.txt --requirement needed.txt

FROM common AS worker
COPY --from=worker-packages /opt/dips/venv /opt/dips/venv
COPY --from=package /opt/dips/venv /opt/dips/venv
COPY --from=slave /opt/dips/kernels /opt/dips/kernels
USER 10001:10001
CMD ["dips", "train", "--help"]

# The worker of docker-compose.yml, and what shapes the network of one, which it joins: in one image, so that a changed
# one makes both containers again. A link that is left joins a container that is gone, and cannot start.
FROM worker AS linked-worker
USER 0
RUN apt-get update -q \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends iproute2 \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/docker/link.py /opt/dips/
USER 10001:10001
