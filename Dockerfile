# For CUDA:    docker build -t leanft .
# For a CPU:   docker build -t leanft --build-arg DEVICE=cpu .
# Run a recipe in the current folder, without `--gpus all` on a CPU:
#              docker run --rm -it --gpus all --shm-size 8g --user "$(id -u):$(id -g)" -v "$PWD:/work" \
#                  leanft run full_finetune_single_device --config tiny/full
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
ARG DEVICE=cuda
ARG EXTRAS=plots,datasets,serve,gguf
RUN python -m venv /opt/leanft
ENV PATH=/opt/leanft/bin:$PATH
WORKDIR /source
COPY constraints.txt .
# Torch first and pinned. Its packages include CUDA, so the base image needs none. PyTorch's index has 2.13.0+cpu, which pip
# prefers to PyPI's 2.13.0.
RUN [ "$DEVICE" != cpu ] || set -- --extra-index-url https://download.pytorch.org/whl/cpu; \
    pip install --no-cache-dir "$@" --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY recipes recipes
COPY lean_ft lean_ft
RUN pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

FROM python:${PYTHON}-slim
# torch.compile and Triton need a compiler.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 leanft && chmod 1777 /home/leanft
COPY --from=build /opt/leanft /opt/leanft
# With another --user, which has no home and no name, caches and torch still find both here.
ENV PATH=/opt/leanft/bin:$PATH HOME=/home/leanft USER=leanft
USER 1000
WORKDIR /work
ENTRYPOINT ["leanft"]
CMD ["--help"]
