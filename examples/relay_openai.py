"""A relay with the unmodified OpenAI SDK: a reader, three specialists at once, an editor after one of them.

Run it with `pip install openai`, then: python relay_openai.py [BASE_URL [MODEL]]
"""

import asyncio
import sys

from openai import AsyncOpenAI

BASE_URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = sys.argv[2] if len(sys.argv) > 2 else "smollm2"
EVENTS = {
    5: "Jun broke the compass on the rocks.",
    12: "Mirela saw a white owl on the beacon.",
    20: "Tomas counted the stores: forty sacks of flour are left.",
    28: "Ilka named the island at the end of the sound Lantern Island.",
}
LOG = "\n".join(
    f"Day {day}. We made {4 + day * 7 % 19} miles under sail. {EVENTS.get(day, '')}" for day in range(1, 33)
)


async def ask(client: AsyncOpenAI, question: str, handoff: dict[str, str | bool]) -> str | None:
    """Ask one thing and print the answer; the id of the handoff that it leaves behind, if it does."""
    answer = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=24,
        temperature=0,
        extra_body={"handoff": handoff},
    )
    told = answer.handoff
    outcome = told["source"]["outcome"] if "source" in told else "read"
    cached, prompt = answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens
    print(f"{question.splitlines()[-1]} {answer.choices[0].message.content}")
    print(f"    {outcome}: {cached} of {prompt} prompt tokens cached")
    return told.get("id")


async def main() -> None:
    """Read once, ask three things at the same time, and go on from one of the answers."""
    async with AsyncOpenAI(base_url=BASE_URL, api_key="none") as client:
        read = await ask(client, f"{LOG}\n\nWhat is the name of the island?", {"save": True})
        # Only the new messages are sent: what was said before comes with the handoff.
        _, seen, _ = await asyncio.gather(
            ask(client, "What did Jun break?", {"from": read}),
            ask(client, "What did Mirela see on the beacon?", {"from": read, "save": True}),
            ask(client, "What did Tomas count?", {"from": read}),
        )
        await ask(client, "Write one sentence about the whole voyage.", {"from": seen})


if __name__ == "__main__":
    asyncio.run(main())
