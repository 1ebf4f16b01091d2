# A node of a training attempt: python -m trainer.node. Torch, DeepSpeed and what reads the data; no Dagster, no database
# driver, no Kubernetes client. The code that trains is the run's own, staged on the shared volume (PYTHONPATH); the tree
# in the image is what `headway doctor --cluster` starts.
#
#   docker build -f deploy/docker/trainer.Dockerfile --build-arg PYTHON_IMAGE=... -t REGISTRY/headway/trainer:0.1.0 .
#
# PYTHON_IMAGE is a reference by digest. The zeros are no image: whoever builds says which base was looked at, e.g. what
# `docker buildx imagetools inspect docker.io/library/python:3.11-slim-bookworm` prints on the day of the build. With
# other accelerators than the ones that PyPI's torch wheel serves, take a base that brings the driver's user libraries.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:0000000000000000000000000000000000000000000000000000000000000000

FROM ${PYTHON_IMAGE} AS build
ENV DS_BUILD_OPS=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY constraints.txt ./
RUN pip install -c constraints.txt pip setuptools wheel \
    && pip install -c constraints.txt torch==2.13.0 ninja \
    && pip install -c constraints.txt --no-build-isolation deepspeed \
    && pip install -c constraints.txt numpy pyarrow safetensors scikit-learn scipy threadpoolctl

FROM ${PYTHON_IMAGE}
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp TRITON_CACHE_DIR=/tmp/triton TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
COPY --from=build /opt/venv /opt/venv
COPY trainer /app/trainer
COPY pipelines /app/pipelines
WORKDIR /app
USER 65532:65532
CMD ["python", "-m", "trainer.node", "--help"]
