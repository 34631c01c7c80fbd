"""Fleet simulator in virtual time: production's routing and planning decisions, workers modelled by their speed."""
