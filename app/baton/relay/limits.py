"""Refuse contexts that hold more than they may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.config.groups import HandoffSettings
from baton.engines.engine import LocalEngine
from baton.errors import InvalidRequest
from baton.images.placed_image import PlacedImage
from baton.relay.join import Part

LATENT_STEPS_PER_CONTEXT = 512
"""Most latent steps of a context, unless one request may ask for more: lost KV of all of them is recomputed
in one step of the engine."""


@dataclass(frozen=True)
class ContextLimits:
    """What a context may hold.

    Attributes:
        settings: limits of handoffs.
    """

    settings: HandoffSettings

    def require_few_steps(self, steps: int) -> None:
        """Refuse more latent steps than a context may hold.

        Args:
            steps: number of steps, with those of the handoff that it continues.

        Raises:
            InvalidRequest: there are more.
        """
        most = max(LATENT_STEPS_PER_CONTEXT, self.settings.latent_steps_max)
        if steps > most:
            raise InvalidRequest(
                f"The context would hold {steps} latent steps, with those of the handoff that it continues; "
                f"at most {most} are allowed.",
                param="latent_steps",
            )

    def require_few_images(self, engine: LocalEngine, images: Sequence[PlacedImage]) -> None:
        """Refuse more images, in the handoff and the request together, than the model takes.

        Args:
            engine: the engine that answers.
            images: all images of the context.

        Raises:
            InvalidRequest: there are more.
        """
        found, most = len(images), engine.images.limit
        if found > most:
            raise InvalidRequest(
                f"The context holds {found} images, with those of its handoff; the model '{engine.name}' "
                f"takes at most {most}.",
                param="messages",
            )

    def require_light_images(self, images: Sequence[PlacedImage]) -> None:
        """Refuse images that are too large to save, before the engine begins.

        Args:
            images: all images of the context.

        Raises:
            InvalidRequest: they take more bytes than a handoff may hold.
        """
        size = sum({image.digest: len(image.image.data) for image in images}.values())
        if size > (most := self.settings.image_bytes):
            raise InvalidRequest(
                f"The context's images take {size} bytes; a handoff may hold at most {most} "
                "(setting handoffs.image_bytes). Send smaller images, or do not save a handoff.",
                param="messages",
            )

    def require_light_parts(self, parts: Sequence[Part]) -> None:
        """Refuse to join handoffs whose images take more bytes than those of one handoff may.

        Args:
            parts: the handoffs, in the order in which they are joined.

        Raises:
            InvalidRequest: they do; `param` names the part that passes the limit.
        """
        sizes = dict[str, int]()
        for part in parts:
            sizes |= {image.digest: image.bytes for image in part.record.images}
            if (size := sum(sizes.values())) > (most := self.settings.image_bytes):
                raise InvalidRequest(
                    f"{part.where}: the images of the joined contexts take at least {size} bytes; they may "
                    f"take {most} (setting handoffs.image_bytes). Join fewer.",
                    param=part.where,
                )
