# syntax=docker/dockerfile:1
# docker build -t ucp .
# docker run --rm -v /checkpoints:/checkpoints ucp inspect /checkpoints/run
FROM python:3.13-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --wheel-dir /wheels ".[s3,gcs]"

FROM python:3.13-slim
# hadolint ignore=DL3013 -- the wheels of the first stage are the only candidates
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-index --find-links /wheels "universal-checkpoint[s3,gcs]" \
    && useradd --create-home --uid 1000 ucp
USER 1000
WORKDIR /home/ucp
ENTRYPOINT ["ucp"]
CMD ["--help"]
