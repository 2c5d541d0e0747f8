# An image for every task of a training: the package, torch and Ray, on Python or on an image of Ray (docs/guides/kubernetes.md).
#
#   docker build -t transfer-queue .
#   docker build -t transfer-queue --build-arg BASE=rayproject/ray:2.60.0-py312-gpu .
#
# BASE needs Python 3.11 or later as `python`, with pip. EXTRAS are those of pyproject.toml. TORCH is a requirement of
# pip: torch==2.13.0+cpu with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu makes an image without CUDA.
# The versions are those of constraints.txt.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS wheel
USER root
WORKDIR /source
COPY pyproject.toml MANIFEST.in README.md LICENSE ./
COPY src src
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM ${BASE}
ARG EXTRAS=live
ARG TORCH=torch
ARG PIP_EXTRA_INDEX_URL=
USER root
# The probes that KubeRay adds to a pod call wget.
RUN command -v wget >/dev/null \
    || { apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/*; }
COPY constraints.txt /tmp/constraints.txt
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt "${TORCH}"
COPY --from=wheel /wheel /tmp/wheel
# ray[default] has the agents whose health the probes of KubeRay ask for.
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt \
    "$(echo /tmp/wheel/*.whl)[${EXTRAS}]" "ray[default]"
# Images of Ray have a user with this number. torch needs a user with a name.
RUN id -un 1000 >/dev/null 2>&1 || useradd --uid 1000 --create-home tq
USER 1000
WORKDIR /home
# Fails if this container cannot run a system, or if one that runs in it does not reply.
HEALTHCHECK --interval=30s --timeout=10s --start-period=30s --retries=10 CMD ["tq", "doctor", "--no-test", "--json"]
CMD ["tq", "doctor"]
