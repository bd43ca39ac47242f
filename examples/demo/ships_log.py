"""The long text that the demo's agents read: a ship's log, the same every time, with a few facts in it."""

from __future__ import annotations

DAYS = 82
"""About 3,900 tokens of SmolLM2's: slow enough to prefill on two cores to be seen, and not to bore."""
FEW_DAYS = 8

TITLE = "The log of the brig Marigold, on her way north."
WEATHER = (
    "A light wind from the west",
    "Thick fog until noon",
    "Hard frost",
    "Rain all day",
    "A clear sky and still water",
    "Sleet and a short swell",
    "A warm wind from the south",
)
PLACES = (
    "the gravel bar",
    "the birch point",
    "the old beacon",
    "the narrow sound",
    "the seal rocks",
    "the lake above the falls",
    "the black cliff",
    "the mouth of the river",
)
CREW = ("Ilka", "Tomas", "Oda", "Jun", "Mirela")
WORK = (
    "mended the foresail",
    "drew the shore",
    "dried the bread in the sun",
    "caulked the small boat",
    "sounded the channel",
    "cut firewood",
    "wrote letters that nobody can post",
    "boiled pitch",
    "sorted the stones",
)
SUPPER = (
    "barley soup",
    "salted cod",
    "pea broth",
    "oat bread and cheese",
    "boiled roots",
    "smoked herring",
)
EVENTS = {
    1: "We left the harbour of Kestrel Bay at dawn, five people and a dog called Biscuit.",
    12: "Oda found a blue fern that none of us can name, and pressed two leaves of it.",
    23: "Jun broke the compass on the rocks; from now on we steer by the stars.",
    35: "Tomas counted the stores: forty sacks of flour are left, and one of sugar.",
    47: "Mirela saw a white owl on the beacon; it followed us for three nights.",
    58: "We found the wreck of the ship Halcyon, her bell still hanging, and took the bell with us.",
    69: "Ilka named the island at the end of the sound Lantern Island, for the lights over it.",
}
"""What happened only once, by day."""


def ships_log(days: int = DAYS, copy: str = "") -> str:
    """The log.

    Args:
        days: how many of them.
        copy: a number that the text begins with, so that nobody has this very text in a cache.
    """
    head = f"Copy {copy}. {TITLE}" if copy else TITLE
    return head + "\n\n" + "\n".join(_entry(day) for day in range(1, days + 1))


def _entry(day: int) -> str:
    """One day; the steps through the lists differ, so that no two days are alike for a long time."""
    one, other = CREW[day * 2 % len(CREW)], CREW[(day * 2 + 1) % len(CREW)]
    lines = [
        f"Day {day}. {_of(WEATHER, day * 3)}.",
        f"We made {4 + day * 7 % 19} miles and camped at {_of(PLACES, day * 5)}.",
        f"{one} {_of(WORK, day * 4)} while {other} {_of(WORK, day * 7 + 1)}.",
        f"Supper was {_of(SUPPER, day * 5)}.",
        EVENTS.get(day, ""),
    ]
    return " ".join(lines).rstrip()


def _of(words: tuple[str, ...], number: int) -> str:
    return words[number % len(words)]
