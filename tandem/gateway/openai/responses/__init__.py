"""OpenAI's Responses API: answers made of items, stored and chained, streamed or run in the background."""
