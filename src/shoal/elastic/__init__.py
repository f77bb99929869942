"""Several nodes train one job, and may leave, fail or join while it trains; see docs/elastic.md."""
