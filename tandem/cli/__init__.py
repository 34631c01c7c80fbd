"""The `tandem` command: subcommands that are thin layers over the library."""
