"""What is run by the interpreters of the peers' environments: they hold neither tandem nor its dependencies."""
