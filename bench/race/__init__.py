"""`make race`: the same client, seeds and cores against Tandem and its peers in turn; docs/race.md explains."""
