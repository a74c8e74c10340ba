"""Ways of an embedding to a receiver that does not wait for it in a reply."""
