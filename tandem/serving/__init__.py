"""Parts that all processes share: settings, lifecycle and discovery."""
