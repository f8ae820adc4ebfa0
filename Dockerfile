# The image of the nodes on Kubernetes (cluster/kuberay). From the root of the repository:
#   docker build --tag REGISTRY/elastic-ddp:0.1.0 .
#   docker push REGISTRY/elastic-ddp:0.1.0
# torch's wheels bring CUDA 13, so a GPU node needs NVIDIA's driver R580 or newer, and no CUDA of its own.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
# With an empty package, the dependencies are a layer that changes of the code do not rebuild.
RUN mkdir elastic_ddp && touch elastic_ddp/__init__.py \
    && /opt/venv/bin/pip install --constraint constraints.txt '.[gcp,examples]'
COPY elastic_ddp elastic_ddp
RUN /opt/venv/bin/pip install --no-deps --force-reinstall .

FROM python:${PYTHON}-slim-bookworm
# torch.compile calls a C compiler, NCCL loads the libraries of InfiniBand, and KubeRay's probes can call wget.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc ibverbs-providers libc6-dev libibverbs1 wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 ray
COPY --from=build /opt/venv /opt/venv
COPY examples /home/ray/elastic_ddp/examples
# NVIDIA's container runtime mounts the driver's libraries for these two.
ENV PATH=/opt/venv/bin:$PATH NVIDIA_DRIVER_CAPABILITIES=compute,utility PYTHONUNBUFFERED=1
# A number, because Kubernetes cannot check a name against runAsNonRoot.
USER 1000
WORKDIR /home/ray/elastic_ddp
CMD ["elastic-ddp", "--help"]
