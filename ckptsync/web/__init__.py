"""What is served over HTTP: ``metrics`` for Prometheus, ``serving`` the two pages.  Nothing here asks the store: a scrape is told what was last known."""
