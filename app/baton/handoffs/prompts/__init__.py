"""Write prompts: of chats, of texts, and after the contexts of handoffs."""
