# A server of promoted versions: headway serve. Torch scores; DeepSpeed and the Kubernetes client stay outside.
#
#   docker build -f deploy/docker/serving.Dockerfile --build-arg PYTHON_IMAGE=... -t REGISTRY/headway/serving:0.1.0 .
#
# PYTHON_IMAGE is a reference by digest. The zeros are no image: whoever builds says which base was looked at, e.g. what
# `docker buildx imagetools inspect docker.io/library/python:3.11-slim-bookworm` prints on the day of the build.
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm@sha256:0000000000000000000000000000000000000000000000000000000000000000

FROM ${PYTHON_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN apt-get update && apt-get install -y --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /app
COPY constraints.txt ./
RUN pip install -c constraints.txt pip setuptools wheel \
    && pip install -c constraints.txt torch==2.13.0 safetensors scikit-learn
COPY LICENSE README.md pyproject.toml ./
COPY headway headway
COPY pipelines pipelines
COPY trainer trainer
RUN pip install -c constraints.txt --build-constraint constraints.txt -e . \
    && python -m compileall -q /app

FROM ${PYTHON_IMAGE}
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp MPLBACKEND=Agg MPLCONFIGDIR=/tmp/matplotlib NUMBA_CACHE_DIR=/tmp/numba
COPY --from=build /opt/venv /opt/venv
COPY --from=build /app /app
WORKDIR /app
USER 65532:65532
CMD ["headway", "serve", "--host", "0.0.0.0", "--port", "8080"]
