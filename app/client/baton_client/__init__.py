"""Talk to a Baton gateway: chats that start from handoffs, conversations, scenes, and a transport for SDKs.

`Baton` and `AsyncBaton` are the clients; `HandoffTransport` and `AsyncHandoffTransport` go under the clients
of others. `baton_client.httpx2` has the transports for SDKs that are built on httpx2.
"""

from __future__ import annotations

from baton_client.client import AsyncBaton, Baton
from baton_client.conversation import AsyncConversation, Conversation
from baton_client.errors import (
    ApiError,
    BadAnswer,
    BatonError,
    Conflict,
    ConnectionLost,
    HandoffFailed,
    HandoffNotReady,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    SceneFailed,
    ServerFailed,
    TimedOut,
)
from baton_client.handoffs import AsyncHandoffs, Handoffs
from baton_client.transport import AsyncHandoffTransport, HandoffTransport
from baton_client.values import (
    Answer,
    ContextMessages,
    Engine,
    Handoff,
    KeptScene,
    Progress,
    SceneAnswer,
    Source,
)

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "ApiError",
    "AsyncBaton",
    "AsyncConversation",
    "AsyncHandoffTransport",
    "AsyncHandoffs",
    "BadAnswer",
    "Baton",
    "BatonError",
    "Conflict",
    "ConnectionLost",
    "ContextMessages",
    "Conversation",
    "Engine",
    "Handoff",
    "HandoffFailed",
    "HandoffNotReady",
    "HandoffTransport",
    "Handoffs",
    "InvalidRequest",
    "KeptScene",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "Progress",
    "SceneAnswer",
    "SceneFailed",
    "ServerFailed",
    "Source",
    "TimedOut",
]
