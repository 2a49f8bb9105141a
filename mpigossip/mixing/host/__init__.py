"""Messages in host memory: outboxes that neighbours read in place, inboxes that they put into."""
