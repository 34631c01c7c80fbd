"""Scripts for the interpreters of the peers' environments, which hold neither tandem nor its dependencies."""
