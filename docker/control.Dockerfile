# Gateway, router, planner and load test: the control plane, without torch.
# Build from the repository's root: docker build -f docker/control.Dockerfile -t tandem-control .
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS dependencies
ARG LOCK=requirements/control.lock
ENV PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements requirements/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/pip \
    python3 -m venv /opt/build \
    && python3 -m venv --without-pip /opt/venv \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements/build.lock \
    && /opt/build/bin/pip --python /opt/venv/bin/python3 install --require-hashes --only-binary :all: -r "${LOCK}"

FROM dependencies AS application
# A release names its base image by digest: a tag may be moved to another image.
ARG BASE_IMAGE
ARG VERSION=dev
RUN case "${VERSION} ${BASE_IMAGE}" in \
      "dev "* | *" "*@sha256:*) ;; \
      *) echo "VERSION=${VERSION} is a release, BASE_IMAGE=${BASE_IMAGE} has no digest: make image-digests" >&2; exit 1 ;; \
    esac
COPY LICENSE README.md pyproject.toml ./
COPY proto proto/
COPY services services/
COPY tandem tandem/
# Nothing is fetched here: setuptools, too, is of the lock.
RUN /opt/build/bin/python3 -m tandem.rpc.compile \
    && /opt/build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir dist . \
    && /opt/build/bin/pip --python /opt/venv/bin/python3 install \
       --no-index --no-deps --target /opt/tandem dist/*.whl \
    && PYTHONPATH=/opt/tandem /opt/build/bin/cyclonedx-py environment --output-reproducible \
       --output-file /opt/tandem/sbom.cdx.json /opt/venv/bin/python3

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="tandem-control" \
      org.opencontainers.image.description="Tandem's gateway, router, planner and load test" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid tandem --home-dir /var/cache/tandem --create-home --shell /usr/sbin/nologin tandem
# A container is reached from outside, so services listen on every address of it. HEALTH_URL: of the gateway; say another.
ENV PATH=/opt/tandem/bin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/tandem \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/tandem \
    HF_HOME=/var/cache/tandem/huggingface \
    MPLCONFIGDIR=/tmp/matplotlib \
    TMPDIR=/tmp \
    TANDEM_HOST=0.0.0.0 \
    TANDEM_BIND=0.0.0.0:7800 \
    HEALTH_URL=http://127.0.0.1:8000/health
WORKDIR /var/cache/tandem
USER 10001:10001
EXPOSE 8000 8001 7800 7801 7951
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen(os.environ['HEALTH_URL'], timeout=2)"]
ENTRYPOINT ["python3", "-m"]
CMD ["services.gateway"]
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=application /opt/tandem /opt/tandem
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
