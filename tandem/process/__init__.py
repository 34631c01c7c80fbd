"""Parts of every process: settings, lifecycle, discovery and the view of the workers. It answers no call itself."""
