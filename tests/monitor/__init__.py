"""A real Prometheus for tests, with series of any past, and pages to scrape."""
