# The code location, the pods of its runs and steps, Dagster's webserver and daemon, and Headway's reconciler.
# Runs and steps score and evaluate models in subprocesses of trainer/, so torch is inside.
#
#   docker build -f deploy/docker/code-location.Dockerfile --build-arg PYTHON_IMAGE=... -t REGISTRY/headway/code-location:0.1.0 .
#
# PYTHON_IMAGE is a reference by digest. The zeros are no image: whoever builds says which base was looked at, e.g. what
# `docker buildx imagetools inspect docker.io/library/python:3.11-slim-bookworm` prints on the day of the build.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:0000000000000000000000000000000000000000000000000000000000000000

FROM ${PYTHON_IMAGE} AS build
ENV DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY constraints.txt ./
# The Makefile's order: DeepSpeed looks for torch while it is built.
RUN pip install -c constraints.txt pip setuptools wheel \
    && pip install -c constraints.txt torch==2.13.0 ninja \
    && pip install -c constraints.txt --no-build-isolation deepspeed
COPY LICENSE README.md pyproject.toml workspace.yaml ./
COPY assets assets
COPY headway headway
COPY pipelines pipelines
COPY resources resources
COPY trainer trainer
# Editable: the application runs from its tree, and a run's code digest is that of the tree.
RUN pip install -c constraints.txt --build-constraint constraints.txt -e '.[cluster,train]' \
    && python -m compileall -q /app

FROM ${PYTHON_IMAGE}
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp MPLBACKEND=Agg MPLCONFIGDIR=/tmp/matplotlib NUMBA_CACHE_DIR=/tmp/numba \
    DAGSTER_DISABLE_TELEMETRY=yes
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
WORKDIR /app
USER 65532:65532
# No ENTRYPOINT: Dagster gives its run and step pods `args` only.
CMD ["headway", "--help"]
