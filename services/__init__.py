"""Entry points of Tandem's processes, one package each: read settings, then run the library's service."""
