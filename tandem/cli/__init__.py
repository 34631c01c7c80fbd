"""The `tandem` command: thin verbs over the library."""
