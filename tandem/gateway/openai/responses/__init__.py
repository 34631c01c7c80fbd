"""OpenAI's Responses API: answers made of items; stored, chained, streamed or run in the background."""
