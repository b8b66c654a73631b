"""What is served over HTTP: ``measured``: what a process knows of itself, ``metrics``: for Prometheus, ``serving``: the pages.  Nothing here asks the store: a scrape is told what was last known."""
