# The base needs Python >= 3.11 with venv as `python3`. Pin it by digest for a release: --build-arg BASE_IMAGE=python@sha256:...
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS builder
COPY requirements.lock requirements-build.lock /src/
# Two environments: pip and setuptools stay in /opt/build, only what runs goes into /opt/venv. Every file is checked by its hash.
RUN export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore \
 && python3 -m venv /opt/build \
 && python3 -m venv --without-pip /opt/venv \
 && /opt/build/bin/pip install --require-hashes -r /src/requirements-build.lock \
 && /opt/build/bin/pip --python /opt/venv/bin/python install --require-hashes -r /src/requirements.lock
COPY pyproject.toml README.md LICENSE /src/
COPY operator /src/operator
# The lock's packages were compiled when pip installed them, ours is now: at run time the file system is read-only.
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels /src \
 && /opt/build/bin/pip --python /opt/venv/bin/python install --no-deps --no-index /wheels/*.whl \
 && /opt/venv/bin/pd-operator --version

FROM ${BASE_IMAGE}
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="pd-operator" \
      org.opencontainers.image.description="Kubernetes operator that runs disaggregated prefill/decode serving of large language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=builder /opt/venv /opt/venv
# USER, because kopf asks for the user's name (getpass.getuser) and uid 65532 has none.
ENV USER=pd-operator PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
ENTRYPOINT ["pd-operator", "run"]
