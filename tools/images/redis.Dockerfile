# A Redis for end-to-end tests, where no registry offers one.
ARG BASE_IMAGE
FROM ${BASE_IMAGE}
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends redis-server && rm -rf /var/lib/apt/lists/*
USER 10001:10001
ENTRYPOINT ["redis-server"]
CMD ["--bind", "0.0.0.0", "--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir", "/tmp"]
