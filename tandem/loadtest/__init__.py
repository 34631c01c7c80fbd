"""Load on a gateway as users make it, measured from their side: `tandem load`."""
