# Prefill and decode workers: PyTorch, NIXL and the compiled CPU kernels.
# Build from the repository's root: docker build -f docker/worker.Dockerfile -t tandem-worker .
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS dependencies
ARG LOCK=requirements/worker.lock
ENV PIP_CACHE_DIR=/var/cache/pip PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY requirements requirements/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/pip \
    python3 -m venv /opt/build \
    && python3 -m venv --without-pip /opt/venv \
    && /opt/build/bin/pip install --require-hashes --only-binary :all: -r requirements/build.lock \
    && /opt/build/bin/pip --python /opt/venv/bin/python3 install --require-hashes --only-binary :all: -r "${LOCK}"
# What the wheels carry and serving never loads: torch's tests and C++ headers, NIXL's expert-parallel CUDA kernels.
RUN rm -rf /opt/venv/lib/python3*/site-packages/torch/test \
           /opt/venv/lib/python3*/site-packages/torch/include \
           /opt/venv/lib/python3*/site-packages/torch/bin/test_* \
           /opt/venv/lib/python3*/site-packages/torch/bin/protoc* \
           /opt/venv/lib/python3*/site-packages/nixl_ep_cu*
COPY docker/triton_packages.py /opt/build/
RUN /opt/venv/bin/python3 /opt/build/triton_packages.py > /opt/triton-packages

# The kernels' file is named by a digest of the compiler's version and the sources' paths, so both are as they will be:
# `prebuilt-cxx` tells the version where there is no compiler.
FROM dependencies AS kernels
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY --chmod=0755 docker/prebuilt-cxx /opt/kernels/prebuilt-cxx
WORKDIR /opt/tandem
COPY tandem/__init__.py tandem/
COPY tandem/core tandem/core/
COPY tandem/compute/__init__.py tandem/compute/
COPY tandem/compute/native tandem/compute/native/
RUN g++ --version > /opt/kernels/prebuilt-cxx.version \
    && CXX=/opt/kernels/prebuilt-cxx TANDEM_CACHE_DIR=/opt/kernels \
       /opt/venv/bin/python3 -m tandem.compute.native.build

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
# Debian packages of the running image, besides the C compiler that Triton needs where torch is for GPUs.
ARG RUNTIME_PACKAGES=
LABEL org.opencontainers.image.title="tandem-worker" \
      org.opencontainers.image.description="Tandem's prefill and decode workers" \
      org.opencontainers.image.licenses="Apache-2.0"
# NOTE: copied, not mounted: buildah takes a layer from its cache whatever the files are that were mounted for it.
COPY --from=dependencies /opt/triton-packages /opt/triton-packages
# hadolint ignore=DL3008,SC2086
RUN groupadd --gid 10001 tandem \
    && useradd --uid 10001 --gid tandem --home-dir /var/cache/tandem --create-home --shell /usr/sbin/nologin tandem \
    && packages="${RUNTIME_PACKAGES} $(cat /opt/triton-packages)" \
    && if [ -n "${packages# }" ]; then \
         apt-get update && apt-get install -y --no-install-recommends ${packages} && rm -rf /var/lib/apt/lists/*; \
       fi
# A container is reached from outside, so a worker listens on every address of it and advertises its first one.
ENV PATH=/opt/tandem/bin:/opt/venv/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPATH=/opt/tandem \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/var/cache/tandem \
    HF_HOME=/var/cache/tandem/huggingface \
    TMPDIR=/tmp \
    CXX=/opt/kernels/prebuilt-cxx \
    TANDEM_CACHE_DIR=/opt/kernels \
    TANDEM_BIND=0.0.0.0:7900 \
    TANDEM_ADVERTISE=auto \
    TANDEM_METRICS_PORT=7901 \
    HEALTH_URL=http://127.0.0.1:7901/health
WORKDIR /var/cache/tandem
USER 10001:10001
EXPOSE 7900 7901 7902
HEALTHCHECK --interval=5s --timeout=3s --start-period=300s --retries=3 \
    CMD ["python3", "-c", "import os, urllib.request as u; u.urlopen(os.environ['HEALTH_URL'], timeout=2)"]
ENTRYPOINT ["python3", "-m"]
CMD ["services.decode"]
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=kernels /opt/kernels /opt/kernels
COPY --from=application /opt/tandem /opt/tandem
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
