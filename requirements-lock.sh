#!/bin/sh
# Writes the lock files; run by `make lock`. Left out on purpose: torchvision, torchaudio and torchcodec, whose
# published builds are linked to CUDA and break transformers beside a CPU torch, and triton, which a CPU does not use.
set -e
leave_out="--unsafe-package torchvision --unsafe-package torchaudio --unsafe-package torchcodec \
  --unsafe-package triton --unsafe-package pip"
options="--quiet --generate-hashes --strip-extras --no-emit-index-url --no-emit-find-links \
  --no-emit-trusted-host --no-annotate --no-header"
# websockets: the OpenAI Agents SDK, which the tests run beside the gateway, wants one below 17.
pip-compile $options $leave_out --extra cpu --extra geo -P 'websockets<17' -o requirements-cpu.lock pyproject.toml
printf 'hatchling\neditables\n' | pip-compile $options $leave_out -c requirements-cpu.lock -o requirements-build.lock -
pip-compile $options $leave_out --extra dev -c requirements-cpu.lock -o requirements-dev.lock pyproject.toml
# Beside the others: who runs one gateway a machine needs none of it.
pip-compile $options $leave_out --extra ray -c requirements-cpu.lock -c requirements-dev.lock -o requirements-ray.lock \
  pyproject.toml
