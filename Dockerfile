# Foretell on a CPU. Linted with hadolint; not built or run by the project's tests.
#   docker build -t foretell .
#   docker run --rm -p 127.0.0.1:8000:8000 -v foretell-cache:/cache -e HF_TOKEN foretell
FROM python:3.11-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ \
    && rm -rf /var/lib/apt/lists/*
# This index has CPU builds of torch, which sort before PyPI's CUDA builds of the same version.
ENV PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
COPY . /foretell
RUN python -m venv /venv && /venv/bin/python /foretell/requirements/install.py runtime --copy

FROM python:3.11-slim-bookworm
RUN useradd --create-home --uid 10001 foretell && install -d -o foretell -g foretell /cache
COPY --from=build /venv /venv
ENV PATH=/venv/bin:$PATH FORETELL_HOME=/cache/foretell HF_HOME=/cache/huggingface
USER 10001
WORKDIR /home/foretell
VOLUME /cache
EXPOSE 8000
# The first start downloads the model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["foretell"]
CMD ["serve", "--host", "0.0.0.0"]
