"""The web pages: a playground and a view of the cluster. Plain files, served by the gateway, without a build step."""
